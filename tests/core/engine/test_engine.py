"""How the engine ends requests: normally, by failure or by abort. Nothing leaks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from tests.support import MAX_SEQ_LEN, Stepper, letters, make_engine, paged_pool, random_prompt, tiny_model

from infer.contracts.model import ModelProtocol, Pass
from infer.contracts.params import SamplingParams
from infer.contracts.records import RequestRecord
from infer.contracts.request import Event, Request
from infer.contracts.scheduler import Sequence, Work
from infer.engine.batch import Draw, Lineup, Score, pack
from infer.engine.runner import SCORED_ROWS, Drawn, Runner

F32 = torch.float32


class Spoiled:
    """A model that does something unkind in a chosen forward pass."""

    def __init__(self, model: ModelProtocol) -> None:
        self._model = model
        self.attention, self.vocab_size = model.attention, model.vocab_size
        self.passes: list[int] = []
        self.fail_at: int | None = None
        self.nan_rows: list[int] = []
        self.force: int | None = None

    def forward(self, batch: Pass) -> torch.Tensor:
        self.passes.append(len(batch.token_ids_T))
        if len(self.passes) - 1 == self.fail_at:
            raise RuntimeError("out of luck")
        return self._model.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        if self.force is not None:
            logits[:, self.force] = 1e6
        for row in self.nan_rows:
            logits[row] = float("nan")
        return logits


Make = Callable[..., tuple[Spoiled, Stepper]]


@pytest.fixture(
    params=[("slotted", False, 0), ("slotted", True, 0), ("paged", True, 0), ("paged", False, 1), ("paged", True, 1)],
    ids=lambda p: f"{p[0]}-{'mixed' if p[1] else 'separate'}-lag{p[2]}",
)
def spoiled(request: pytest.FixtureRequest) -> Make:
    """Makes an engine over a Spoiled model, for each way that passes and results may come."""
    backend, mixed, lag = request.param

    def make(**keys: Any) -> tuple[Spoiled, Stepper]:
        model = Spoiled(tiny_model("llama"))
        defaults = {"backend": backend, "mixed_batches": mixed, "lag": lag}
        return model, make_engine(model, F32, **(defaults | keys))  # type: ignore[arg-type]

    return make


def assert_clean(stepper: Stepper) -> None:
    """Every request ended exactly once and everything is free again."""
    assert not stepper.engine.has_work()
    for events in stepper.events.values():
        assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
    told = {r.request_id: r.num_generated for r in stepper.finished}
    assert len(told) == len(stepper.finished)
    assert told == {id: len(stepper.tokens(id)) for id in stepper.events}
    assert stepper.pool.free_tokens() == stepper.room
    places = [stepper.pool.allocate([1]) for _ in range(stepper.max_batch_size)]
    assert all(places)
    assert stepper.pool.allocate([1]) is None


@pytest.mark.parametrize("first_only", [True, False])
def test_eos_as_the_very_first_token(spoiled: Make, first_only: bool) -> None:
    """Alone and within a batch."""
    model, stepper = spoiled(eos=frozenset({5}))
    model.force = 5
    stepper.submit(random_prompt(9), "a", temperature=0)
    if not first_only:
        stepper.submit(random_prompt(3), "b", temperature=0, ignore_eos=True, max_tokens=4)
    stepper.run()
    assert stepper.tokens("a") == [5]
    assert stepper.events["a"][-1].finish_reason == "stop"
    if not first_only:
        assert stepper.tokens("b") == [5] * 4
        assert stepper.events["b"][-1].finish_reason == "length"
    assert_clean(stepper)


def test_stop_token_is_named(spoiled: Make) -> None:
    model, stepper = spoiled()
    model.force = 7
    stepper.submit([1, 2], "a", temperature=0, stop_token_ids=[7])
    stepper.run()
    assert (stepper.events["a"][-1].finish_reason, stepper.events["a"][-1].stop_reason) == ("stop", 7)


def test_records_count_tokens_in_every_step_and_room_at_every_end(spoiled: Make) -> None:
    """What has been told of by then, whoever has ended; nothing is taken any more once all have."""
    _, stepper = spoiled(max_batch_size=2, prefill_chunk_size=16)
    prompts = {"a": random_prompt(40), "b": random_prompt(40), "c": random_prompt(9), "never": random_prompt(5)}
    for id, prompt in prompts.items():
        stepper.submit(prompt, id, temperature=0, max_tokens=200 if id == "a" else 6)
    while stepper.engine.has_work():
        told = len(stepper.steps)
        stepper.engine.step()
        if len(stepper.steps) > told:
            totals = stepper.steps[-1].totals
            assert totals.generated == sum(len(e.token_ids) for events in stepper.events.values() for e in events)
            begun = [id for id, events in stepper.events.items() if events]
            assert totals.prompt == sum(len(prompts[id]) for id in begun)
            if len(stepper.steps) in (4, 14):
                stepper.abort("never" if len(stepper.steps) == 4 else "a")
    last = stepper.finished[-1]
    assert last.totals.generated == sum(record.num_generated for record in stepper.finished)
    assert last.totals.prompt == sum(record.num_prompt for record in stepper.finished) == 94
    assert last.totals.cached == sum(record.num_cached for record in stepper.finished)
    assert last.free_tokens == stepper.room
    assert_clean(stepper)


@pytest.mark.parametrize("lag", [0, 1])
def test_observers_know_of_a_step_before_its_events_are_out(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has an event finds its step counted. What the first of two passes yields does not wait for the second."""
    stepper = make_engine(tiny_model("llama"), F32, lag=lag, mixed_batches=False)
    told: list[tuple[str, int, int]] = []
    publish = stepper.engine._publish

    def watch(events: list[Event]) -> None:
        told.extend((event.request_id, len(stepper.steps), len(stepper.finished)) for event in events)
        publish(events)

    monkeypatch.setattr(stepper.engine, "_publish", watch)
    stepper.submit([1, 2], "a", temperature=0, max_tokens=3)
    stepper.run()
    assert told == [("a", min(3, n + lag), n == 3) for n in (1, 2, 3)]
    told.clear()
    stepper.submit([1, 2], "b", temperature=0, max_tokens=9)
    stepper.engine.step()
    stepper.submit([3], "c", temperature=0, max_tokens=1)
    stepper.engine.step()
    assert told == ([("b", 4, 1), ("b", 4, 1), ("c", 5, 2)] if lag == 0 else [("b", 4, 1), ("b", 5, 1)])


