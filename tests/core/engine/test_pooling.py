"""Embeddings: the model's own hidden states, pooled, and the same bits in any company."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from tests import support
from tests.support import DTYPES, VOCAB, make_engine, paged_pool, random_prompt, slotted_pool, tiny_model

from infer.contracts.model import Pass
from infer.contracts.params import SamplingParams
from infer.contracts.request import Pooling, Request

pytestmark = pytest.mark.usefixtures("each_provider")
PROMPTS = [random_prompt(150)[:n] + random_prompt(3, seed=n) for n in (0, 1, 29, 61, 90, 149)]
both = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def ask(stepper: Any, prompt: list[int], id: str, pooling: Pooling) -> None:
    params = SamplingParams(max_tokens=1)
    stepper.engine.submit(Request.make(prompt, params, vocab_size=VOCAB, max_seq_len=320, id=id, pooling=pooling))


def embedding(stepper: Any, id: str) -> torch.Tensor:
    (event,) = stepper.answer(id)
    assert (event.finish_reason, event.token_ids, event.text) == ("stop", (), "")
    return torch.frombuffer(bytearray(event.embedding), dtype=torch.float32)


def expected(prompt: list[int], pooling: Pooling, dtype: torch.dtype) -> torch.Tensor:
    return _expected(tuple(prompt), pooling, dtype, support.KERNELS)


@functools.cache
@torch.inference_mode()
def _expected(prompt: tuple[int, ...], pooling: Pooling, dtype: torch.dtype, kernels: Any) -> torch.Tensor:
    model = tiny_model("qwen3", dtype)
    pool = slotted_pool(model, dtype)
    place = pool.allocate(prompt)
    assert place is not None
    view = pool.batched_chunked_prefill_view([place.slot], [0], [len(prompt)])
    hidden = model.forward(Pass(torch.tensor(prompt), torch.arange(len(prompt)), view)).double().numpy()
    rows = hidden if pooling == "mean" else hidden[-1:]
    total = np.zeros(hidden.shape[1])
    for row in rows:
        total += row
    return torch.from_numpy((total / len(rows)).astype(np.float32))


@both
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "slotted"},
        {"backend": "paged", "prefill_chunk_size": 16, "max_tokens_per_step": 24},
        {"backend": "paged", "prefill_chunk_size": 5, "mixed_batches": False, "num_blocks": 18},
    ],
    ids=["whole", "chunks", "preempted"],
)
def test_embeddings_in_any_company(options: dict[str, Any], lag: int, dtype: torch.dtype) -> None:
    """Among requests that generate, with prompts that begin alike, twice: the second time prefixes are cached."""
    options = dict(options)
    model, blocks = tiny_model("qwen3", dtype), options.pop("num_blocks", None)
    pool = paged_pool(model, dtype, num_blocks=blocks) if blocks else None
    stepper = make_engine(model, dtype, pool=pool, lag=lag, **options)
    for turn in range(2):
        for text in range(2):
            stepper.submit(random_prompt(40, seed=text), f"text {text} {turn}", max_tokens=90, temperature=0)
        for i, prompt in reversed(list(enumerate(PROMPTS))):
            ask(stepper, prompt, f"last {turn} {i}", "last")
            ask(stepper, prompt, f"mean {turn} {i}", "mean")
        stepper.run()
    if blocks:
        preempted = [record.request_id for record in stepper.finished if record.preemptions]
        assert any("mean" in id for id in preempted) or (lag and preempted)
    for turn in range(2):
        for text in range(2):
            assert stepper.tokens(f"text {text} {turn}") == stepper.tokens(f"text {text} 0")
        for i, prompt in enumerate(PROMPTS):
            for pooling in ("last", "mean"):
                found = embedding(stepper, f"{pooling} {turn} {i}")
                assert torch.equal(found, expected(prompt, pooling, dtype)), (pooling, turn, i)
    if options["backend"] == "paged" and not blocks:
        assert stepper.answer("last 1 5")[0].num_cached > 0
        assert stepper.answer("mean 1 5")[0].num_cached == 0
    assert all(record.num_generated == 0 for record in stepper.finished if "text" not in record.request_id)
    assert stepper.pool.free_tokens() == stepper.room


def test_hidden_states_that_are_not_finite_end_the_request_alone() -> None:
    model = tiny_model("qwen3", torch.float32)
    stepper = make_engine(model, torch.float32)
    forward = model.forward

    def broken(batch: Pass) -> torch.Tensor:
        hidden_ND = forward(batch)
        hidden_ND[batch.token_ids_T[batch.rows_N] == 5] = torch.nan
        return hidden_ND

    model.forward = broken  # type: ignore[method-assign]
    try:
        ask(stepper, [3, 4, 5], "bad", "last")
        ask(stepper, [3, 4], "good", "last")
        stepper.run()
    finally:
        del model.forward
    (event,) = stepper.answer("bad")
    assert (event.finish_reason, event.embedding) == ("error", None)
    assert "not finite" in str(event.error)
    embedding(stepper, "good")
