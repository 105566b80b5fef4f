"""The promise: an answer does not depend, bit for bit, on chunks, other requests, arrival, token budget, pool, prefix
hits, preemption or draft tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import support
from tests.examples import examples
from tests.support import (
    CPU,
    DTYPES,
    FAMILIES,
    MAX_SEQ_LEN,
    QUANTIZED,
    Always,
    Knowing,
    Recorder,
    make_engine,
    paged_pool,
    random_prompt,
    slotted_pool,
    tiny_model,
)

from infer.contracts.attention import KVDtype, QuantizedKV
from infer.contracts.cache import CachePoolProtocol
from infer.contracts.model import ModelProtocol, Pass, StatefulModel
from infer.contracts.request import Event
from infer.engine.exactness import self_check
from infer.engine.graphs import DecodeGraphs

pytestmark = pytest.mark.usefixtures("each_provider")
FIRST = ("llama", "qwen3", "gemma3", "granite_hybrid")
TYPES = dict(zip(DTYPES, ("fp32", "bf16"), strict=True))
KINDS = (*FIRST, "gpt_oss", "qwen3_next", "lfm2_moe")
"""Families that have among them every kind of layer that sees more than its own token."""
HALF = [f"{family} {('int8', 'int4')[i % 2]}" for i, family in enumerate(FAMILIES)]
"""Every family with quantized weights, half of them with each: its products know nothing of the family."""
EACH = [
    *(("native", family, family not in FIRST, DTYPES[i % 2]) for i, family in enumerate(FAMILIES)),
    *(("native", family, True, DTYPES[1 - i % 2]) for i, family in enumerate(HALF)),
    *(("reference", family, True, DTYPES[0]) for family in (*FIRST, "qwen3_moe", QUANTIZED[0])),
]
"""Provider, family, whether it is slow, and the type of a family that is none of ``KINDS``: every family, with plain
weights of one type and with quantized ones beside the other, by the native kernels, and one of each kind by the
reference."""


def families(*names: str, plain: Sequence[Any] = ((),), others: Sequence[Any] | None = None) -> pytest.MarkDecorator:
    """``EACH``, with both types and all values of further arguments, or one type and only ``others`` where the family
    is none of ``KINDS``."""
    return pytest.mark.parametrize(
        ("dtype", "each_provider", "family", *names),
        [
            pytest.param(dtype, provider, family, *values, marks=pytest.mark.slow if slow else ())
            for provider, family, slow, own in EACH
            for dtype in (DTYPES if family in KINDS else [own])
            for values in (plain if others is None or family in KINDS else others)
        ],
        indirect=["each_provider"],
        ids=lambda value: TYPES.get(value) if isinstance(value, torch.dtype) else None,
    )


CHUNK = 16
KV_DTYPES: tuple[KVDtype, ...] = ("auto", "int8")
both = pytest.mark.parametrize("dtype", DTYPES, ids=TYPES.get)
stored = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def prefill_logits(model: ModelProtocol, dtype: torch.dtype, prompt: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits at the last prompt position when the prompt is prefilled up to each of ``cuts`` in turn."""
    return prefill(model, slotted_pool(model, dtype), prompt, cuts)[0]


@torch.inference_mode()
def prefill(
    model: ModelProtocol, pool: CachePoolProtocol, prompt: list[int], cuts: list[int]
) -> tuple[torch.Tensor, int]:
    """Logits at the last position, and how many tokens were cached. Leaves in the pool what it may keep."""
    place = pool.allocate(prompt)
    assert place is not None
    begin = place.num_cached
    for end in cuts:
        if end <= begin:
            continue
        view = pool.batched_chunked_prefill_view([place.slot], [begin], [end - begin])
        hidden = model.forward(Pass(torch.tensor(prompt[begin:end]), torch.arange(begin, end), view))
        assert pool.length(place.slot) == end
        begin = end
    pool.commit(place.slot, prompt, begin)
    pool.free(place.slot)
    return model.logits(hidden[-1:]), place.num_cached


LENGTHS = [(n,) for n in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 127, 128, 129, 300)]


@families("length", plain=LENGTHS, others=LENGTHS[::3])
def test_logits_of_chunked_and_full_prefill(family: str, dtype: torch.dtype, length: int) -> None:
    model, prompt = tiny_model(family, dtype), random_prompt(length)
    full = prefill_logits(model, dtype, prompt, [length])
    one_by_one = (1,) if length < 2 * CHUNK or length == 129 else ()
    for chunk in (*one_by_one, 5, CHUNK, 100):
        cuts = [*range(chunk, length, chunk), length]
        assert torch.equal(full, prefill_logits(model, dtype, prompt, cuts)), chunk


