"""A pass that raises ends the requests that cause it, and changes no bit of the others."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests import support
from tests.core.engine.test_speculation import EOS, grammar
from tests.examples import slowly
from tests.support import MAX_SEQ_LEN, VOCAB, Always, Stepper, make_engine, tiny_model

from infer.contracts.kernels import Draws
from infer.contracts.model import Pass, StatefulModel
from infer.contracts.params import SamplingParams, StructuredOutputs
from infer.contracts.proposer import DraftRequest
from infer.contracts.request import Event, Request
from infer.contracts.scheduler import Sequence, Works
from infer.engine.isolation import CALM, STRIKES, Isolation
from infer.engine.payoff import Plan
from infer.errors import InferError
from infer.kernels.reference import ReferenceKernels

POISON = 7
REGEX = r"([a-m(]{2,5}!){1,9}"
"""Tokens are single characters here, of which ( is the poison."""
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
SITES = ("forward", "logits", "attention", "sample")


def no_memory() -> None:
    raise MemoryError("no room for the rows")


def no_pages() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_device_memory() -> None:
    raise torch.OutOfMemoryError("no room on the device")


def crowded() -> None:
    raise RuntimeError("too many rows")


class Hostile:
    """Raises in one of ``SITES`` in each pass that computes a poison token."""

    def __init__(self, site: str, error: type[Exception] = RuntimeError) -> None:
        self.site = site
        self.error = error
        self.poisoned = False
        self.most: int | None = None
        """More rows than that do not fit into memory."""
        self.short: Callable[[], object] = no_memory
        """What is called then, and raises."""
        self.faults = 0
        """How many passes had more."""
        self.once: Exception | None = None
        """What the next pass raises."""

    def at(self, site: str) -> None:
        if self.poisoned and site == self.site:
            self.poisoned = False
            raise self.error(f"poison in {site}")


class HostileModel:
    def __init__(self, hostile: Hostile, family: str = "llama") -> None:
        self._model = tiny_model(family)
        if isinstance(self._model, StatefulModel):
            self.states = self._model.states
        self._hostile = hostile
        self.attention, self.vocab_size = self._model.attention, self._model.vocab_size

    def forward(self, batch: Pass) -> torch.Tensor:
        hostile = self._hostile
        hostile.poisoned = bool((batch.token_ids_T == POISON).any())
        if error := hostile.once:
            hostile.once = None
            raise error
        if hostile.most is not None and len(batch.token_ids_T) > hostile.most:
            hostile.faults += 1
            hostile.short()
        hostile.at("forward")
        hidden = self._model.forward(batch)
        hostile.poisoned = hostile.poisoned and hostile.site in ("logits", "sample")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._hostile.at("logits")
        return self._model.logits(hidden)


class HostileKernels(ReferenceKernels):
    def __init__(self, hostile: Hostile) -> None:
        super().__init__()
        self._hostile = hostile

    def extend_attention(self, *args: Any, **keys: Any) -> Any:
        result = super().extend_attention(*args, **keys)  # the K/V are written: the positions are dirty
        self._hostile.at("attention")
        return result

    def sample(self, logits_NV: torch.Tensor, draws: Draws) -> torch.Tensor:
        self._hostile.at("sample")
        return super().sample(logits_NV, draws)


class Guesser:
    """Proposes tokens that are right now and then."""

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [list(r.token_ids[-r.most :])[: r.most] for r in requests]

    def end(self, request_id: str) -> None: ...


def serve(seed: int, hostile: Hostile, family: str = "llama") -> tuple[Stepper, dict[str, list[int]]]:
    """The same mix of requests for a seed, and their prompts. Grammars and penalties are among them: what these keep
    of an answer must not go ahead of it when a pass is computed again."""
    draw, edits = random.Random(seed), random.Random(f"edits {seed}")
    backend, lag = draw.choice(["slotted", "paged"]), draw.randint(0, 1)
    keys: dict[str, Any] = {
        "max_batch_size": draw.randint(2, 6),
        "mixed_batches": draw.random() < 0.5,
        "prefill_chunk_size": draw.choice([3, 8, 64]),
    }
    proposer: Any = Guesser() if backend == "paged" and draw.random() < 0.4 else None
    kernels = HostileKernels(hostile)
    with patch.object(support, "KERNELS", kernels):
        stepper = make_engine(
            HostileModel(hostile, family),  # type: ignore[arg-type]
            torch.float32,
            backend=backend,
            lag=lag,
            kernels=kernels,
            proposer=proposer,
            eos=frozenset({*range(20, 24), EOS}),
            **keys,
        )
    prompts: dict[str, list[int]] = {}
    common = [draw.randrange(8, VOCAB) for _ in range(20)]
    for i in range(draw.randint(4, 10)):
        prompt = common[: draw.choice([0, 20])] + [draw.randrange(8, VOCAB) for _ in range(draw.randint(1, 20))]
        if draw.random() < 0.25:
            prompt[draw.randrange(len(prompt))] = POISON
        prompts[f"r{i}"] = prompt
        formed, penalties = edits.random() < 0.3, edits.sample(sorted(PENALTIES), edits.choice([0, 0, 1, 2]))
        params = SamplingParams(
            logit_bias={POISON: 5.0} if draw.random() < 0.25 else {},
            max_tokens=draw.randint(1, 10),
            temperature=draw.choice([0, 1.0]),
            seed=draw.randrange(100),
            logprobs=draw.choice([None, 2]),
            stop_token_ids=draw.choice([(), (draw.randrange(8, VOCAB),)]),
            structured_outputs=StructuredOutputs(regex=REGEX) if formed else None,
            **{name: PENALTIES[name] for name in penalties},
        )
        edited = grammar(REGEX) if formed else None
        stepper.engine.submit(
            Request.make(prompt, params, vocab_size=VOCAB, max_seq_len=MAX_SEQ_LEN, id=f"r{i}", grammar=edited)
        )
        for _ in range(draw.randint(0, 3)):
            stepper.engine.step()
    stepper.run()
    return stepper, prompts


def answer(events: list[Event]) -> list[Event]:
    return [event._replace(num_cached=0) for event in events]


@cache
def undisturbed(seed: int, family: str) -> dict[str, list[Event]]:
    """What is published where nothing raises."""
    return serve(seed, Hostile("nowhere"), family)[0].events


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def examine(seed: int, site: str, error: type[Exception] = RuntimeError, family: str = "llama") -> int:
    truth, (world, prompts) = undisturbed(seed, family), serve(seed, Hostile(site, error), family)
    ended = 0
    for id, events in world.events.items():
        assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
        if events[-1].finish_reason == "error":
            assert f"poison in {site}" in (events[-1].error or "")
            assert POISON in prompts[id] or POISON in tokens_of(truth[id])
            ended += 1
        else:
            assert answer(events) == answer(truth[id])
            if site in ("forward", "attention"):
                assert POISON not in prompts[id]
                assert POISON not in tokens_of(truth[id])[:-1]
    assert not world.engine.has_work()
    assert world.pool.free_tokens() == world.room
    return ended


FAST = 5


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_only_culprits_end(site: str, part: int) -> None:
    assert sum(examine(seed, site) for seed in range(part * FAST, (part + 1) * FAST))


@pytest.mark.parametrize("site", ["attention", *slowly("sample")])
def test_only_culprits_end_where_there_are_states(site: str) -> None:
    assert sum(examine(seed, site, family="qwen3_next") for seed in range(FAST))


@pytest.mark.parametrize(("culprit", "early"), [(0, True), (0, False), (1, False)])
def test_answers_to_one_prompt_do_not_end_with_one_of_them(culprit: int, early: bool) -> None:
    """The first of them computes the prompt for all. It raises while it does, or any of them when it decodes."""
    answers: list[dict[str, list[Event]]] = []
    for site in ("nowhere", "forward"):
        hostile = Hostile(site)
        stepper = hostile_engine(hostile, backend="paged")
        for i in range(3):
            params = SamplingParams(
                max_tokens=4, temperature=1.0, ignore_eos=True, logit_bias={POISON: 50.0 if i == culprit else -50.0}
            )
            prompt = tuple(range(8, 48))
            stepper.engine.submit(Request(prompt, params, id=f"r{i}", seed=i, group="g"))
        hostile.once = RuntimeError("early") if early and answers else None
        stepper.run()
        assert stepper.pool.free_tokens() == stepper.room
        answers.append({id: answer(events) for id, events in stepper.events.items()})
    truth, found = answers
    for i in range(3):
        if i == culprit:
            assert found[f"r{i}"][-1].finish_reason == "error"
        else:
            assert found[f"r{i}"] == truth[f"r{i}"]


def broken() -> None:
    raise RuntimeError("broken")


def hostile_engine(hostile: Hostile, **keys: Any) -> Stepper:
    return make_engine(HostileModel(hostile), torch.float32, **keys)  # type: ignore[arg-type]


def test_no_pass_is_in_flight_when_the_next_is_split() -> None:
    """The pass after the one that raised draws an end token. Whose it is runs in the second part of the next step."""
    first: list[int] = []
    for stop in ([], first):
        hostile = Hostile("nowhere")
        stepper = hostile_engine(hostile, lag=1, mixed_batches=False)
        for id in ("a", "b"):
            stepper.submit([9, 10], id, max_tokens=8, temperature=0)
        stepper.engine.step()
        for id in ("c", "d"):
            stepper.submit([11, 12], id, max_tokens=3, temperature=0, stop_token_ids=stop if id == "d" else [])
        hostile.once = MemoryError("no room") if stop else None
        stepper.run()
        first += stepper.tokens("d")[:1]
    assert [event.finish_reason for event in stepper.events["d"]] == ["stop"]
    assert {len(stepper.tokens(id)) for id in ("a", "b")} == {8}


@pytest.mark.parametrize(
    "short", [no_memory, *slowly(no_pages, no_device_memory, lambda: torch.empty(1 << 60, dtype=torch.uint8))]
)
def test_where_memory_is_short_passes_are_smaller(short: Callable[[], object]) -> None:
    for seed in range(3):
        hostile = Hostile("nowhere")
        hostile.most, hostile.short = 2, short
        (truth, _), (world, _) = serve(seed, Hostile("nowhere")), serve(seed, hostile)
        for id, events in world.events.items():
            assert answer(events) == answer(truth.events[id])
        assert world.pool.free_tokens() == world.room


def test_requests_that_raise_only_together_run_in_smaller_passes() -> None:
    answers = []
    for most in (None, 3):
        hostile = Hostile("nowhere")
        hostile.most, hostile.short = most, crowded
        stepper = hostile_engine(hostile, max_batch_size=6, prefill_chunk_size=2)
        for i in range(6):
            stepper.submit([9, 10 + i], f"r{i}", max_tokens=30, temperature=0)
        stepper.run()
        answers.append({id: answer(events) for id, events in stepper.events.items()})
    assert answers[0] == answers[1]
    assert hostile.faults == 5, "of six, three and three, two and two"


class Timed(Always):
    """Learns a step's time only if it has planned the step, and no pass of it has raised."""

    def __init__(self, hostile: Hostile) -> None:
        super().__init__()
        self.hostile = hostile
        self.planned: int | None = None
        """How many passes had raised when the step was planned."""
        self.learned = 0

    def plan(self, rows: int, most: Mapping[Sequence, int]) -> Plan:
        self.planned = self.hostile.faults
        return super().plan(rows, most)

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        assert self.planned == self.hostile.faults
        self.planned = None
        self.learned += 1


@pytest.mark.parametrize("short", [no_memory, crowded])
def test_what_steps_cost_is_learned_without_faults_only(short: Callable[[], object]) -> None:
    hostile = Hostile("nowhere")
    hostile.short = short
    timed = Timed(hostile)
    stepper = hostile_engine(hostile, backend="paged", proposer=Guesser(), payoff=timed, prefill_chunk_size=8)
    for id in "ab":
        stepper.submit([9, 10], id, max_tokens=40, temperature=0)
    for _ in range(3):
        stepper.engine.step()
    assert timed.learned
    hostile.most = 8
    stepper.run()
    assert hostile.faults


def test_failed_passes_are_counted_by_themselves() -> None:
    stepper = hostile_engine(Hostile("forward"), mixed_batches=False)
    stepper.submit([9, 10], "a", max_tokens=4, temperature=0)
    stepper.engine.step()
    for id, prompt in (("b", [11, 12]), ("c", [POISON])):
        stepper.submit(prompt, id, max_tokens=4, temperature=0)
    stepper.engine.step()
    (_, step) = stepper.steps
    assert (step.failed_passes, step.passes, step.decodes, step.chunks, step.computed_tokens) == (1, 1, 1, 0, 1)
    stepper.run()
    assert sum(step.failed_passes for step in stepper.steps) == 2, "of both, and of the culprit alone"
    assert sum(step.computed_tokens for step in stepper.steps) == 2 + 3 + 2 + 3
    assert [record.preemptions for record in stepper.finished] == [0, 0, 0]


def works_of(*ids: str) -> Works:
    sequences = [Sequence(Request((9, 10), id=id), order, MAX_SEQ_LEN) for order, id in enumerate(ids)]
    return Works.of([sequence.extend(1) for sequence in sequences])


def test_a_limit_that_splits_nothing_is_lifted() -> None:
    isolation, two = Isolation(), works_of("a", "b")
    isolation.failed(two, MemoryError())
    for works, active in ((two, True), (two[:1], False)):
        for _ in range(CALM):
            isolation.split([works])
            isolation.passed(works)
        assert isolation.active == active


def test_a_request_that_does_not_fit_into_memory_alone_ends_alone() -> None:
    assert sum(examine(seed, "forward", MemoryError) for seed in range(3))


def test_an_answer_that_was_complete_in_time_is_published_though_the_engine_ends() -> None:
    hostile = Hostile("forward")
    stepper = hostile_engine(hostile, lag=1, mixed_batches=False)
    stepper.submit([9, 10], "whole", max_tokens=2, temperature=0)
    stepper.engine.step()
    stepper.engine.step()
    stepper.submit([9, 10], "other", max_tokens=2, temperature=0)
    hostile.once = RuntimeError("nobody's fault")
    with patch.object(Isolation, "failed", side_effect=InferError("3 passes")), pytest.raises(InferError):
        stepper.run()
    assert [event.finish_reason for event in stepper.events["whole"]] == [None, "length"]


@pytest.mark.parametrize("together", [1, 2])
def test_the_engine_ends_if_passes_fail_that_are_of_no_request(together: int) -> None:
    """A device that is broken is nobody's fault, however few ask."""
    hostile = Hostile("forward")
    stepper = hostile_engine(hostile, max_batch_size=together)
    stepper.submit([9, 10], "before", max_tokens=2, temperature=0)
    stepper.run()
    hostile.most, hostile.short = 0, broken
    for i in range(4):
        stepper.submit([9, 10], f"{i}", max_tokens=2, temperature=0)
    with pytest.raises(InferError, match=r"3 requests failed, each alone, and so does a pass of none: .*Error: broken"):
        stepper.run()


@pytest.mark.parametrize("together", [1, 2])
def test_requests_that_fail_do_not_end_the_engine_however_many_there_are(together: int) -> None:
    stepper = hostile_engine(Hostile("forward"))
    for n in range(3 * STRIKES):
        for i in range(together):
            stepper.submit([POISON, 9], f"{n}.{i}", max_tokens=2, temperature=0)
        stepper.run()
        assert all(stepper.events[f"{n}.{i}"][-1].finish_reason == "error" for i in range(together))
    assert stepper.pool.free_tokens() == stepper.room
    stepper.submit([9, 10], "after", max_tokens=2, temperature=0)
    stepper.run()
    assert stepper.events["after"][-1].finish_reason == "length"


def test_a_device_that_computes_prompts_and_no_decodes_is_broken_too() -> None:
    class Stuck(HostileModel):
        def forward(self, batch: Pass) -> torch.Tensor:
            if self.broken and int(batch.positions_T[0]) > 0:
                broken()
            return super().forward(batch)

        broken = False

    model = Stuck(Hostile("nowhere"))
    stepper = make_engine(model, torch.float32, max_batch_size=1)  # type: ignore[arg-type]
    model.broken = True
    for n in range(STRIKES):
        stepper.submit([9], f"{n}", max_tokens=3, temperature=0)
    with pytest.raises(InferError, match="so does a pass of none: RuntimeError: broken"):
        stepper.run()


def test_a_step_reports_whom_a_fault_has_sent_back_as_waiting() -> None:
    """One decodes in the step's first pass; the second pass raises, and both of its prompts give up their slots."""
    stepper = hostile_engine(Hostile("forward"), lag=0, mixed_batches=False)
    stepper.submit([9, 10], "a", max_tokens=4, temperature=0)
    stepper.engine.step()
    stepper.submit([POISON, 9], "b", max_tokens=2, temperature=0)
    stepper.submit([10, 9], "c", max_tokens=2, temperature=0)
    stepper.engine.step()
    assert [(step.running, step.waiting, step.failed_passes) for step in stepper.steps] == [(1, 0, 0), (1, 2, 1)]
