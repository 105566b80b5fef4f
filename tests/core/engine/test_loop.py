"""The loop around an engine: who gets which events, and how its end is reported."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import CPU, KERNELS, MAX_SEQ_LEN, random_prompt, slotted_pool, tiny_model

from infer import LLM, SamplingParams
from infer.contracts.request import Event, Request
from infer.contracts.sections import EngineSettings
from infer.engine.engine import Engine
from infer.engine.events import Events
from infer.engine.loop import EngineLoop, Mailbox
from infer.engine.runner import Runner
from infer.engine.schedulers import ContinuousScheduler
from infer.errors import EngineDeadError, QueueFullError


class Stuck(ContinuousScheduler):
    """Plans nothing before it may, and fails when it is told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go, self.broken = threading.Event(), False

    def schedule(self) -> Any:
        assert self.go.wait(300)
        if self.broken:
            raise RuntimeError("lost count")
        return super().schedule()


class Looped:
    """A loop around a tiny model's engine."""

    def __init__(self, places: int = 8, clock: Callable[[], float] = time.monotonic, tokens: int | None = None) -> None:
        model = tiny_model("llama")
        pool = slotted_pool(model, torch.float32)
        self.scheduler = Stuck(pool, EngineSettings(max_batch_size=4))

        def make(publish: Mailbox) -> Engine:
            return Engine(
                Runner(model, pool, KERNELS, CPU, 4),
                self.scheduler,
                pool,
                tokenizer=None,
                eos_token_ids=frozenset(),
                max_seq_len=MAX_SEQ_LEN,
                lag=0,
                publish=publish,
                notify=lambda hook, record: None,
            )

        self.loop = EngineLoop(make, places, clock=clock, max_open_tokens=tokens)

    def submit(self, id: str, mailbox: Callable[[Sequence[Event]], None], max_tokens: int = 3) -> None:
        self.loop.submit(request(id, max_tokens), mailbox)


def request(id: str, max_tokens: int = 3) -> Request:
    return Request(tuple(random_prompt(5)), SamplingParams(max_tokens=max_tokens, temperature=0), id=id)


@pytest.fixture
def looped() -> Iterator[Looped]:
    made = Looped()
    yield made
    made.scheduler.go.set()
    made.loop.close()


def last(mailbox: queue.SimpleQueue[Sequence[Event]]) -> Event:
    """The event that ends it; fails where none comes."""
    while True:
        for event in mailbox.get(timeout=300):
            if event.finish_reason is not None:
                return event


def test_a_mailbox_that_fails_loses_its_own_request_and_no_other(looped: Looped) -> None:
    told: list[Event] = []

    def fails(events: Sequence[Event]) -> None:
        told.extend(events)
        raise RuntimeError("nobody at home")

    good: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    looped.submit("first", fails, max_tokens=200)
    looped.submit("second", good.put)
    looped.scheduler.go.set()
    assert last(good).finish_reason == "length"
    looped.loop.close(drain_s=300)
    assert [e.finish_reason for e in told] == [None, "abort"]
    assert looped.loop.ended.result() is None


def test_who_finds_no_place_is_told_when_those_who_have_one_will_have_ended() -> None:
    now = 0.0
    looped = Looped(4, lambda: now)
    mailbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    looped.scheduler.go.set()
    for i, end in enumerate((3.0, 13.0)):
        now = end
        looped.submit(f"before-{i}", mailbox.put)
        last(mailbox)
    looped.scheduler.go.clear()
    looped.loop.check_place()
    for i in range(4):
        looped.submit(str(i), mailbox.put)
    for time_, seconds in ((13.0, 20), (23.0, 40), (3.1, 1), (3000.0, 60)):
        now = time_
        with pytest.raises(QueueFullError) as refused:
            looped.loop.check_place()
        assert refused.value.retry_after_s == seconds
        with pytest.raises(QueueFullError) as refused:
            looped.submit("late", mailbox.put)
        assert refused.value.retry_after_s == seconds
    looped.scheduler.go.set()
    looped.loop.close()


def test_answers_that_share_a_place_leave_the_door_open() -> None:
    looped = Looped(2)
    mailbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    together = [replace(request(str(i)), group="a") for i in range(2)]
    assert looped.loop.submit_all(together, mailbox.put) == 2
    looped.loop.check_place()
    looped.submit("beside", mailbox.put)
    with pytest.raises(QueueFullError):
        looped.loop.check_place()
    looped.scheduler.go.set()
    looped.loop.close()


