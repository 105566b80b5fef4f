"""The engine without a model, on a clock of its own: the real engine, scheduler and block manager, and passes that take
as long as a cost model says."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from infer.assemble.blueprint import Blueprint
from infer.assemble.devices import for_device
from infer.cache import BlockManager, Pool
from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import CacheContext, CachePoolProtocol
from infer.contracts.params import SamplingParams
from infer.contracts.records import RequestRecord, StepRecord
from infer.contracts.request import Event, Owner, Request
from infer.contracts.scheduler import SchedulerContext
from infer.contracts.sections import Settings
from infer.engine.batch import Batch, Draw
from infer.engine.checked import CheckedPool, CheckedScheduler
from infer.engine.engine import Engine
from infer.engine.pace import Pace
from infer.engine.runner import Drawn, Launched
from infer.errors import InferError, PluginError, SettingsError
from infer.plugins.discovery import Plugins
from infer_bench.bench import Planned
from infer_bench.costs import Costs

PERCENTS = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
BEFORE = -1.0


class Executor:
    """An engine's executor that computes nothing. A pass takes the device as long as ``seconds`` says of its (starts,
    lens), and begins when the one before has ended; who reads its results has waited for its end. The token that is
    drawn is the last one of the request's prompt."""

    def __init__(
        self, pool: CachePoolProtocol, seconds: Callable[[Sequence[int], Sequence[int]], float], now: float = 0.0
    ) -> None:
        self._book = _booking(pool)
        self._seconds = seconds
        self.now = now
        """The time on the clock, in seconds."""
        self._ends = now
        """When the last pass ends."""
        self.passes = 0

    def launch(self, batch: Batch) -> Launched:
        self._book(batch)
        self.passes += 1
        self._ends = ends = max(self.now, self._ends) + self._seconds(batch.starts, batch.lens)

        def wait() -> None:
            self.now = max(self.now, ends)

        return Launched([_reader(readout) for readout in batch.readouts], wait)


def _reader(readout: object) -> Callable[[], Drawn]:
    assert isinstance(readout, Draw), "nothing else is asked for"
    tokens: list[int | None] = [request.prompt_token_ids[-1] for request in readout.requests]
    return lambda: Drawn(tokens, [None] * len(tokens))


def _booking(pool: CachePoolProtocol) -> Callable[[Batch], object]:
    """What tells the pool which positions a pass writes. Nobody looks at its views, so where there is one of core's
    block managers, it is told directly, and no view is made."""
    manager = pool.block_manager if isinstance(pool, Pool) else None
    if not isinstance(manager, BlockManager):
        return lambda batch: pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)

    def book(batch: Batch) -> None:
        if batch.decode_only:
            manager.advance(np.array(batch.slots))
        else:
            manager.extend(batch.slots, batch.starts, batch.lens)

    return book


