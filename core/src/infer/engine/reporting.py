"""Reporting: token counts, and the records of steps and requests that observers receive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, repeat
from typing import overload

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.records import RequestRecord, StepRecord, Totals, WorkRecord
from infer.contracts.scheduler import Sequence, Works

Notify = Callable[[str, StepRecord | RequestRecord], None]
"""Calls the observers' hook of this name with a record."""


@dataclass(slots=True)
class Counts:
    """Token counts of all requests since the engine started, as in ``Totals``."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    proposed: int = 0
    accepted: int = 0

    def totals(self) -> Totals:
        return Totals(self.prompt, self.cached, self.generated, self.proposed, self.accepted)


class Reporter:
    """Makes the record of each step and of each finished request, and notifies the observers."""

    def __init__(
        self,
        pool: CachePoolProtocol,
        notify: Notify,
        *,
        speculative: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``speculative``: steps may verify draft tokens."""
        self._pool = pool
        self._block_states: Callable[[], bytes] | None = getattr(pool, "states", None)
        self._notify = notify
        self._clock = clock
        self._speculative = speculative
        self._steps = 0
        self._accepted: dict[str, int] = {}
        """How many draft tokens each request has accepted in this step, by request id."""
        self.counts = Counts()
        self.failed_passes = 0
        """How many passes have raised since the last step that was reported."""

    def accept(self, sequence: Sequence) -> None:
        """Count a draft token that the sequence's answer takes."""
        self._accepted[sequence.id] = self._accepted.get(sequence.id, 0) + 1
        self.counts.accepted += 1

    def step(self, started: float, passes: Seq[Works], num_open: int, waiting: int) -> None:
        """Report a step, of which at least one pass has not raised; ``passes`` are those. ``started`` is its beginning
        on the clock; ``waiting`` of the ``num_open`` requests have no slot."""
        work = passes[0] if len(passes) == 1 else Works.of([*chain(*passes)])
        *_, decode, drafts = work.columns
        decodes = sum(decode)
        self._notify(
            "infer_step_finished",
            StepRecord(
                index=self._steps,
                started=started,
                finished=self._clock(),
                work=WorkRecords(work, self._accepted),
                passes=len(passes),
                decodes=decodes,
                chunks=len(work) - decodes,
                computed_tokens=sum(work.lens),
                padded_tokens=sum([len(works.lens) * max(works.lens) for works in passes]),
                running=num_open - waiting,
                waiting=waiting,
                free_tokens=self._pool.free_tokens(),
                totals=self.counts.totals(),
                proposed=sum(map(len, drafts)) if self._speculative else 0,
                accepted=sum(self._accepted.values()),
                blocks=self._block_states,
                failed_passes=self.failed_passes,
            ),
        )
        self._accepted, self.failed_passes = {}, 0
        self._steps += 1

    def request(self, sequence: Sequence, *, generated: int, first_token: float | None, reason: str) -> None:
        """Report a request that has ended for ``reason`` and left its slot, after ``generated`` tokens."""
        self._notify(
            "infer_request_finished",
            RequestRecord(
                request_id=sequence.id,
                num_prompt=sequence.num_prompt,
                num_generated=generated,
                num_cached=sequence.num_cached,
                finish_reason=reason,
                arrival=sequence.request.arrival,
                started=sequence.started,
                first_token=first_token,
                finished=self._clock(),
                preemptions=sequence.preemptions,
                trace=sequence.request.trace,
                free_tokens=self._pool.free_tokens(),
                totals=self.counts.totals(),
                proposed=sequence.proposed,
                accepted=sequence.accepted,
            ),
        )


class WorkRecords(Seq[WorkRecord]):
    """A step's WorkRecords, each made only when it is read, because often no observer reads them."""

    def __init__(self, works: Works, accepted: Mapping[str, int]) -> None:
        """``accepted``: how many draft tokens each request has accepted; 0 if it is not there."""
        self._works = works
        self._accepted = accepted

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[WorkRecord]:
        sequences, starts, lens, draws, decode, drafts = self._works.columns
        ids = [sequence.id for sequence in sequences]
        kinds = ["decode" if each else "prefill" for each in decode]
        sampled = [each > 0 for each in draws]
        accepted = map(self._accepted.get, ids, repeat(0))
        made = zip(ids, kinds, starts, lens, sampled, map(len, drafts), accepted, strict=True)
        return map(WorkRecord._make, made)

    @overload
    def __getitem__(self, index: int) -> WorkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> WorkRecords: ...
    def __getitem__(self, index: int | slice) -> WorkRecord | WorkRecords:
        if isinstance(index, slice):
            return WorkRecords(self._works[index], self._accepted)
        sequence, start, length, draws, decode, drafts = self._works[index]
        kind, accepted = "decode" if decode else "prefill", self._accepted.get(sequence.id, 0)
        return WorkRecord(sequence.id, kind, start, length, draws > 0, len(drafts), accepted)