def test_length_by_max_tokens_and_by_max_seq_len(spoiled: Make) -> None:
    _, stepper = spoiled()
    stepper.submit([1, 2], "short", temperature=0, max_tokens=3)
    stepper.submit(random_prompt(MAX_SEQ_LEN - 2), "long", temperature=0, max_tokens=None)
    stepper.run()
    assert (len(stepper.tokens("short")), len(stepper.tokens("long"))) == (3, 2)
    assert {stepper.events[i][-1].finish_reason for i in ("short", "long")} == {"length"}
    assert_clean(stepper)


def test_no_event_before_the_last_chunk(spoiled: Make) -> None:
    _, stepper = spoiled(prefill_chunk_size=8)
    stepper.submit(random_prompt(30), "a", temperature=0, max_tokens=2)
    for _ in range(3):
        stepper.engine.step()
        assert "a" not in stepper.events
        assert stepper.engine.has_work()
    for _ in range(1 + stepper.lag):
        stepper.engine.step()
    assert len(stepper.tokens("a")) == 1


def test_pending_chunks_share_one_forward_pass(spoiled: Make) -> None:
    model, stepper = spoiled(prefill_chunk_size=8)
    stepper.submit(random_prompt(20), "a", temperature=0, max_tokens=1)
    stepper.engine.step()
    stepper.submit(random_prompt(13), "b", temperature=0, max_tokens=1)
    stepper.run()
    assert model.passes == [8, 16, 9]


def test_arrival_mid_chunk_joins_the_next_step(spoiled: Make) -> None:
    _, stepper = spoiled(prefill_chunk_size=8)
    stepper.submit(random_prompt(40), "a", temperature=0)
    stepper.engine.step()
    stepper.submit(random_prompt(3), "b", temperature=0)
    stepper.engine.step()
    assert [w.request_id for w in stepper.steps[1].work] == ["a", "b"]
    assert stepper.steps[1].work[1].sampled