class Simulation:
    """An engine with the scheduler and the cache pool that settings choose. ``play`` may be called again: the clock
    goes on, and the pool keeps what it has cached. ``observer`` receives the records of steps and requests, whose times
    are the clock's. Raises InferError."""

    def __init__(self, settings: Settings, plugins: Plugins, costs: Costs, observer: Any = None) -> None:
        settings = for_device(settings, torch.device(costs.device))
        self._settings, self._costs, self._observer = settings, costs, observer
        engine = settings.engine
        if engine.speculation is not None:
            raise SettingsError(
                f'engine.speculation is "{engine.speculation}", but infer simulate does not know which drafts would be '
                "right; leave it out."
            )
        self.max_seq_len = engine.max_seq_len or costs.max_seq_len
        # The model is elsewhere, and so is its device.
        here = settings.model.model_copy(update={"device": "cpu"})
        blueprint = Blueprint(settings.model_copy(update={"model": here}), plugins)
        cache, scheduler = blueprint.chosen("cache"), blueprint.chosen("scheduler")
        self._check_size(cache.name)
        self.pool: CachePoolProtocol = cache.build(settings, self._context(blueprint))
        self._check_room()
        given: Any = CheckedPool(self.pool, cache.whose)
        made = scheduler.build(settings, SchedulerContext(given, engine))
        self._whose = scheduler.whose
        self._executor = Executor(self.pool, costs.of)
        self._engine = Engine(
            self._executor,
            CheckedScheduler(made, scheduler.whose, thorough=scheduler.distribution != "infer-core"),
            self.pool,
            tokenizer=None,
            eos_token_ids=frozenset(),
            max_seq_len=self.max_seq_len,
            lag=0 if costs.device == "cpu" else 1,
            publish=self._publish,
            notify=self._notify,
            pace=Pace.of(engine),
            priority_aging_s=engine.priority_aging_s,
            clock=lambda: self._executor.now,
        )
        self._seen = Seen()
        self._ids = 0
        self._open: dict[str, float] = {}
        """By the id of each open request, when its last token came; BEFORE if none has come yet."""

    def _context(self, blueprint: Blueprint) -> CacheContext:
        """The pool's, as small as it can be per position. Layers that all read as far back need only be one."""
        engine, windows = self._settings.engine, self._costs.windows
        return CacheContext(
            [AttentionSpec(1, 1, 1, 1.0, window=w or None) for w in (windows if len({*windows}) > 1 else windows[:1])],
            engine.max_batch_size,
            self.max_seq_len,
            torch.float32,
            torch.device("cpu"),
            blueprint.kernels,
            self._costs.cache_tokens,
            max_chunk=engine.prefill_chunk_size if engine.use_chunked_prefill else None,
        )

    def _check_size(self, name: str) -> None:
        """Before the pool is made, since it would take that memory."""
        own = getattr(self._settings.cache, name, None)
        if (fraction := getattr(own, "memory_fraction", None)) is not None:
            raise SettingsError(
                f"cache.{name}.memory_fraction = {fraction}, but no memory is simulated; leave it out, and say how "
                "many positions the pool has by the costs' cache_tokens."
            )

    def _check_room(self) -> None:
        if (room := self.pool.free_tokens()) < self.max_seq_len:
            raise SettingsError(
                f"The cache has room for {room} positions, but one sequence may need {self.max_seq_len}; enlarge it "
                "(cache_tokens in the file of costs), or lower engine.max_seq_len."
            )

    def play(self, planned: Iterable[Planned], rate: float = 1.0, *, sequential: bool = False) -> dict[str, Any]:
        """Let requests arrive at their times divided by ``rate``, or, if ``sequential``, each when the one before has
        ended, until all have been answered. Times must not decrease. Returns figures, latencies in milliseconds. Raises
        PluginError if the scheduler is stuck, and InferError if a pass fails."""
        executor, engine, coming = self._executor, self._engine, iter(planned)
        self._seen, began = Seen(), executor.now
        front, one = began, next(coming, None)
        reaches: float | None = None
        """When ``one``, which was sent at ``sent``, reaches the engine."""
        while True:
            if one is not None and reaches is None and not (sequential and self._open):
                sent = executor.now if sequential else began + one.at / rate
                reaches = front = max(sent, front) + self._costs.seconds.request
            if one is not None and reaches is not None and reaches <= executor.now:
                self._submit(one, sent)
                one, reaches = next(coming, None), None
            elif engine.has_work():
                before = executor.passes, self._seen.tokens
                engine.step()
                if before == (executor.passes, self._seen.tokens):
                    if reaches is None:
                        raise PluginError(
                            f"{self._whose} plans nothing, though it has work (requests: {len(self._open)}) and "
                            "nothing is under way: it is stuck."
                        )
                    executor.now = reaches
            elif reaches is None:
                return self._seen.figures(executor.now - began)
            else:
                executor.now = reaches

    def _submit(self, one: Planned, sent: float) -> None:
        engine = self._settings.engine
        if len(self._open) >= engine.max_batch_size + engine.max_waiting_requests:
            self._seen.refused += 1
            return
        id = str(self._ids)
        self._ids += 1
        self._open[id] = BEFORE
        params = _params(one.max_tokens)
        self._engine.submit(
            Request(one.prompt_token_ids, params, id, priority=one.priority, owner=Owner(user=one.user), arrival=sent)
        )

    def _publish(self, events: Sequence[Event]) -> None:
        now, open = self._executor.now, self._open
        gaps: dict[float, int] = {}
        """By length, how many tokens came so long after the one before."""
        for event in events:
            if event.finish_reason is None:
                before, open[event.request_id] = open[event.request_id], now
            elif event.finish_reason == "length":
                before = open.pop(event.request_id)
            else:
                raise InferError(f"A simulated request ended with {event.finish_reason}: {event.error}")
            if before != BEFORE:
                gap = now - before
                gaps[gap] = gaps.get(gap, 0) + 1
        self._seen.tokens += len(events)
        self._seen.gaps.extend(gaps)
        self._seen.gap_counts.extend(gaps.values())

    def _notify(self, hook: str, record: StepRecord | RequestRecord) -> None:
        self._seen.take(record)
        if tell := getattr(self._observer, hook, None):
            tell(record)


