"""Faults in every call that the engine makes, one after another: each ends the requests that it concerns, and no client
is left waiting.

The model works on integers only, as in ``test_traffic``; texts, stop strings and logits processors are the engine's
own.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.core.engine.test_traffic import EOS, MAX_SEQ_LEN, Launched, Runner
from tests.examples import slowly
from tests.support import VOCAB, letters, make_engine, tiny_model

from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Draws
from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, Request
from infer.contracts.sections import EngineSettings
from infer.engine import answer as answer_module
from infer.engine.batch import Batch, Draw
from infer.engine.engine import Engine
from infer.engine.loop import EngineLoop, Mailbox
from infer.engine.masks import Masks
from infer.engine.processors import LogitsProcessor, compute_edits
from infer.engine.schedulers import ContinuousScheduler
from infer.errors import EngineDeadError, PluginError
from infer.kernels.reference import ReferenceKernels
from infer.text.detokenizer import TextStream
from infer_cache_paged import PagedPool, PagedSettings

NUM = 8
ONE = ("text", "processor")
"""Faults that end one request."""
A_PASS = ("launch", "decode_view", "batched_chunked_prefill_view")
"""Faults that end the request of a pass, or nobody if there were several: they are computed again."""


class Panic(BaseException):
    """As Rust's come out in Python: no Exception."""


@dataclass
class Faults:
    """Counts the calls that go through it, and lets one of them fail."""

    at: int | None = None
    kind: type[BaseException] = RuntimeError
    calls: list[str] = field(default_factory=list)

    def call(self, name: str, run: Callable[[], Any]) -> Any:
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            raise self.kind(f"planned in {name}")
        return run()

    def watch(self, of: Any, *methods: str, name: str | None = None) -> Any:
        """Have these methods go through here."""
        for method in methods:
            setattr(of, method, functools.partial(self._through, name or method, getattr(of, method)))
        return of

    def _through(self, name: str, method: Callable[..., Any], *args: Any, **keys: Any) -> Any:
        return self.call(name, lambda: method(*args, **keys))


class ProcessorRunner(Runner):
    """Asks the requests' logits processors, as the real one does, and has no token for one whose processor has
    failed."""

    def launch(self, batch: Batch) -> Launched:
        launched = super().launch(batch)
        processed = [each for readout in batch.readouts if isinstance(readout, Draw) for each in readout.processed]
        for row, edit in compute_edits(processed, Masks()):
            if edit is None:
                launched.tokens[row] = None
        return launched