def test_failure_in_chunk_2_of_4_ends_that_request_alone(spoiled: Make) -> None:
    model, stepper = spoiled(prefill_chunk_size=8, mixed_batches=False)
    stepper.submit(random_prompt(2), "decoding", temperature=0, max_tokens=10)
    stepper.engine.step()
    stepper.submit(random_prompt(32), "unlucky", temperature=0)
    model.fail_at = 4  # passes: prefill, decode + chunk 1, decode + chunk 2
    stepper.run()
    (event,) = stepper.events["unlucky"]
    assert event.finish_reason == "error"
    assert "out of luck" in (event.error or "")
    assert len(stepper.tokens("decoding")) == 10
    assert_clean(stepper)


def test_a_mixed_pass_that_fails_once_ends_nobody(spoiled: Make) -> None:
    model, stepper = spoiled(prefill_chunk_size=8, mixed_batches=True)
    stepper.submit(random_prompt(2), "decoding", temperature=0, max_tokens=10)
    stepper.engine.step()
    stepper.submit(random_prompt(32), "unlucky", temperature=0, max_tokens=3)
    model.fail_at = 2
    stepper.run()
    assert [stepper.events[name][-1].finish_reason for name in ("decoding", "unlucky")] == ["length", "length"]
    assert_clean(stepper)


def test_a_decode_that_fails_once_ends_nobody(spoiled: Make) -> None:
    model, stepper = spoiled()
    for name in "ab":
        stepper.submit(random_prompt(4), name, temperature=0, max_tokens=5)
    model.fail_at = 2
    stepper.run()
    stepper.submit(random_prompt(4), "c", temperature=0, max_tokens=3)
    stepper.run()
    assert [stepper.events[n][-1].finish_reason for n in "abc"] == ["length", "length", "length"]
    assert stepper.tokens("a") == stepper.tokens("b")
    assert_clean(stepper)


def test_a_row_that_is_not_finite_fails_alone(spoiled: Make) -> None:
    model, stepper = spoiled()
    for name in "ab":
        stepper.submit(random_prompt(4), name, temperature=0, max_tokens=3)
    model.nan_rows = [0]
    stepper.engine.step()
    model.nan_rows = []
    stepper.run()
    assert stepper.events["a"][-1].finish_reason == "error"
    assert "not finite" in (stepper.events["a"][-1].error or "")
    assert len(stepper.tokens("b")) == 3
    assert not any(step.failed_passes for step in stepper.steps), "the pass under way has a token to read"
    assert_clean(stepper)


def test_a_reused_slot_shows_nothing_of_its_predecessor(spoiled: Make) -> None:
    _, stepper = spoiled(max_batch_size=1)
    stepper.submit(random_prompt(100, seed=1), "first", temperature=0)
    stepper.submit(random_prompt(6), "second", temperature=0, logprobs=20)
    stepper.run()
    _, fresh = spoiled(max_batch_size=1)
    fresh.submit(random_prompt(6), "second", temperature=0, logprobs=20)
    fresh.run()
    assert stepper.events["second"] == fresh.events["second"]


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_abort_queued_mid_chunk_and_decoding_frees_within_a_step(spoiled: Make, steps: int) -> None:
    _, stepper = spoiled(prefill_chunk_size=8, max_batch_size=1)
    stepper.submit(random_prompt(30), "a", temperature=0, max_tokens=20)
    stepper.submit(random_prompt(30), "queued", temperature=0)
    for _ in range(steps):
        stepper.engine.step()
    stepper.abort("a")
    stepper.abort("queued")
    stepper.engine.step()
    assert_clean(stepper)
    assert stepper.events["a"][-1].finish_reason == "abort"