class Seen:
    """What has happened while requests were played. Times are in seconds."""

    def __init__(self) -> None:
        self.refused = self.tokens = 0
        self.gaps, self.gap_counts = array("d"), array("q")
        """Times between two tokens of a request, and how many tokens each stands for."""
        self._ttft, self._latency, self._queue = array("d"), array("d"), array("d")
        self._passes = self._work = self._computed = 0
        self._prompt = self._cached = self._preemptions = self._most_waiting = 0

    def take(self, record: StepRecord | RequestRecord) -> None:
        if isinstance(record, StepRecord):
            self._passes += record.passes
            self._work += len(record.work)
            self._computed += record.computed_tokens
            self._most_waiting = max(self._most_waiting, record.waiting)
        elif record.first_token is not None and record.started is not None:
            self._ttft.append(record.first_token - record.arrival)
            self._latency.append(record.finished - record.arrival)
            self._queue.append(record.started - record.arrival)
            self._prompt += record.num_prompt
            self._cached += record.num_cached
            self._preemptions += record.preemptions

    def figures(self, wall_s: float) -> dict[str, Any]:
        """As ``infer bench`` has them, and more; latencies in milliseconds."""
        answered = len(self._ttft)
        return {
            "requests": answered,
            "refused": self.refused,
            "wall_s": wall_s,
            "output_tok_s": self.tokens / wall_s if wall_s else 0.0,
            "total_tok_s": (self.tokens + self._prompt) / wall_s if wall_s else 0.0,
            "requests_s": answered / wall_s if wall_s else 0.0,
            "ttft_ms": percentiles(self._ttft),
            "itl_ms": percentiles(self.gaps, self.gap_counts),
            "latency_ms": percentiles(self._latency),
            "queue_ms": percentiles(self._queue),
            "most_waiting": self._most_waiting,
            "passes": self._passes,
            "sequences_per_pass": self._work / self._passes if self._passes else 0.0,
            "tokens_per_pass": self._computed / self._passes if self._passes else 0.0,
            "cache_hits": self._cached / self._prompt if self._prompt else 0.0,
            "preemptions": self._preemptions,
        }


def percentiles(seconds: Sequence[float], counts: Sequence[int] | None = None) -> dict[str, float]:
    """PERCENTS in milliseconds, as numpy has them with linear interpolation, of values of which there are so many each;
    empty for no values."""
    if not seconds:
        return {}
    value_N = np.array(seconds)
    count_N = np.ones(len(value_N), np.int64) if counts is None else np.array(counts)
    order_N = np.argsort(value_N, kind="stable")
    value_N, end_N = 1e3 * value_N[order_N], np.cumsum(count_N[order_N])

    def at(place: float) -> float:
        return float(value_N[np.searchsorted(end_N, place, side="right")])

    found = {}
    for name, percent in PERCENTS.items():
        place = percent / 100 * (int(end_N[-1]) - 1)
        low, high = at(math.floor(place)), at(math.ceil(place))
        found[name] = low + (high - low) * (place - math.floor(place))
    return found


@functools.cache
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