@families()
@torch.inference_mode()
def test_hidden_states_of_some_rows_are_those_of_all(family: str, dtype: torch.dtype) -> None:
    model, prompt = tiny_model(family, dtype), torch.tensor(random_prompt(70))
    pool = slotted_pool(model, dtype)
    found = []
    for rows in (None, [69], [], [3, 0, 68], list(range(70))):
        place = pool.allocate(prompt.tolist())
        assert place is not None
        view = pool.batched_chunked_prefill_view([place.slot], [0], [70])
        rows_N = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        hidden = model.forward(Pass(prompt, torch.arange(70), view, rows_N))
        found.append(hidden)
        assert torch.equal(hidden, found[0] if rows is None else found[0][rows])
        pool.free(place.slot)


@both
@pytest.mark.parametrize("edge", [11, 12, 13])
@pytest.mark.parametrize("chunk", [11, 12, 13, 127, 128, 129])
def test_sliding_window_against_chunk_and_segment_edges(dtype: torch.dtype, edge: int, chunk: int) -> None:
    """The window of 12 meets the chunk's end, and the segment's, or misses them by one."""
    model = tiny_model("gemma3", dtype)
    length = chunk + edge
    prompt = random_prompt(length)
    full = prefill_logits(model, dtype, prompt, [length])
    assert torch.equal(full, prefill_logits(model, dtype, prompt, [chunk, length]))


@both
@pytest.mark.parametrize("page", [11, 12, 13])
@pytest.mark.parametrize("cached", [1, 10, 11])
def test_sliding_window_against_page_and_chunk_edges_after_a_prefix_hit(
    dtype: torch.dtype, page: int, cached: int
) -> None:
    """The window of 12 meets the page's end, the hit's and the chunk's, or misses them by one."""
    model = tiny_model("gemma3", dtype)
    prompt = random_prompt(cached * page + 30)
    full = prefill_logits(model, dtype, prompt, [len(prompt)])
    for chunk in (11, 12, 13, 30):
        pool = paged_pool(model, dtype, block_size=page)
        prefill(model, pool, prompt[: cached * page + 1], [cached * page + 1])
        cuts = [*range(cached * page + chunk, len(prompt), chunk), len(prompt)]
        logits, hit = prefill(model, pool, prompt, cuts)
        assert hit == cached * page
        assert torch.equal(full, logits), chunk


@both
@stored
def test_chunks_leave_the_same_keys_and_values(dtype: torch.dtype, kv_dtype: KVDtype) -> None:
    model, prompt = tiny_model("gemma3", dtype), random_prompt(150)
    kept = []
    for cuts in ([150], [40, 41, 150]):
        pool: Any = slotted_pool(model, dtype, kv_dtype=kv_dtype)
        slot = pool.allocate(prompt).slot
        begin = 0
        with torch.inference_mode():
            for end in cuts:
                view = pool.batched_chunked_prefill_view([slot], [begin], [end - begin])
                model.forward(Pass(torch.tensor(prompt[begin:end]), torch.arange(begin, end), view))
                begin = end
        layers = pool.storage.k + pool.storage.v
        parts = [part for x in layers for part in ((x.codes, x.scales) if isinstance(x, QuantizedKV) else (x,))]
        kept.append([part[slot, :150].clone() for part in parts])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


REQUESTS: list[dict[str, Any]] = [
    {"prompt": 1, "temperature": 0},
    {"prompt": 3, "temperature": 1.3, "seed": 1},
    {"prompt": CHUNK - 1, "temperature": 0},
    {"prompt": CHUNK, "temperature": 0.8, "seed": 2, "top_k": 7},
    {"prompt": CHUNK + 1, "temperature": 0, "prompt_logprobs": 2},
    {"prompt": 40, "temperature": 1.0, "seed": 3, "top_p": 0.7},
    {"prompt": 128, "temperature": 0},
    {"prompt": 131, "temperature": 2.0, "seed": 4, "min_p": 0.05},
    {"prompt": 260, "temperature": 0},
    {"prompt": 20, "temperature": 1.1, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": -0.2},
    {"prompt": 37, "temperature": 0, "repetition_penalty": 1.6, "logit_bias": {4: 2.5, 9: -100.0}},
    {"prompt": 9, "temperature": 1.5, "seed": 6, "min_tokens": 5, "stop_token_ids": tuple(range(0, 96, 4))},
]


COMMON = random_prompt(260)


def submit(stepper: Any, index: int, new: int) -> None:
    """Every prompt begins as the others do and ends in its own way."""
    params = dict(REQUESTS[index])
    length = params.pop("prompt")
    own = random_prompt(2, seed=index + 1)[:length]
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], new)
    stepper.submit(COMMON[: length - len(own)] + own, str(index), max_tokens=new, logprobs=20, **params)