def test_abort_of_what_has_ended_changes_nothing(spoiled: Make) -> None:
    """Nor does one of what never was; also while a pass of the ended one is still on its way, and another runs."""
    _, stepper = spoiled()
    stepper.submit([1], "other", temperature=0, max_tokens=9)
    stepper.submit([2], "a", temperature=0, max_tokens=1)
    stepper.run()
    alone, stop = stepper.events.pop("other"), stepper.tokens("a")
    stepper.events.clear()
    stepper.finished.clear()
    stepper.submit([1], "other", temperature=0, max_tokens=9)
    stepper.submit([2], "a", temperature=0, max_tokens=9, stop_token_ids=stop)
    while "a" not in stepper.events:
        stepper.engine.step()
    (ended,) = stepper.events["a"]
    assert ended.finish_reason == "stop"
    assert stepper.events["other"][-1].finish_reason is None
    for id in ("a", "a", "nobody"):
        stepper.abort(id)
        stepper.engine.step()
    stepper.run()
    stepper.abort("other")
    stepper.run()
    assert stepper.events == {"a": [ended], "other": alone}
    assert_clean(stepper)


def test_three_times_as_many_as_fit_all_finish(spoiled: Make) -> None:
    _, stepper = spoiled(max_batch_size=4)
    for i in range(12):
        stepper.submit(random_prompt(5 + i, seed=i), str(i), temperature=0, max_tokens=3 + i % 4)
    stepper.run()
    assert (stepper.steps[0].running, stepper.steps[0].waiting) == (4, 8)
    assert len(stepper.finished) == 12
    assert_clean(stepper)


def test_fail_all_ends_everyone_wherever_they_are(spoiled: Make) -> None:
    _, stepper = spoiled(max_batch_size=1, prefill_chunk_size=4)
    for name in "abc":
        stepper.submit(random_prompt(10), name, temperature=0)
    stepper.engine.step()
    stepper.submit(random_prompt(10), "inbox", temperature=0)
    stepper.engine.fail_all("abort", "closing")
    assert {e[-1].error for e in stepper.events.values()} == {"closing"}
    assert len(stepper.events) == 4
    assert_clean(stepper)


@pytest.mark.parametrize(("chunk", "length"), [(3, 20), (64, 20), (512, 2 * SCORED_ROWS + 20)])
def test_prompt_logprobs_are_the_models_own(chunk: int, length: int) -> None:
    """Also of prompts whose logits are made in slices."""
    model = tiny_model("llama")
    stepper = make_engine(model, F32, prefill_chunk_size=chunk)
    prompt = random_prompt(length)
    stepper.submit(prompt, "a", temperature=0, max_tokens=2, prompt_logprobs=3)
    stepper.run()
    first, second = stepper.events["a"]
    assert second.prompt_logprobs is None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == length
    pool = stepper.pool
    place = pool.allocate(prompt)
    assert place is not None
    with torch.inference_mode():
        view = pool.batched_chunked_prefill_view([place.slot], [0], [length])
        hidden = model.forward(Pass(torch.tensor(prompt), torch.arange(length), view))
        reference = model.logits(hidden).double().log_softmax(-1)
    for position, entry in enumerate(first.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        row = reference[position - 1]
        assert entry.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-5)
        assert entry.rank == int((row > row[prompt[position]]).sum()) + 1
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()


def preempting(lag: int, **keys: Any) -> Stepper:
    """Room for 144 positions, which "grows" takes from whoever is last in rank. It goes from 30 tokens to 50."""
    model = tiny_model("llama")
    pool = paged_pool(model, F32, 2, num_blocks=9)
    stepper = make_engine(model, F32, pool=pool, lag=lag, max_batch_size=2, prefill_chunk_size=8, **keys)
    stepper.submit(random_prompt(30, seed=7), "grows", temperature=0, max_tokens=20)
    return stepper


def finished(stepper: Stepper, id: str) -> RequestRecord:
    (record,) = [record for record in stepper.finished if record.request_id == id]
    return record


