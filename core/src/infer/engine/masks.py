"""The masks of structured outputs, each within a time."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Sequence

from infer.contracts.grammar import MASK_SECONDS, TOO_SLOW, MatcherProtocol


class Masks:
    """Computes masks in a thread of its own, so that a mask that takes too long can be abandoned. Not thread-safe."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def compute(self, matchers: Sequence[MatcherProtocol]) -> None:
        """Bring each matcher's ``allowed`` up to date. A matcher that takes longer than ``MASK_SECONDS`` gives up."""
        left = [matcher for matcher in matchers if matcher.fault is None]
        while left:
            worker = self._worker = self._worker or _Worker()
            done = worker.run(left)
            for index, matcher in enumerate(left[:done]):
                if why := worker.raised.get(index):
                    matcher.abandon(why)
                else:
                    matcher.settle()
            if done < len(left):
                self._worker = None
                left[done].abandon(TOO_SLOW)
            left = left[done + 1 :]

    def __del__(self) -> None:
        if self._worker is not None:
            self._worker.end()


class _Worker:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Sequence[MatcherProtocol] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._at = 0, 0.0
        """The index of the matcher that is being computed, and the thread's CPU time when it began."""
        self._left = False
        self.raised: dict[int, str] = {}
        """What matchers of the last run have raised, by their indices."""
        self._thread = threading.Thread(target=self._work, name="infer-masks", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def run(self, matchers: Sequence[MatcherProtocol]) -> int:
        """Compute the matchers' masks, and return how many are done. If these are not all, the next one took too long,
        and this worker cannot be used any more."""
        self._at, self.raised = (0, math.inf), {}
        self._jobs.put(matchers)
        patience = MASK_SECONDS
        while True:
            try:
                self._done.get(timeout=patience)
                return len(matchers)
            except queue.Empty:
                with self._lock:
                    index, began = self._at
                    # Count the thread's own CPU time: on a busy machine it may not have run at all.
                    patience = max(began + MASK_SECONDS - time.clock_gettime(self._clock), 0.001)
                    if patience > 0.001 or not self._done.empty():
                        patience = min(patience, MASK_SECONDS)
                        continue
                    self._left = True
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, 19)
                return index

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            for index, matcher in enumerate(job):
                with self._lock:
                    if self._left:
                        return
                    self._at = index, time.thread_time()
                try:
                    matcher.compute()
                except BaseException as error:  # a panic in Rust does not arrive as an Exception
                    self.raised[index] = f"{type(error).__name__}: {error}"
            with self._lock:
                if self._left:
                    return
                self._done.put(None)
            del job, matcher
