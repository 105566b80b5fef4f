"""Tiny checkpoints with random weights, for any architecture that an installed plugin knows."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from infer.contracts.model import ModelContext, ModelProtocol
from infer.contracts.sections import Settings
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins

VOCAB = 96
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": None,
    "hidden_size_per_layer_input": 8,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "n_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "full_attn_idxs": [1],
    "attn_layer_indices": [1],
    "hybrid_override_pattern": "M-*",
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_d_ssm": 64,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""config.json of the checkpoints. A family reads the fields that it knows."""
OWN: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "KimiLinearForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
}
"""Fields by architecture, whose names other families give another meaning."""
_kept: list[tempfile.TemporaryDirectory[str]] = []
"""The folders that were made for callers who named none. They are deleted when the process ends."""


def tiny_checkpoint(
    architecture: str,
    folder: Path | str | None = None,
    *,
    plugins: Sequence[object] = (),
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint of two small layers: config.json, model.safetensors and a tokenizer with one token per letter,
    so that it can be served, too. Its weights have the names and shapes that the family that knows ``architecture``
    expects, and its sliding windows, where the architecture has any unasked, have 24 positions. ``config`` are further
    fields of config.json, or others in place of those of ``CONFIG``; ``plugins`` are modules in addition to the
    installed ones. Without a ``folder``, a temporary one is made. Raises PluginError if no plugin, or more than one,
    knows the architecture."""
    if folder is None:
        _kept.append(tempfile.TemporaryDirectory(prefix="infer-"))
        folder = _kept[-1].name
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = CONFIG | {"architectures": [architecture]} | OWN.get(architecture, {}) | config
    fields.setdefault("vocab_size_per_layer_input", fields["vocab_size"])
    offer = Plugins.discover(plugins).choose("model", Settings(), [architecture])
    context = ModelContext(ReferenceKernels(), torch.float32, torch.device("cpu"), 512)
    model: ModelProtocol = offer.make(ModelProtocol, fields, context, offer.registration.settings())
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in model.expected().items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 0.3 * noise + name.endswith("norm.weight")
        else:
            tensors[name] = noise * (1.2 / shape[-1] ** 0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    letters(fields["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def letters(vocab_size: int) -> Tokenizer:
    """A tokenizer with an end and a beginning, and then a token for each character: those of ASCII from the space to
    "}", and others that nobody writes. An unknown character is "?"."""
    rare = (chr(code) for code in range(0x4E00, 0x110000) if not 0xD800 <= code < 0xE000)
    names = list(itertools.islice(itertools.chain(["</s>", "<s>"], map(chr, range(32, 126)), rare), vocab_size))
    made = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(names[:2])
    return made