@pytest.mark.parametrize("lag", [0, 1])
def test_prompt_logprobs_of_a_prompt_preempted_half_way(lag: int) -> None:
    """Every position is scored once, whatever is computed again."""
    stepper = preempting(lag)
    stepper.submit(random_prompt(100), "long", temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    stepper.run()
    assert finished(stepper, "long").preemptions == 1
    assert any(w.request_id == "long" and 0 < w.start < 99 for step in stepper.steps for w in step.work)
    undisturbed = make_engine(tiny_model("llama"), F32, lag=lag)
    undisturbed.submit(random_prompt(100), "long", temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    undisturbed.run()
    assert stepper.events["long"] == undisturbed.events["long"]


@pytest.mark.parametrize("lag", [0, 1])
def test_what_a_request_finds_of_its_own_after_preemption_was_not_cached_for_it(lag: int) -> None:
    stepper = preempting(lag)
    stepper.submit(random_prompt(100), "long", temperature=0, max_tokens=3)
    stepper.run()
    assert finished(stepper, "long").preemptions == 1
    starts = [w.start for step in stepper.steps for w in step.work if w.request_id == "long" and w.kind == "prefill"]
    assert starts.count(0) == 1, "it goes on with pages of its own"
    assert {event.num_cached for event in stepper.events["long"]} == {finished(stepper, "long").num_cached} == {0}


@pytest.mark.parametrize("lag", [0, 1])
def test_the_last_in_rank_is_preempted_not_the_last_admitted(lag: int) -> None:
    stepper = preempting(lag)
    for _ in range(2):
        stepper.engine.step()
    stepper.submit(random_prompt(100), "urgent", temperature=0, max_tokens=20, priority=-1)
    stepper.run()
    assert [finished(stepper, id).preemptions for id in ("urgent", "grows")] == [0, 1]
    assert [record.request_id for record in stepper.finished] == ["urgent", "grows"]


@pytest.mark.parametrize(("aging_s", "order"), [(None, "first urgent patient"), (60.0, "first patient urgent")])
def test_who_has_waited_for_long_goes_before_a_higher_priority(aging_s: float | None, order: str) -> None:
    times = [0.0]
    model = tiny_model("llama")
    stepper = make_engine(model, F32, max_batch_size=1, priority_aging_s=aging_s, clock=lambda: times[-1])
    stepper.submit(random_prompt(3), "first", temperature=0, max_tokens=4)
    stepper.engine.step()
    for now, id, priority in ((10.0, "patient", 1), (69.0, "soon", 0), (71.0, "urgent", 0)):
        times.append(now)
        stepper.submit(random_prompt(3), id, temperature=0, max_tokens=2, priority=priority)
        stepper.engine.step()
    stepper.run()
    assert [record.request_id for record in stepper.finished if record.request_id != "soon"] == order.split()
    assert [record.request_id for record in stepper.finished][1] == "soon", "59 seconds do not make up for it"


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_whose_time_is_up_ends_within_a_step_whether_it_runs_or_waits(timeout_s: float | None, lag: int) -> None:
    times = [100.0]
    stepper = make_engine(tiny_model("llama"), F32, max_batch_size=1, lag=lag, clock=lambda: times[-1])
    for id in ("runs", "waits"):
        params, prompt = SamplingParams(max_tokens=60, temperature=0), tuple(random_prompt(5))
        stepper.engine.submit(Request(prompt, params, id, arrival=98.0, timeout_s=timeout_s))
    stepper.submit(random_prompt(3), "other", temperature=0, max_tokens=2)
    for _ in range(4):
        stepper.engine.step()
    times.append(102.9)
    stepper.engine.step()
    assert not stepper.finished
    said = len(stepper.events["runs"])
    assert said >= 4
    times.append(103.0)
    stepper.engine.step()
    if timeout_s is None:
        assert not stepper.finished
        return
    assert [record.finish_reason for record in stepper.finished] == ["timeout"] * 2
    assert [stepper.events[id][-1].error for id in ("runs", "waits")] == [
        "The request has not ended within its 5 seconds (timeout)."
    ] * 2
    stepper.run()
    assert len(stepper.events["runs"]) == said + 1
    assert len(stepper.tokens("other")) == 2
    assert stepper.pool.free_tokens() == stepper.room
    assert not stepper.engine._deadlines


@pytest.mark.parametrize("lag", [0, 1])
def test_what_an_answer_adds_is_found_by_the_next_turn(lag: int) -> None:
    """All but its last token, which nothing was computed from."""
    stepper = make_engine(tiny_model("llama"), F32, backend="paged", lag=lag)
    stepper.submit(random_prompt(40), "first", temperature=0, max_tokens=25)
    stepper.run()
    stepper.submit([*random_prompt(40), *stepper.tokens("first"), 5], "next", temperature=0, max_tokens=1)
    stepper.run()
    assert finished(stepper, "next").num_cached == 64


@pytest.mark.parametrize("scored", [{}, {"prompt_logprobs": 1}])
def test_what_a_salted_request_computes_is_found_by_its_salt_only(scored: dict[str, Any]) -> None:
    """Also what one computes that may not find anything itself."""
    stepper = make_engine(tiny_model("llama"), F32, backend="paged")
    cached = {}
    for id, salt, params in (("first", "a", scored), ("open", "", {}), ("other", "b", {}), ("same", "a", {})):
        stepper.submit(random_prompt(40), id, salt=salt, temperature=0, max_tokens=2, **params)
        stepper.run()
        cached[id] = finished(stepper, id).num_cached
    assert cached == {"first": 0, "open": 0, "other": 0, "same": 32}


def test_passes_overlap_again_once_edits_of_logits_have_ended() -> None:
    """While one is inside that needs its last token on the host, no pass is planned with tokens that are not there."""
    stepper = make_engine(tiny_model("llama"), F32, lag=1)
    fed: list[int] = []
    launch = stepper.engine._runner.launch

    def record(batch: Any) -> Any:
        fed.append(len(batch.fed_rows))
        return launch(batch)

    stepper.engine._runner.launch = record  # type: ignore[method-assign]
    for id, penalty in (("a", 0), ("b", 1), ("c", 0)):
        stepper.submit([1, 2], id, temperature=0, max_tokens=4, presence_penalty=penalty)
        stepper.run()
        assert (sum(fed) > 0) == (penalty == 0), id
        fed.clear()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chars", [1, 2])
def test_a_stop_string_that_the_last_token_completes_goes_before_the_length(lag: int, chars: int) -> None:
    stepper = make_engine(tiny_model("llama"), F32, lag=lag, tokenizer=letters())
    stepper.submit([1, 2], "free", temperature=0, max_tokens=4)
    stepper.run()
    text = "".join(event.text for event in stepper.events["free"])
    assert stepper.events["free"][-1].finish_reason == "length"
    assert text.index(text[-chars:]) == 4 - chars
    stepper.submit([1, 2], "stopped", temperature=0, max_tokens=4, stop=text[-chars:])
    stepper.run()
    end = stepper.events["stopped"][-1]
    assert (end.finish_reason, end.stop_reason) == ("stop", text[-chars:])
    assert "".join(event.text for event in stepper.events["stopped"]) == text[:-chars]


def test_the_batch_has_no_padding_and_asks_for_logits_where_tokens_are_drawn(spoiled: Make) -> None:
    _, stepper = spoiled(prefill_chunk_size=8)
    scheduler: Any = stepper.engine._scheduler
    for n, name in ((5, "a"), (12, "b"), (1, "c")):
        stepper.submit(random_prompt(n), name, temperature=0)
    stepper.engine._drain_inbox()
    (works,) = scheduler.schedule().passes()
    batch = pack(works)
    assert batch.lens == [5, 8, 1]
    assert batch.token_ids_T.shape == (14,)
    assert batch.positions_T.tolist() == [*range(5), *range(8), 0]
    assert batch.rows_N.tolist() == [4, 13]
    assert len(batch.fed_rows) == 0
    (draw,) = batch.readouts
    assert isinstance(draw, Draw)
    assert [request.id for request in draw.requests] == ["a", "c"]
    assert (list(draw.of), draw.first, draw.positions_N.tolist()) == ([0, 2], 0, [5, 1])
    assert draw.slots_M.tolist() == [batch.slots[0], batch.slots[2]]


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_several_tokens_are_drawn_as_they_would_be_one_by_one(decode: bool) -> None:
    """After each of a sequence's last positions, beside one that draws a single token and one that draws none."""
    stepper = make_engine(tiny_model("llama"), F32, max_batch_size=8)
    pool, runner = stepper.pool, stepper.engine._runner
    assert isinstance(runner, Runner)
    text, begin, count = random_prompt(20), 12 if decode else 0, 4

    def sequence(tokens: list[int]) -> Sequence:
        request = Request.make(
            tokens, SamplingParams(temperature=1, seed=7, max_tokens=4), vocab_size=128, max_seq_len=64
        )
        found = Sequence(request, 0, 64)
        place = pool.allocate([*tokens, 0], reuse=False)
        assert place is not None
        found.slot = place.slot
        return found

    def drawn(*works: Work) -> list[tuple[int, int | None]]:
        batch = pack(works)
        (draw,) = batch.readouts
        (result,) = runner.launch(batch).results()
        assert isinstance(draw, Draw)
        assert isinstance(result, Drawn)
        return list(zip(draw.of, result.tokens, strict=True))

    alone = []
    for length in range(16, 20):
        ((_, token),) = drawn(Work(sequence(text[:length]), 0, length, 1, False))
        alone.append(token)
    many, one, none = sequence(text[:19]), sequence(text[:16]), sequence(text)
    if begin:
        drawn(Work(one, 0, 12, 1, False), Work(many, 0, begin, 0, False))
    found = drawn(
        Work(none, 0, 5, 0, False),
        Work(many, begin, 19 - begin, count, decode),
        Work(one, begin, 16 - begin, 1, decode),
    )
    assert found == [(1, token) for token in alone] + [(2, alone[0])]
    last = runner._last_tokens.tensor.tolist()
    assert many.slot is not None
    assert one.slot is not None
    assert len(set(alone)) > 1
    assert (last[many.slot], last[one.slot]) == (alone[-1], alone[0])


def test_a_batch_keeps_nothing_of_a_live_sequence(spoiled: Make) -> None:
    """What becomes of the sequences after ``pack`` changes no batch, so a pass may be on its way meanwhile."""
    _, stepper = spoiled(prefill_chunk_size=8)
    scheduler: Any = stepper.engine._scheduler
    for name in ("plain", "scored"):
        stepper.submit(random_prompt(12), name, temperature=1, prompt_logprobs=2 if name == "scored" else None)
    stepper.engine.step()
    stepper.engine._drain_inbox()
    (works,) = scheduler.schedule().passes()
    batch = pack(works)
    before = copy.deepcopy(batch)
    for work in works:
        work.sequence.tokens[:] = [9] * 40
        work.sequence.slot, work.sequence.num_computed, work.sequence.prompt_scored = 3, 0, 0
    assert repr(batch) == repr(before)
    seen = {type(x) for x in reachable(batch)}
    assert Sequence not in seen
    assert Draw in seen
    assert Score in seen


def reachable(x: Any) -> Iterator[Any]:
    """It and everything in it."""
    yield x
    if isinstance(x, (list, tuple)):
        parts: Iterable[Any] = x
    elif isinstance(x, dict):
        parts = x.values()
    elif is_dataclass(x):
        parts = [getattr(x, each.name) for each in fields(x)]
    else:
        parts = getattr(x, "__dict__", {}).values()
    for part in parts:
        yield from reachable(part)


def test_events_carry_what_was_asked_for(spoiled: Make) -> None:
    _, stepper = spoiled()
    stepper.submit([3, 4], "with", temperature=0, max_tokens=2, logprobs=2)
    stepper.submit([3, 4], "without", temperature=0, max_tokens=2)
    stepper.run()
    with_logprobs: list[Event] = stepper.events["with"]
    assert [len(e.logprobs[0].top) for e in with_logprobs] == [2, 2]
    assert all(e.logprobs[0].rank == 1 for e in with_logprobs)
    assert all(e.logprobs == () for e in stepper.events["without"])


def test_a_lineup_is_of_the_same_sequences_in_the_same_slots() -> None:
    one, other = (Sequence(Request((1, 2)), order, 9) for order in range(2))
    one.slot, other.slot = 0, 1
    lineup = Lineup([one, other])
    assert lineup.of((one, other)) is lineup
    assert lineup.of([other, one]).slots_B.tolist() == [1, 0]
    other.slot = 2  # as somebody who has been preempted and has come back
    assert lineup.of([one, other]).slots_B.tolist() == [0, 2]
