"""Who computes what in a step: iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve, 2024)."""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import TYPE_CHECKING, Any

from infer.contracts.protocols import CachePoolProtocol
from infer.contracts.schedule import Schedule, Sequence, Work, new_work

if TYPE_CHECKING:
    from infer.settings import EngineSettings


class ContinuousScheduler:
    """Each step: a token for everyone who decodes, then chunks of prompts under way, then new prompts in arrival order,
    all within ``max_tokens_per_step``. Where requests have priorities, these come before arrival.

    The cache must have room for one sequence of full length; then whoever runs alone can always go on, and every
    request ends.
    """

    def __init__(self, pool: CachePoolProtocol, settings: EngineSettings) -> None:
        self._pool = pool
        self._max_batch_size = settings.max_batch_size
        self._chunk_size = settings.prefill_chunk_size if settings.use_chunked_prefill else None
        self._max_tokens = settings.max_tokens_per_step
        self._max_chunks = settings.max_prefill_chunks_per_step
        self._max_partial = settings.max_num_partial_prefills
        self._mixed = settings.mixed_batches
        self.running: list[Sequence] = []
        """By key."""
        self.waiting: deque[Sequence] = deque()
        """By key; so the preempted come before all of their priority that never ran, being older."""

    def key(self, sequence: Sequence) -> Any:
        """The lowest is admitted first, and gets its tokens first; the highest is preempted first. It must not change
        while the sequence is here. A policy that differs in this alone overrides this method."""
        return sequence.rank

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self.key)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def finish(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def schedule(self) -> Schedule:
        admits = self._admits()
        decodes = self._decodes()
        step = _Step(self._max_tokens, self._max_chunks, self._max_partial, self._chunk_size)
        step.spend(len(decodes))
        for sequence in [s for s in self.running if s.num_computed < s.prefill_end]:
            self._commit(sequence)
            if not step.extend(sequence):
                break
        while admits and self.waiting and len(self.running) < self._max_batch_size:
            if not self._admit(self.waiting[0], step):
                break
        return Schedule(decodes, step.prefills, self._mixed)

    def _admits(self) -> bool:
        return True

    def _decodes(self) -> list[Work]:
        """One token for everyone past prefill, making room by preempting the last in rank."""
        works = []
        grow = self._pool.grow
        for sequence in list(self.running):
            slot, start, num_tokens = sequence.slot, sequence.num_computed, len(sequence.tokens)
            if slot is None or start < sequence.prefill_end or num_tokens >= sequence.max_len:
                continue
            if start == sequence.prefill_end:
                self._commit(sequence)
            while not grow(slot, num_tokens):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                works.append(new_work((sequence, start, 1, 1, True)))
        return works

    def _admit(self, sequence: Sequence, step: _Step) -> bool:
        """Take room for the whole prompt at once, so that no prefill fails half-way for want of it."""
        if sequence.pending or not step.has_room(len(sequence.tokens)):
            return False
        request = sequence.request
        place = self._pool.allocate(
            sequence.tokens, reuse=request.params.prompt_logprobs is None, salt=request.cache_salt
        )
        if place is None:
            return False
        sequence.slot, sequence.num_computed = place.slot, place.num_cached
        sequence.prefill_end = len(sequence.tokens)
        if not step.extend(sequence):
            self._release(sequence)
            return False
        if sequence.preemptions == 0:
            sequence.num_cached = place.num_cached
        self.waiting.popleft()
        insort(self.running, sequence, key=self.key)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self.key)

    def _commit(self, sequence: Sequence) -> None:
        known = min(sequence.num_computed, len(sequence.tokens) - sequence.pending)
        self._pool.commit(self._slot(sequence), sequence.tokens, known)

    def _release(self, sequence: Sequence) -> None:
        self._commit(sequence)
        self._pool.free(self._slot(sequence))
        sequence.slot = None
        sequence.num_computed = 0

    @staticmethod
    def _slot(sequence: Sequence) -> int:
        assert sequence.slot is not None, f"{sequence.id} does not run"
        return sequence.slot


class StaticScheduler(ContinuousScheduler):
    """Holds a batch until all its members finish, then takes the next. Stays as the comparison."""

    def _admits(self) -> bool:
        return not self.running


class _Step:
    """What is left of one step's limits while its prefills are chosen."""

    def __init__(self, tokens: int | None, chunks: int | None, partial: int | None, chunk_size: int | None) -> None:
        unlimited = 1 << 62
        self.prefills: list[Work] = []
        self._tokens = unlimited if tokens is None else tokens
        self._chunks = unlimited if chunks is None else chunks
        self._partial = unlimited if partial is None else partial
        self._chunk_size = chunk_size

    def spend(self, tokens: int) -> None:
        self._tokens -= tokens

    def has_room(self, remaining: int) -> bool:
        """Whether a prompt with so many tokens to go could get its next chunk (a cheap test before allocating)."""
        whole = self._chunk_size is None and remaining > self._tokens
        return self._tokens > 0 and self._chunks > 0 and not whole

    def extend(self, sequence: Sequence) -> bool:
        """Schedule the sequence's next chunk; False when a limit forbids it."""
        remaining = sequence.prefill_end - sequence.num_computed
        length = remaining if self._chunk_size is None else min(remaining, self._chunk_size, self._tokens)
        left_partial = length < remaining
        if not self.has_room(remaining) or (left_partial and self._partial <= 0):
            return False
        self._partial -= left_partial
        self._chunks -= 1
        self._tokens -= length
        self.prefills.append(sequence.extend(length))
        return True
