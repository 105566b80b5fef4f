"""The measured shapes are the published ones, and their cost is computed from what the models hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import models
from benchmarks.shapes import CONFIGS, Costs, write
from tests.support import CONFIGS as TINY
from tests.support import CPU
from transformers import AutoConfig, AutoModelForCausalLM

from infer.kernels.reference import ReferenceKernels
from infer.protocols import ModelContext
from infer_models import infer_models

BILLIONS = {"Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.213, "Qwen3-0.6B": 0.596, "Qwen3-8B": 8.191, "Gemma-3-1B": 1.000}
BILLIONS |= {"demo": 0.0036}
"""Parameters, as their model cards say."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_is_the_published_one(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write(tmp_path, config)))  # type: ignore[no-untyped-call]
    assert sum(p.numel() for p in theirs.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=5e-4)
    (family,) = [r for r in infer_models() if config["architectures"][0] in r.architectures]
    ours = family.factory(config, ModelContext(ReferenceKernels(), torch.bfloat16, CPU, 64), family.settings())
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    assert ours.expected() == {n: tuple(t.shape) for n, t in theirs.state_dict().items() if n not in tied}
    costs = Costs(config)
    assert costs.windows() == [spec.window for spec in ours.attention]
    matrices = sum(t.numel() for n, t in theirs.named_parameters() if t.dim() == 2 and "embed" not in n)
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
