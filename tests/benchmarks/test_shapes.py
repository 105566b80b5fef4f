"""The measured shapes are the published ones, and their cost is computed from what the models hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import shapes
from benchmarks.gpu import models
from benchmarks.shapes import CONFIGS, Costs, write, write_weights
from tests.support import CONFIGS as TINY
from tests.support import CPU
from transformers import AutoConfig, AutoModelForCausalLM

from infer.contracts.model import ModelContext
from infer.kernels.reference import ReferenceKernels
from infer_models import infer_models

BILLIONS = {"Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.213, "Qwen3-0.6B": 0.596, "Qwen3-8B": 8.191, "Gemma-3-1B": 1.000}
BILLIONS |= {"Qwen3.5-0.8B": 0.752, "Qwen3.5-4B": 4.206}
BILLIONS |= {"demo": 0.0036, "Granite-3.1-1B-A400M": 1.335, "OLMoE-1B-7B": 6.919}
"""Parameters, as their model cards say; of Qwen3.5, those of the language model, as transformers counts them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_is_the_published_one(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write(tmp_path, config)))  # type: ignore[no-untyped-call]
    assert sum(p.numel() for p in theirs.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=5e-4)
    (family,) = [r for r in infer_models() if config["architectures"][0] in r.architectures]
    ours = family.factory(config, ModelContext(ReferenceKernels(), torch.bfloat16, CPU, 64), family.settings())
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    expected = ours.expected()
    if "moe" in config["model_type"]:  # transformers stacks the experts, by names of its own
        assert sum(map(math.prod, expected.values())) == sum(p.numel() for p in theirs.parameters())
    else:
        assert expected == {n: tuple(t.shape) for n, t in theirs.state_dict().items() if n not in tied}
    costs = Costs(config)
    assert costs.windows() == [spec.window for spec in ours.attention]
    matrices = sum(t.numel() for n, t in theirs.named_parameters() if t.dim() > 1 and "embed" not in n)
    tied_head = costs.head_weights if tied else 0
    assert costs.layer_weights + costs.head_weights == matrices + tied_head


def test_costs_of_a_step() -> None:
    costs = Costs(CONFIGS["Llama-3.2-1B"])
    weights = 1_235_814_400 - 33 * 2048  # all but the norms
    per_token = 16 * 2 * 8 * 64
    assert costs.decode_bytes([0]) == 2 * (weights + per_token)
    assert costs.decode_bytes([99, 9]) == 2 * (weights + 110 * per_token)
    attention = 16 * 4 * 32 * 64 * (1 + 2)
    assert costs.flops(0, 2, 2) == 4 * (costs.layer_weights + costs.head_weights) + attention
    left_out = 2048 * 2048 + 3 * 8192 * 2048
    assert costs.flops(0, 2, 1) == 2 * (2 * costs.layer_weights - left_out + costs.head_weights) + attention
    gemma = Costs(CONFIGS["Gemma-3-1B"])
    assert gemma.seen(2000) == 22 * 512 + 4 * 2001


def test_costs_of_experts() -> None:
    costs = Costs(CONFIGS["Granite-3.1-1B-A400M"])
    outside = 24 * (32 * 1024 + 2 * 1024 * 1024 + 2 * 512 * 1024)  # the router, q and o, k and v
    one = 24 * 3 * 512 * 1024
    assert costs.layer_weights == outside + 32 * one
    per_token = 24 * 2 * 8 * 64
    assert costs.decode_bytes([0]) == 2 * (outside + 8 * one + costs.head_weights + per_token)
    two = 32 * (1 - 0.75**2)
    assert costs.decode_bytes([0, 0]) == 2 * (outside + two * one + costs.head_weights + 2 * per_token)
    attention = 24 * 4 * 16 * 64
    assert costs.flops(0, 1) == 2 * (outside + 8 * one + costs.head_weights) + attention


@pytest.mark.parametrize("name", ["Granite-3.1-1B-A400M", "OLMoE-1B-7B"])
def test_made_up_experts_are_in_the_layout_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "SHARD_BYTES", 100_000)
    small = {"hidden_size": 256, "head_dim": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 512}
    folder = write_weights(tmp_path, {**CONFIGS[name], **small})
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded[1].values())


def test_models_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benchmarks.gpu does with a model, with a tiny one on the CPU."""
    monkeypatch.setattr(models, "CONTEXT", 24)
    monkeypatch.setattr(models, "DECODED", 8)
    monkeypatch.setattr(models, "OFFLINE", (4, 12, 6))
    config = {**TINY["qwen3"], "intermediate_size": 64}
    sections: dict[str, Mapping[str, Any]] = {
        "engine": {"max_batch_size": 4, "max_seq_len": 64},
        "kernels": {"backend": "reference"},
    }
    with models.engine(config, "cpu", **sections) as (llm, steps):
        found = models.decode(llm, steps, Costs(config), 3, None)
        assert found["sequences"] == 3
        assert found["tokens/s"] == pytest.approx(3e3 / found["step ms"])
        assert found["ITL p99/p50"] >= 1
        done = models.offline(llm, steps, Costs(config), None)
        assert done["requests"] * done["new"] / done["seconds"] == pytest.approx(done["output tokens/s"])


def test_costs_of_states() -> None:
    costs = Costs(CONFIGS["Qwen3.5-0.8B"])
    each = 16 * 128 * 128 * 4 + 3 * (2 * 16 + 16) * 128 * 2
    assert costs.state_bytes == 18 * each
    weights, per_token = costs.layer_weights + costs.head_weights, 6 * 2 * 2 * 256
    assert costs.decode_bytes([0, 9]) == 2 * (weights + 11 * per_token) + 2 * 2 * 18 * each
    state, attention = 18 * 7 * 16 * 128 * 128, 6 * 4 * 8 * 256
    assert costs.flops(0, 1) == 2 * weights + attention + state