def alone(family: str, dtype: torch.dtype, index: int, kv_dtype: KVDtype = "auto") -> list[Event]:
    """The answer without chunking, without company."""
    return _alone(family, dtype, index, kv_dtype, support.KERNELS)


@cache
def _alone(family: str, dtype: torch.dtype, index: int, kv_dtype: KVDtype, kernels: Any) -> list[Event]:
    model = tiny_model(family, dtype)
    pool = slotted_pool(model, dtype, kv_dtype=kv_dtype)
    stepper = make_engine(model, dtype, pool=pool, use_chunked_prefill=False)
    submit(stepper, index, 12)
    stepper.run()
    return stepper.answer(str(index))


def same(answer: list[Event], reference: list[Event]) -> bool:
    """Tokens, and log-probabilities to the last bit, as far as the shorter goes."""
    n = len(answer)
    return [(e.token_ids, e.logprobs, e.prompt_logprobs) for e in answer] == [
        (e.token_ids, e.logprobs, e.prompt_logprobs) for e in reference[:n]
    ]


mixes = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 6),
        "prefill_chunk_size": st.sampled_from([1, 3, 7, CHUNK, 33, 128, 512]),
        "max_tokens_per_step": st.none() | st.integers(6, 80),
        "max_num_partial_prefills": st.none() | st.integers(1, 2),
        "mixed_batches": st.booleans(),
    }
)
arrivals = st.lists(
    st.tuples(st.integers(0, len(REQUESTS) - 1), st.integers(0, 20), st.integers(1, 12)),
    min_size=1,
    max_size=7,
    unique_by=lambda a: a[0],
)


pools = st.just(None) | st.tuples(st.sampled_from([1, 7, 16, 128, 400]), st.integers(0, 200))


mixed: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "kv_dtype": st.sampled_from(KV_DTYPES),
        "keys": mixes,
        "plan": arrivals,
        "paged": pools,
        "lag": st.integers(0, 2),
        "speculation": st.none() | st.tuples(st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.integers(0, 1000)),
        "recorded": st.sampled_from([None, "by the kernels", "at the start"]),
        "threads": st.integers(1, 2),
    }
)
STATES = {
    "gated delta net": ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear"),
    "Mamba 2": ("granite_hybrid", "nemotron_h", "falcon_h1", "bamba"),
    "short convolution": ("lfm2", "lfm2_moe", "lfm3"),
}
"""The families with each kind of state."""


def weights(*names: str) -> st.SearchStrategy[str]:
    """Families with plain or quantized weights."""
    return st.sampled_from([*names, *(name for name in QUANTIZED if name.split()[0] in names)])


@settings(max_examples=examples(30, 15))
@given(weights(*FAMILIES), mixed)
def test_any_mix_of_arrivals_chunks_budgets_and_pools(family: str, mix: dict[str, Any]) -> None:
    check_mix(family, **mix)


