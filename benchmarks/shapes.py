"""The shapes of published models, as checkpoints without trained weights: speed depends on the shape alone."""

from __future__ import annotations

import json
import math
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
QWEN_3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
"""The language model alone, without its head for multi-token prediction."""
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
    "Qwen3.5-0.8B": QWEN_3_5
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    "Qwen3.5-4B": QWEN_3_5
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
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
    "Granite-3.1-1B-A400M": {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "vocab_size": 49155,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1500000.0,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "OLMoE-1B-7B": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
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
        """The shape (N, K) of each weight of a layer with attention, as the models pack them; of experts, those of
        one."""
        D, width, E = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * E, self.num_key_value_heads * E
        router = {"router": (self.experts, D)} if self.experts else {}
        gate = q if self.delta_shapes else 0
        return {"qkv": (q + gate + 2 * kv, D), "o": (D, q), **router, "gate_up": (2 * width, D), "down": (D, width)}

    @property
    def delta_shapes(self) -> dict[str, tuple[int, int]]:
        """Those of a gated delta net, but for its MLP; none if the model has none."""
        if "linear_num_value_heads" not in self.config:
            return {}
        D, heads = self.hidden_size, self.linear_num_value_heads
        key, value = self.linear_num_key_heads * self.linear_key_head_dim, heads * self.linear_value_head_dim
        mixed = 2 * key + value
        conv = (mixed, self.linear_conv_kernel_dim)
        return {"qkv": (mixed, D), "z": (value, D), "ba": (2 * heads, D), "conv": conv, "o": (D, value)}

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state, in all layers: fp32, but for the inputs of convolutions."""
        if not (shapes := self.delta_shapes):
            return 0
        (channels, taps), heads = shapes["conv"], self.linear_num_value_heads
        each = 4 * heads * self.linear_key_head_dim * self.linear_value_head_dim + 2 * channels * (taps - 1)
        return int(each * (self.num_hidden_layers - len(self.windows())))

    @property
    def experts(self) -> int:
        """How many each layer has; 0 if its MLP is a plain one."""
        return int(self.config.get("num_local_experts", self.config.get("num_experts", 0)))

    @property
    def layer_weights(self) -> int:
        """How many weights all layers have together."""
        return int(self._weights(self.experts))

    def _weights(self, experts: float) -> float:
        """How many weights all layers have, of so many experts each."""
        times = dict.fromkeys(("gate_up", "down"), experts) if self.experts else {}
        attention = sum(n * k * times.get(name, 1) for name, (n, k) in self.linear_shapes.items())
        mlp = sum(n * k for n, k in (self.linear_shapes["gate_up"], self.linear_shapes["down"]))
        delta, layers = sum(n * k for n, k in self.delta_shapes.values()) + mlp, len(self.windows())
        return float(layers * attention + (self.num_hidden_layers - layers) * delta)

    @property
    def head_weights(self) -> int:
        return int(self.vocab_size * self.hidden_size)

    def windows(self) -> list[int | None]:
        """The sliding window of each layer with attention; None if it is full."""
        if interval := self.config.get("full_attention_interval"):
            return [None] * (self.num_hidden_layers // interval)
        pattern, window = self.config.get("sliding_window_pattern"), self.config.get("sliding_window")
        return [window if pattern and (i + 1) % pattern else None for i in range(self.num_hidden_layers)]

    def seen(self, context: int) -> int:
        """How many positions, its own included, a query after ``context`` positions attends to, summed over all
        layers."""
        return sum(min(context + 1, window or context + 1) for window in self.windows())

    def decode_bytes(self, contexts: list[int]) -> int:
        """Bytes read by one step that decodes a sequence of each of these lengths, and written to states. Of experts,
        those count that tokens choose which choose independently."""
        kv: int = 2 * self.num_key_value_heads * self.head_dim
        layers, head = {"none": (2, 2), "int8": (8.25 / 8, 8.25 / 8), "int4": (4.5 / 8, 8.25 / 8)}[self.quantization]
        experts = 0.0
        if self.experts:
            experts = self.experts * (1 - (1 - self.num_experts_per_tok / self.experts) ** len(contexts))
        read = 2 * kv * sum(map(self.seen, contexts)) + 2 * self.state_bytes * len(contexts)
        return int(layers * self._weights(experts) + head * self.head_weights + read)

    def flops(self, start: int, length: int, logits: int = 1) -> int:
        """Operations needed to extend a sequence of ``start`` positions by ``length``, with logits for ``logits`` of
        them. Only these need what follows the last layer's attention."""
        per_seen: int = 4 * self.num_attention_heads * self.head_dim
        seen = sum(self.seen(start + i) for i in range(length))
        whole = self._weights(self.config.get("num_experts_per_tok", 0))
        n, k = self.linear_shapes["qkv"]
        last, state = whole / self.num_hidden_layers - n * k, 0
        if self.delta_shapes:  # the layers differ, and the last one has attention
            last = sum(n * k for name, (n, k) in self.linear_shapes.items() if name != "qkv")
            layers = self.num_hidden_layers - len(self.windows())
            state = layers * self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        weights = whole * length - last * (length - logits) + self.head_weights * logits
        return int(2 * weights + per_seen * seen + 7 * state * length)


def write(folder: Path, config: Mapping[str, Any], dtype: str = "bfloat16") -> Path:
    """Write a checkpoint for ``model.load_format = "dummy"``: config.json and a tokenizer with one word per id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    vocabulary = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


SHARD_BYTES = 1 << 31
STACKS = {
    "granitemoe": ("block_sparse_moe", {"gate_up_proj": "input_linear", "down_proj": "output_linear"}),
}
"""By model type: where the hub's checkpoints keep all experts of a layer in one tensor, and under which names."""


def expected(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """The names and shapes of the tensors that the config's family expects."""
    import torch

    from infer.contracts.model import ModelContext
    from infer.kernels.reference import ReferenceKernels
    from infer_models import infer_models

    (family,) = [r for r in infer_models() if config["architectures"][0] in r.architectures]
    context = ModelContext(ReferenceKernels(), torch.bfloat16, torch.device("cpu"), 16)
    return family.factory(config, context, family.settings()).expected()


def write_weights(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write such a checkpoint with random bfloat16 weights, in the hub's layout, for engines that need a file."""
    import torch
    from safetensors.torch import save_file

    from infer.checkpoint import dummy_tensors

    write(folder, config)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in _stacked(config, expected(config)).items():
        nbytes = 2 * math.prod(shape)
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for file, shapes in zip(files, shards, strict=True):
        save_file(dict(dummy_tensors(shapes, torch.bfloat16)), folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {name: file for file, shapes in zip(files, shards, strict=True) for name in shapes}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _stacked(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes by the names that the hub's checkpoints give them."""
    place, names = STACKS.get(config["model_type"], ("", {}))
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        before, is_expert, after = name.partition(f".{place}.experts.")
        if place and is_expert:
            found[f"{before}.{place}.{names[after.split('.')[1]]}.weight"] = (config["num_local_experts"], *shape)
        else:
            found[name] = shape
    return found
