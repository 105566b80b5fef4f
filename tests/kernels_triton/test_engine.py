"""Whole models with these kernels in an engine: chunks, other requests, preemption and replay change no bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import CONFIGS, CPU, Recorder, Stepper, build_model, make_engine, paged_pool, random_prompt
from torch import Tensor

from infer.contracts.kernels import KernelsProtocol
from infer.engine.graphs import DecodeGraphs
from infer.kernels.reference import ReferenceKernels
from infer.weight import GroupedWeight, Weight
from infer_kernels_triton.provider import TritonKernels

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="its engines are on the CPU; tests/gpu serves on a GPU"
)
MAX_BATCH = 3
PROMPTS = {"a": random_prompt(66, seed=1), "b": random_prompt(31, seed=2), "c": random_prompt(3, seed=3)}
PROMPTS["d"] = [*PROMPTS["a"][:17], 5]
"""The longest is attended to in two segments, and the last one begins with a block of it."""
TWO = {"a": random_prompt(5, seed=3), "b": random_prompt(34, seed=2)}
"""The longer one is longer than the windows, two blocks and a tile of keys."""
GEMMA3 = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
"""One layer of each kind."""


class PlainActivations(ReferenceKernels):
    """The reference kernels, without rounding the activations that quantized weights are multiplied with."""

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        if isinstance(weight_NK, GroupedWeight):
            weight_NK = replace(weight_NK, int8_activations=False)
        return super().pack(weight_NK, bias_N)


def play(
    family: str,
    dtype: torch.dtype,
    kernels: KernelsProtocol,
    prompts: Mapping[str, list[int]] = PROMPTS,
    *,
    recorded: bool = False,
    num_blocks: int,
    max_tokens: int = 3,
    **keys: Any,
) -> Stepper:
    family, _, quantization = family.partition(" ")
    config = {**CONFIGS[family], **(GEMMA3 if family == "gemma3" else {})}
    model = build_model(config, dtype, kernels, quantization or None)
    pool = paged_pool(model, dtype, MAX_BATCH, num_blocks=num_blocks)
    pool.storage.kernels = kernels
    graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, Recorder()) if recorded else None
    stepper = make_engine(
        model, dtype, pool=pool, kernels=kernels, graphs=graphs, **{"max_batch_size": MAX_BATCH, **keys}
    )
    for id, prompt in prompts.items():
        stepper.submit(prompt, id, max_tokens=max_tokens, temperature=0.7, seed=4, logprobs=3)
    stepper.run()
    return stepper


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama int4", torch.bfloat16, marks=pytest.mark.slow),  # the embedding and the head are int8
        pytest.param("gemma3 int8", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_chunks_company_preemption_and_replay(family: str, dtype: torch.dtype) -> None:
    kernels = TritonKernels(CPU)
    alone = play(family, dtype, kernels, num_blocks=40, max_batch_size=1, use_chunked_prefill=False)
    mixed = play(family, dtype, kernels, num_blocks=5, recorded=True, lag=1, prefill_chunk_size=16)
    assert any(record.preemptions for record in mixed.finished)
    for id in PROMPTS:
        found, expected = ([(e.token_ids, e.logprobs) for e in s.events[id]] for s in (mixed, alone))
        assert found == expected


ASKING = ("phi3", "gemma2", "gemma3", "smollm3", "gpt_oss", "qwen3_moe", "lfm2_moe", "nemotron_h", "qwen3_next")
"""Families that ask the kernels for all that any family does: rotary embeddings of a part of a head or of none, soft
caps, windows, sinks, norms of heads, each activation, experts and each kind of state."""


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ASKING, "qwen3 int4", "qwen3 int8"])
def test_answers_are_the_references(family: str) -> None:
    found, expected = (
        play(family, torch.float32, kernels, TWO, num_blocks=40, max_tokens=2)
        for kernels in (TritonKernels(CPU), PlainActivations())
    )
    for id in TWO:
        assert found.tokens(id) == expected.tokens(id)
        for a, b in zip(found.events[id], expected.events[id], strict=True):
            assert a.logprobs[0].logprob == pytest.approx(b.logprobs[0].logprob, abs=1e-4)