@pytest.mark.slow
@pytest.mark.parametrize("each_provider", ["native"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(3))
@given(data=st.data())
def test_any_mix_of_each_family(family: str, data: st.DataObject) -> None:
    check_mix(data.draw(weights(family)), **data.draw(mixed))


@pytest.mark.slow
@pytest.mark.parametrize("each_provider", ["native"], indirect=True)
@pytest.mark.parametrize("kind", STATES)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_any_mix_of_each_kind_of_state(kind: str, data: st.DataObject) -> None:
    """An exploration tries 300 of each: ``pytest tests/core/test_exactness.py -k kind_of_state --explore SEED``."""
    check_mix(data.draw(weights(*STATES[kind])), **data.draw(mixed))


def test_every_family_with_states_has_a_kind() -> None:
    stateful = {name for name in FAMILIES if isinstance(model := tiny_model(name), StatefulModel) and model.states}
    assert stateful == {name for names in STATES.values() for name in names}


def check_mix(
    family: str,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
    keys: dict[str, Any],
    plan: list[tuple[int, int, int]],
    paged: tuple[int, int] | None,
    lag: int,
    speculation: tuple[float, int] | None,
    recorded: str | None,
    threads: int,
) -> None:
    """``speculation``: how often drafts are right, and a seed for how many there are. ``recorded``: when decode passes
    are, and by whom."""
    model, batch = tiny_model(family, dtype), keys["max_batch_size"]
    references = {str(i): alone(family, dtype, i, kv_dtype) for i, _, _ in plan}
    pool: CachePoolProtocol = slotted_pool(model, dtype, batch, kv_dtype)
    if paged is not None:
        page, spare = paged
        chunk = keys["prefill_chunk_size"]
        sizes = {"spare": spare // page, "block_size": page, "state_snapshots": spare % 8}
        pool = paged_pool(model, dtype, batch, kv_dtype, max_chunk=chunk, **sizes)
    if speculation is not None:
        answers = {id: [e.token_ids[0] for e in events] for id, events in references.items()}
        keys |= {"proposer": Knowing(answers, *speculation), "payoff": Always(random.Random(speculation[1]))}
    torch.set_num_threads(threads)
    try:
        graphs = None
        if recorded is not None:
            recorder = support.KERNELS.recorder() if recorded == "by the kernels" else None
            graphs = DecodeGraphs(model, pool, CPU, batch, recorder or Recorder())
        stepper = make_engine(model, dtype, pool=pool, lag=lag, graphs=graphs, **keys)
        due = sorted(plan, key=lambda a: a[1])
        step = 0
        while due or stepper.engine.has_work():
            while due and due[0][1] <= step:
                index, _, new = due.pop(0)
                submit(stepper, index, new)
            stepper.engine.step()
            step += 1
    finally:
        torch.set_num_threads(1)
    for index, _, new in plan:
        answer, reference = stepper.answer(str(index)), references[str(index)]
        assert len(answer) == min(new, len(reference))
        assert same(answer, reference)
    assert stepper.pool.free_tokens() == stepper.room


@families(others=())
def test_static_batches_answer_the_same(family: str, dtype: torch.dtype) -> None:
    stepper = make_engine(tiny_model(family, dtype), dtype, static=True, use_chunked_prefill=False)
    for index in range(len(REQUESTS)):
        submit(stepper, index, 12)
    stepper.run()
    for index in range(len(REQUESTS)):
        assert same(stepper.answer(str(index)), alone(family, dtype, index))


@families(others=())
def test_preemption_does_not_change_the_answer(family: str, dtype: torch.dtype) -> None:
    """A pool that refuses to grow now and then, twice in a row, forces recomputation of prompt and answer so far."""
    model = tiny_model(family, dtype)
    pool = slotted_pool(model, dtype)
    asked = 0
    grow = pool.grow

    def stingy(slot: int, num_tokens: int) -> bool:
        nonlocal asked
        asked += 1
        return asked % 9 > 1 and grow(slot, num_tokens)

    pool.grow = stingy
    pool.room = [0] * 4  # so that it is asked for every token
    stepper = make_engine(model, dtype, pool=pool, prefill_chunk_size=7)
    for index in range(5):
        submit(stepper, index, 12)
    stepper.run()
    assert sum(record.preemptions for record in stepper.finished) > 3
    for index in range(5):
        assert same(stepper.answer(str(index)), alone(family, dtype, index))


@pytest.mark.parametrize("spare", [0, 180], ids=["preempted", "roomy"])
@both
def test_quantized_keys_and_values_are_shared_and_computed_again(dtype: torch.dtype, spare: int) -> None:
    """The answers differ from those with K/V in the model's dtype, but not with what else is served."""
    assert not same(alone("llama", dtype, 6, "int8"), alone("llama", dtype, 6))
    check_paged_pool("llama", dtype, "int8", True, spare, True)


PAGED = [(False, 0, False), (False, 180, True), (True, 0, True), (True, 180, False)]
"""Each two values of different arguments meet once."""


@families("mixed", "spare", "prefix_caching", plain=PAGED, others=PAGED[1:3])
def test_paged_pool_answers_the_same(
    family: str, dtype: torch.dtype, mixed: bool, spare: int, prefix_caching: bool
) -> None:
    check_paged_pool(family, dtype, "auto", mixed, spare, prefix_caching)


def check_paged_pool(
    family: str, dtype: torch.dtype, kv_dtype: KVDtype, mixed: bool, spare: int, prefix_caching: bool
) -> None:
    model = tiny_model(family, dtype)
    pool = paged_pool(model, dtype, 6, kv_dtype, 50, spare, prefix_caching=prefix_caching)
    stepper = make_engine(model, dtype, pool=pool, lag=1, max_batch_size=6, mixed_batches=mixed, prefill_chunk_size=50)
    order = [6, 7, 3, 2, 1, 0, 8, 5]
    for index in order:
        submit(stepper, index, 12)
    stepper.run()
    assert any(record.num_cached for record in stepper.finished) == prefix_caching
    if prefix_caching or family.split()[0] not in ("qwen2", "exaone4"):  # even the smallest pool holds six of theirs
        assert any(record.preemptions for record in stepper.finished) == (spare == 0)
    for index in order:
        assert same(stepper.answer(str(index)), alone(family, dtype, index, kv_dtype))


@families()
def test_self_check_holds(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype)
    for kv_dtype in KV_DTYPES:
        pool = slotted_pool(model, dtype, kv_dtype=kv_dtype)
        assert not self_check(model, pool, support.KERNELS, max_batch_size=4, max_seq_len=MAX_SEQ_LEN, device=CPU)
        assert pool.free_tokens() == 4 * MAX_SEQ_LEN, "the check leaves nothing behind"