class World:
    """An engine in its loop and two clients' requests, all of which have ended; the same ones for a seed."""

    def __init__(self, seed: int, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(seed)
        self.events: dict[str, list[Event]] = {f"r{i}": [] for i in range(NUM)}
        self.dropped: set[str] = set()
        """Whose events the mailbox failed with."""
        self.records: list[Any] = []
        self._faults = faults
        batch, size, lag = draw.randint(3, 4), draw.choice([1, 2, 4]), draw.randint(0, 2)
        chunk = draw.choice([3, 512])
        chosen = EngineSettings.model_validate(
            {"max_batch_size": batch, "mixed_batches": draw.random() < 0.5, "prefill_chunk_size": chunk}
        )
        context = CacheContext([], batch, MAX_SEQ_LEN, torch.float32, torch.device("cpu"), ReferenceKernels())
        blocks = -(-MAX_SEQ_LEN // size) + draw.randint(0, 1)
        self.pool: Any = PagedPool(context, PagedSettings(block_size=size, num_blocks=blocks))
        self.room = self.pool.free_tokens()
        begin = threading.Event()

        class Text(TextStream):
            def __init__(self, *args: Any) -> None:
                faults.call("text", lambda: super(Text, self).__init__(*args))
                faults.watch(self, "decode", "flush", name="text")

        class Watched(LogitsProcessor):
            def __init__(self, *args: Any) -> None:
                faults.call("processor", lambda: super(Watched, self).__init__(*args))
                faults.watch(self, "_see_all", "_edit", name="processor")

        monkeypatch.setattr(answer_module, "TextStream", Text)
        monkeypatch.setattr(answer_module, "LogitsProcessor", Watched)

        def make(publish: Mailbox) -> Engine:
            scheduler, runner = ContinuousScheduler(self.pool, chosen), ProcessorRunner(self.pool)
            faults.watch(self.pool, "allocate", "grow", "commit", "free", "free_tokens", *A_PASS[1:])
            faults.watch(scheduler, "add", "schedule", "finish")
            launch, has_work = runner.launch, scheduler.has_work
            runner.launch = lambda batch: faults.watch(  # type: ignore[method-assign]
                faults.call("launch", lambda: launch(batch)), "results"
            )
            scheduler.has_work = lambda: begin.wait(300) and has_work()  # type: ignore[method-assign]
            self.engine = Engine(
                runner,  # type: ignore[arg-type]
                scheduler,
                self.pool,
                tokenizer=letters(),
                eos_token_ids=frozenset({EOS}),
                max_seq_len=MAX_SEQ_LEN,
                lag=lag,
                publish=lambda events: faults.call("publish", lambda: publish(events)),
                notify=lambda hook, record: self.records.append(record),
            )
            return self.engine

        self.loop = EngineLoop(make, NUM)
        requests = []
        for id in self.events:
            common, own = draw.randint(0, 14), draw.choices([1, 2], k=draw.randint(1, 3))
            params = SamplingParams(
                max_tokens=draw.randint(1, 12),
                stop=draw.choice([(), ("āĂ",), ("ĂĂā", "ĂĂĂĂ")]),
                presence_penalty=draw.choice([0.0, 0.0, 0.0, 1.0]),
            )
            requests.append(Request((*[1] * common, *own), params, id=id, priority=draw.randint(0, 1)))
        for part in (requests[: NUM // 2], requests[NUM // 2 :]):
            self.loop.submit_all(part, self._mailbox())
        begin.set()
        self.loop.close(drain_s=300)

    def _mailbox(self) -> Mailbox:
        def receive(events: Sequence[Event]) -> None:
            for event in events:
                self.events[event.request_id].append(event)
            dropped, self.dropped = self.dropped, {event.request_id for event in events}
            self._faults.call("mailbox", lambda: None)
            self.dropped = dropped

        return receive

    def answer(self, id: str) -> list[Event]:
        """Without what depends on when it was computed."""
        return [event._replace(num_cached=0) for event in self.events[id]]

    def ended(self, reason: str) -> set[str]:
        return {id for id, events in self.events.items() if events[-1].finish_reason == reason}

    @property
    def preemptions(self) -> int:
        return sum(getattr(record, "preemptions", 0) for record in self.records)


def examine(seed: int, at: int, kind: type[BaseException], truth: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """What comes of a fault in the call of this number; the call's name."""
    faults = Faults(at, kind)
    world = World(seed, faults, monkeypatch)
    name = faults.calls[at]
    for events in world.events.values():
        ends = [e.finish_reason is not None for e in events]
        assert ends == [False] * (len(events) - 1) + [True], "there is one last event"
    assert world.loop.num_open == 0
    contained = name in (*ONE, "mailbox") or (name in A_PASS and issubclass(kind, Exception))
    error = world.loop.ended.exception()
    assert (error is None) == contained, f"a fault in {name}"
    if error is not None:
        assert isinstance(error, EngineDeadError)
        with pytest.raises(EngineDeadError, match=f"planned in {name}"):
            world.loop.submit(Request((1,), id="late"), lambda events: None)
        return name
    failed, aborted = world.ended("error"), world.ended("abort")
    assert aborted <= world.dropped
    assert len(failed) == 1 if name in ONE else len(failed) <= (name in A_PASS)
    assert world.pool.free_tokens() == world.room
    assert not world.engine.has_work()
    unhurt = world.events.keys() - failed - aborted
    assert {id: world.answer(id) for id in unhurt} == {id: truth.answer(id) for id in unhurt}
    return name


FAST = 9
KINDS = (RuntimeError, Panic)


@pytest.mark.parametrize(
    ("seed", "kind"),
    [(FAST, Panic), *slowly((FAST, RuntimeError), *((n, KINDS[n % 2]) for n in range(11) if n != FAST))],
)
def test_a_fault_in_any_call_ends_what_it_concerns(
    seed: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    truth = World(seed, faults, monkeypatch)
    assert truth.loop.ended.result() is None
    assert not truth.ended("error")
    assert truth.preemptions or seed != FAST
    met = {examine(seed, at, kind, truth, monkeypatch) for at in range(len(faults.calls))}
    assert met == set(faults.calls)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drawn", [VOCAB, 10**7])
def test_kernels_that_draw_a_token_of_no_model_are_named(drawn: int, lag: int, asked: dict[str, Any]) -> None:
    """Before anybody takes it for an index."""

    class Wild(ReferenceKernels):
        def sample(self, logits_NV: torch.Tensor, draws: Draws) -> torch.Tensor:
            return super().sample(logits_NV, draws) * 0 + drawn

    engine = make_engine(tiny_model("llama"), torch.float32, lag=lag, kernels=Wild())
    engine.submit([1, 2, 3], "a", max_tokens=4, **asked)
    with pytest.raises(PluginError, match=rf"The kernels \(Wild\) drew token {drawn}, .* 0 to {VOCAB - 1}\."):
        engine.run()
