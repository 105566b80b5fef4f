"""The shapes of published models, as checkpoints without trained weights: speed depends on the shape alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "demo": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 416,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": LLAMA_3 | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "Llama-3.2-3B": LLAMA_3
    | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "Qwen3-0.6B": QWEN_3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Gemma-3-1B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Costs:
    """The least that a model of a given config has to read and compute, with K/V of 2 bytes per value."""

    config: Mapping[str, Any]
    quantization: str = "none"
    """As ``model.quantization``: plain weights have 2 bytes per value."""

    def __getattr__(self, key: str) -> Any:
        return self.config[key]

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The shape (N, K) of each weight of a layer, as the models pack them."""
        D, width, E = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * E, self.num_key_value_heads * E
        return {"qkv": (q + 2 * kv, D), "o": (D, q), "gate_up": (2 * width, D), "down": (D, width)}

    @property
    def layer_weights(self) -> int:
        """How many weights all layers have together."""
        return int(self.num_hidden_layers * sum(n * k for n, k in self.linear_shapes.values()))

    @property
    def head_weights(self) -> int:
        return int(self.vocab_size * self.hidden_size)

    def windows(self) -> list[int | None]:
        """Each layer's sliding window; None for full attention."""
        pattern, window = self.config.get("sliding_window_pattern"), self.config.get("sliding_window")
        return [window if pattern and (i + 1) % pattern else None for i in range(self.num_hidden_layers)]

    def seen(self, context: int) -> int:
        """How many positions, its own included, a query after ``context`` positions attends to, summed over all
        layers."""
        return sum(min(context + 1, window or context + 1) for window in self.windows())

    def decode_bytes(self, contexts: list[int]) -> int:
        """Bytes read by one step that decodes a sequence of each of these lengths."""
        kv: int = 2 * self.num_key_value_heads * self.head_dim
        layers, head = {"none": (2, 2), "int8": (8.25 / 8, 8.25 / 8), "int4": (4.5 / 8, 8.25 / 8)}[self.quantization]
        return int(layers * self.layer_weights + head * self.head_weights + 2 * kv * sum(map(self.seen, contexts)))

    def flops(self, start: int, length: int, logits: int = 1) -> int:
        """Operations needed to extend a sequence of ``start`` positions by ``length``, with logits for ``logits`` of
        them. Only these need what follows the last layer's attention."""
        per_seen: int = 4 * self.num_attention_heads * self.head_dim
        seen = sum(self.seen(start + i) for i in range(length))
        last = sum(n * k for name, (n, k) in self.linear_shapes.items() if name != "qkv")
        weights = self.layer_weights * length - last * (length - logits) + self.head_weights * logits
        return int(2 * weights + per_seen * seen)


def write(folder: Path, config: Mapping[str, Any], dtype: str = "bfloat16") -> Path:
    """Write a checkpoint for ``model.load_format = "dummy"``: config.json and a tokenizer with one word per id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    vocabulary = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_weights(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write such a checkpoint with random bfloat16 weights, for engines that need a file."""
    import torch
    from safetensors.torch import save_file

    from infer.checkpoint import dummy_tensors
    from infer.kernels.reference import ReferenceKernels
    from infer.protocols import ModelContext
    from infer_models import infer_models

    write(folder, config)
    (family,) = [r for r in infer_models() if config["architectures"][0] in r.architectures]
    context = ModelContext(ReferenceKernels(), torch.bfloat16, torch.device("cpu"), 16)
    expected = family.factory(config, context, family.settings()).expected()
    save_file(dict(dummy_tensors(expected, torch.bfloat16)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
