"""Checks of what a scheduler plans, before the engine acts on it, and whose fault it is if it cannot plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.scheduler import Schedule, SchedulerProtocol, Sequence, Work
from infer.errors import PluginError
from infer.plugins.inspection import Named

T = TypeVar("T")
PATIENCE_S = 10.0
"""How long, in seconds, a scheduler that has work may plan nothing before it counts as stuck."""
PAUSE_S = 0.001
"""The pause, in seconds, after a schedule that plans nothing, so that waiting does not keep a core busy."""


class CheckedPool:
    """What a scheduler gets of a pool: the pool itself, but a fault in what schedulers call raises a PluginError that
    names the pool's plugin (``whose``), not the scheduler's."""

    def __init__(self, pool: CachePoolProtocol, whose: str) -> None:
        self._pool = pool
        named = Named(f"{whose} failed")
        for name in ("allocate", "grow", "commit", "free", "free_tokens", "forks"):
            if hasattr(pool, name):
                setattr(self, name, _guarded(named, getattr(pool, name)))
        # isinstance does not see what only __getattr__ finds: SharingPool and RoomyPool.
        with named:
            for name in ("shares", "room"):
                if hasattr(pool, name):
                    setattr(self, name, getattr(pool, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _guarded(named: Named, method: Callable[..., T]) -> Callable[..., T]:
    def call(*given: Any, **more: Any) -> T:
        with named:
            return method(*given, **more)

    return call


class CheckedScheduler:
    """Wraps a scheduler, and turns its faults into a PluginError that names it (``whose``).

    It always checks that the scheduler plans something at all, which costs next to nothing. It checks each piece of
    work only if ``thorough``, which takes as long as core's schedulers take to plan."""

    def __init__(
        self,
        scheduler: SchedulerProtocol,
        whose: str,
        *,
        thorough: bool,
        patience_s: float = PATIENCE_S,
        loading: Callable[[], bool] = lambda: False,
    ) -> None:
        """While the pool is ``loading``, a scheduler that plans nothing is not stuck."""
        self._scheduler = scheduler
        self._loading = loading
        self._whose = whose
        self._named = Named(f"{whose} failed")
        self._thorough = thorough
        self._patience_s = patience_s
        self._idle_since: float | None = None
        """Since when the scheduler has planned nothing although it has work and no sequence was added or finished."""
        self._here: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        self._idle_since = None
        self._here[sequence.id] = sequence
        with self._named:
            self._scheduler.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._idle_since = None
        self._here.pop(sequence.id, None)
        with self._named:
            self._scheduler.finish(sequence)

    def has_work(self) -> bool:
        """Whether anybody is here. The scheduler is not asked: if it forgot a request, that would wait for ever."""
        return bool(self._here)

    def schedule(self) -> Schedule:
        with self._named:
            schedule = self._scheduler.schedule()
        if self._thorough:
            self._check(schedule)
        if schedule.decodes or schedule.prefills:
            self._idle_since = None
        else:
            self._wait()
        return schedule

    def _wait(self) -> None:
        """Pause after an empty schedule; raise PluginError after ``patience_s`` of them.

        An empty schedule makes the engine read what is under way, so from the second one on nothing is.
        """
        if not self._here:
            return
        now = time.monotonic()
        if self._loading():
            self._idle_since = None
            time.sleep(PAUSE_S)
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self._patience_s:
            raise PluginError(
                f"{self._whose} has planned nothing for {self._patience_s:g} s, though it has work (requests: "
                f"{len(self._here)}) and nothing is under way: it is stuck, or the cache pool has no room for a single "
                "request."
            )
        else:
            time.sleep(PAUSE_S)

    def _check(self, schedule: Schedule) -> None:
        if not isinstance(schedule, Schedule):
            raise PluginError(f"{self._whose} planned a {type(schedule).__name__}, not a Schedule.")
        seen: set[str] = set()
        for name, works in (("decodes", schedule.decodes), ("prefills", schedule.prefills)):
            for work in works:
                if not isinstance(work, Work):
                    raise PluginError(f"{self._whose} planned a {type(work).__name__} in {name}, not a Work.")
                sequence = work.sequence
                at = f"{self._whose} planned {sequence.id} from {work.start} on for {work.length}"
                if sequence.id in seen:
                    raise PluginError(f"{at}, though it is in the same step already.")
                seen.add(sequence.id)
                if self._here.get(sequence.id) is not sequence:
                    raise PluginError(f"{at}, though it has ended.")
                if sequence.slot is None:
                    raise PluginError(f"{at}, though it has no slot.")
                if not 1 <= work.length <= len(sequence.tokens) - sequence.num_computed:
                    left = len(sequence.tokens) - sequence.num_computed
                    raise PluginError(f"{at}, though {left} of its tokens are left to compute.")
                if work != sequence.extend(work.length):
                    raise PluginError(f"{at}, which is not what its extend({work.length}) gives.")
                if work.decode != (name == "decodes") or (work.decode and work.length != 1):
                    raise PluginError(
                        f"{at} in {name}; decodes are of length 1, after prefill_end, and prefills before."
                    )