def test_prompts_have_so_many_tokens_together_and_one_alone_any_number() -> None:
    """Each has five."""
    looped = Looped(tokens=12)
    mailbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    group = [replace(request(str(i)), group="a") for i in range(3)]
    assert looped.loop.submit_all([*group, request("b"), request("c")], mailbox.put) == 4
    looped.loop.check_place()
    with pytest.raises(
        QueueFullError, match=r"have 10 of at most 12 tokens \(engine.max_open_tokens\)\. Try again later"
    ):
        looped.submit("d", mailbox.put)
    looped.scheduler.go.set()
    ended = 0
    while ended < 4:
        ended += sum(event.finish_reason is not None for event in mailbox.get(timeout=300))
    looped.scheduler.go.clear()
    long = replace(request("long"), prompt_token_ids=tuple(random_prompt(20)))
    looped.loop.submit(long, mailbox.put)
    with pytest.raises(QueueFullError, match="have 20 of at most 12 tokens"):
        looped.loop.check_place()
    looped.scheduler.go.set()
    last(mailbox)
    looped.loop.check_place()
    looped.loop.close()


def test_events_of_one_pass_find_their_mailboxes(looped: Looped) -> None:
    mailboxes: list[queue.SimpleQueue[Sequence[Event]]] = [queue.SimpleQueue() for _ in range(2)]
    for id, mailbox in zip("abc", (0, 1, 0), strict=True):
        looped.submit(id, mailboxes[mailbox].put)
    for ids, expected in (("ac", ["ac", ""]), ("b", ["", "b"]), ("abc", ["ac", "b"]), ("ca", ["ca", ""])):
        of = len(ids)
        looped.loop._publish(Events([*ids], [7] * of, ["x"] * of, [0] * of, {}))
        told = [[*mailbox.get_nowait()] if mailbox.qsize() else [] for mailbox in mailboxes]
        assert ["".join(event.request_id for event in events) for events in told] == expected
        assert all(event == Event(event.request_id, (7,), "x") for events in told for event in events)
    looped.scheduler.go.set()
    looped.loop.close(drain_s=300)


def test_an_engine_that_fails_tells_everyone_and_takes_no_more(looped: Looped) -> None:
    mailboxes: list[queue.SimpleQueue[Sequence[Event]]] = [queue.SimpleQueue() for _ in range(3)]
    for i, mailbox in enumerate(mailboxes):
        looped.submit(str(i), mailbox.put)
    looped.scheduler.broken = True
    assert looped.loop.healthy
    assert looped.loop.accepting
    looped.scheduler.go.set()
    for mailbox in mailboxes:
        event = last(mailbox)
        assert event.finish_reason == "error"
        assert "lost count" in (event.error or "")
        assert mailbox.empty()
    assert isinstance(looped.loop.ended.exception(timeout=300), EngineDeadError)
    assert not looped.loop.healthy
    assert not looped.loop.accepting
    assert looped.loop.num_open == 0
    for call in (looped.loop.check, lambda: looped.submit("late", mailboxes[0].put)):
        with pytest.raises(EngineDeadError, match="lost count"):
            call()
    looped.loop.abort("0")
    looped.loop.close(drain_s=300)


def test_the_end_of_an_engine_that_is_closed_is_no_failure(looped: Looped) -> None:
    looped.scheduler.go.set()
    assert not looped.loop.ended.cancel()
    looped.loop.close()
    assert looped.loop.ended.result(timeout=300) is None
    with pytest.raises(EngineDeadError, match="shutting down"):
        looped.submit("late", lambda events: None)


@pytest.mark.slow
async def test_every_way_of_python_raises_when_the_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def astream(llm: LLM) -> None:
        async for _ in llm.astream("x"):
            pass

    async def follow(way: Callable[[LLM], Any], llm: LLM) -> None:
        if (found := way(llm)) is not None:
            await found

    def broken(scheduler: ContinuousScheduler) -> Any:
        raise RuntimeError("lost count")

    ways: list[Callable[[LLM], Any]] = [
        lambda llm: llm.generate(["x"] * 2),
        lambda llm: list(llm.stream("x")),
        lambda llm: list(llm.submit("x").events()),
        lambda llm: llm.chat([{"role": "user", "content": "x"}]),
        astream,
    ]
    for way in ways:
        with LLM("demo", engine={"max_seq_len": 64}, kernels={"threads": 1}) as llm, monkeypatch.context() as patch:
            patch.setattr(ContinuousScheduler, "schedule", broken)
            with pytest.raises(EngineDeadError, match="lost count"):
                await follow(way, llm)


def test_answers_that_cannot_begin_yet_take_no_place(looped: Looped) -> None:
    """Eight places: a group has one until an answer of it begins, and then one for each."""
    told: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()

    def submit(name: str, count: int, group: str = "") -> int:
        requests = [
            Request((5, 6, 7), SamplingParams(max_tokens=300, temperature=0), id=f"{name}{i}", group=group)
            for i in range(count)
        ]
        return looped.loop.submit_all(requests, told.put)

    def pause_after(count: int, reason: str | None) -> None:
        looped.scheduler.go.set()
        while count > 0:
            count -= sum(event.finish_reason == reason for event in told.get(timeout=300))
        looped.scheduler.go.clear()

    assert submit("a", 5, "first") == 5
    assert submit("b", 6, "second") == 3, "no more than eight are here, but for those that have a place"
    assert submit("c", 5) == 5
    pause_after(1, None)
    with pytest.raises(QueueFullError, match="All 8 places"):
        submit("d", 1)
    for id in ("b0", "b1", "b2", *(f"c{i}" for i in range(5))):
        looped.loop.abort(id)
    pause_after(8, "abort")
    assert submit("e", 9) == 3, "the five of the first have one each"
    for refused in ("", "third"):
        with pytest.raises(QueueFullError, match="All 8 places"):
            submit("f", 1, refused)
    assert looped.loop.num_open == 8


@pytest.mark.slow
def test_infer_generate_fails_with_the_engine() -> None:
    program = """
import sys
from infer.commands.cli import main
from infer.engine.schedulers import ContinuousScheduler
ContinuousScheduler.schedule = lambda self: 1 / 0
sys.exit(main(["generate", "--model.path", "demo", "--kernels.threads", "1", *sys.argv[1:]]))
"""
    for prompts in (["x"], ["x", "y"]):
        done = subprocess.run([sys.executable, "-c", program, *prompts], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert re.search("infer: The engine has stopped: .*ZeroDivisionError", done.stderr)


class Slow:
    """An engine that has one step, of two passes, each of which takes as long as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.passes = [threading.Event() for _ in range(2)]
        self.ends = [threading.Event() for _ in range(2)]
        self.waiting, self.closing = threading.Event(), threading.Event()
        self.error = error
        """What the step raises at its end."""

    def has_work(self) -> bool:
        return not self.ends[-1].is_set()

    def step(self, on_pass: Callable[[], None]) -> None:
        for begun, end in zip(self.passes, self.ends, strict=True):
            on_pass()
            begun.set()
            end.wait(60)
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        self.waiting.set()
        self.closing.wait(60)

    def submit(self, message: object) -> None:
        self.closing.set()

    def fail_all(self, reason: str, error: str | None) -> None: ...


def test_a_pass_that_takes_too_long_is_stuck_until_it_ends() -> None:
    now = 0.0
    slow = Slow()
    loop = EngineLoop(lambda publish: slow, 1, step_timeout_s=5.0, clock=lambda: now)  # type: ignore[arg-type, return-value]
    assert slow.passes[0].wait(60)
    now = 5.0
    assert loop.healthy
    now = 5.1
    assert loop.stuck
    assert not loop.healthy
    assert not loop.accepting
    slow.ends[0].set()
    assert slow.passes[1].wait(60)
    assert loop.healthy
    now = 10.2
    assert loop.stuck
    slow.ends[1].set()
    assert slow.waiting.wait(60)
    assert loop.healthy
    loop.close()


def test_an_engine_that_has_failed_is_not_stuck() -> None:
    now = 0.0
    slow = Slow(RuntimeError("lost count"))
    loop = EngineLoop(lambda publish: slow, 1, step_timeout_s=5.0, clock=lambda: now)  # type: ignore[arg-type, return-value]
    for end in slow.ends:
        end.set()
    assert isinstance(loop.ended.exception(timeout=60), EngineDeadError)
    now = 5.1
    assert not loop.stuck
    assert not loop.healthy
    loop.close()
