"""Seats: which sequences run and which wait, and what a step may still compute. Policies (``schedulers.py``) decide who
is admitted and who is preempted."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infer.contracts.protocols import CachePoolProtocol
from infer.contracts.request import Request
from infer.contracts.schedule import Schedule, Sequence, Work, new_work

if TYPE_CHECKING:
    from infer.settings import EngineSettings


class Seats:
    """The sequences that run, at most ``max_batch_size`` and each with a slot of the pool, and those that wait.

    A policy plans a step with ``begin``, then calls ``admit`` for those of ``waiting`` that it chooses, and returns the
    step's ``schedule``. It passes on ``add``, ``finish`` and ``has_work``.

    The pool must have room for one sequence of full length. Then a sequence that runs alone can always go on, and every
    request ends, provided that the policy does not let two sequences preempt each other for ever.

    Where the pool shares prefixes, the requests of a group compute their prompt once: until the first of them has its
    prompt in the cache, the others are not in ``waiting``. If the first leaves before that, the next takes its place.
    """

    def __init__(
        self,
        pool: CachePoolProtocol,
        settings: EngineSettings,
        key: Callable[[Sequence], Any] = lambda sequence: sequence.rank,
    ) -> None:
        """``key`` sorts ``running`` and ``waiting``. A sequence's key must not change while the sequence is here."""
        self._pool = pool
        self._settings = settings
        self._key = key
        self.running: list[Sequence] = []
        """Sorted by key. Prompts under way get their chunks in this order."""
        self.waiting: list[Sequence] = []
        """Sorted by key: the sequences that may be admitted. By the default key, preempted sequences come before all
        sequences of their priority that never ran, because they are older."""
        self._shares: bool = getattr(pool, "shares", False)
        self._groups: dict[str, list[Sequence]] = {}
        """The groups of which no sequence has its prompt in the cache yet. The first of each runs or is in ``waiting``;
        the others are only here."""

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        request = sequence.request
        if self._shares and request.group and _reuses(request):
            members = self._groups.setdefault(request.group, [])
            members.append(sequence)
            if len(members) > 1:
                return
        insort(self.waiting, sequence, key=self._key)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def finish(self, sequence: Sequence) -> None:
        """Let go of a sequence that has ended, whether it runs or waits."""
        members = self._groups.get(sequence.request.group, [])
        if sequence in members[1:]:
            members.remove(sequence)
            return
        self._let_follow(sequence)
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def begin(self, victim: Callable[[], Sequence]) -> Step:
        """Begin a step with a token for every sequence that decodes, then a chunk of each prompt under way, as far as
        the limits go. While the pool has no room for a sequence's next token, the running sequence that ``victim``
        names is preempted."""
        decodes: list[Work] = []
        prefilling: list[Sequence] = []
        preempted = False
        grow = self._pool.grow
        for sequence in list(self.running):
            slot, start, num_tokens = sequence.slot, sequence.num_computed, len(sequence.tokens)
            if slot is None or start < sequence.prefill_end:
                prefilling.append(sequence)
                continue
            if start == sequence.prefill_end:
                self._commit(sequence)
                self._let_follow(sequence)
            if num_tokens >= sequence.max_len:
                continue
            while not grow(slot, num_tokens):
                chosen = victim()
                self.preempt(chosen)
                preempted = True
                if chosen is sequence:
                    break
            else:
                decodes.append(new_work((sequence, start, 1, 1, True)))
        if preempted:  # perhaps one whose token was planned already
            decodes = [work for work in decodes if work.sequence.slot is not None]
        step = Step(decodes, self._settings)
        for sequence in prefilling:
            if sequence.slot is not None:
                self._commit(sequence)
                if not step.extend(sequence):
                    break
        return step

    def admit(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence a seat and room for its whole prompt, so that no prefill fails half-way for want of
        room, and plan its first chunk. False, having changed nothing, where a limit or the pool does not allow it."""
        if len(self.running) >= self._settings.max_batch_size or sequence.pending:
            return False
        if not step.has_room(len(sequence.tokens)):
            return False
        request = sequence.request
        place = self._pool.allocate(sequence.tokens, reuse=_reuses(request), salt=request.cache_salt)
        if place is None:
            return False
        sequence.slot, sequence.num_computed = place.slot, place.num_cached
        sequence.prefill_end = len(sequence.tokens)
        if not step.extend(sequence):
            self._release(sequence)
            return False
        if sequence.preemptions == 0:
            sequence.num_cached = place.num_cached
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=self._key)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's room. It waits, keeps its tokens, and computes again what the cache loses of it."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self._key)

    def _let_follow(self, first: Sequence) -> None:
        """The first of a group has its prompt in the cache, so that the others may be admitted; or it leaves without,
        so that the next is the first."""
        members = self._groups.get(first.request.group, [])
        if members[:1] != [first]:
            return
        del members[0]
        computed = first.num_computed >= first.num_prompt
        for sequence in members if computed else members[:1]:
            insort(self.waiting, sequence, key=self._key)
        if computed or not members:
            del self._groups[first.request.group]

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


class Step:
    """What is planned for a step, and what is left of the step's limits."""

    def __init__(self, decodes: list[Work], settings: EngineSettings) -> None:
        unlimited = 1 << 62
        tokens, chunks = settings.max_tokens_per_step, settings.max_prefill_chunks_per_step
        partial = settings.max_num_partial_prefills
        self.schedule = Schedule(decodes, [], settings.mixed_batches)
        """The plan so far."""
        self._tokens = (unlimited if tokens is None else tokens) - len(decodes)
        self._chunks = unlimited if chunks is None else chunks
        self._partial = unlimited if partial is None else partial
        self._chunk_size = settings.prefill_chunk_size if settings.use_chunked_prefill else None

    def has_room(self, remaining: int) -> bool:
        """Whether a prompt with so many tokens to go could get its next chunk (a cheap test before allocating)."""
        whole = self._chunk_size is None and remaining > self._tokens
        return self._tokens > 0 and self._chunks > 0 and not whole

    def extend(self, sequence: Sequence) -> bool:
        """Plan the sequence's next chunk. False when a limit forbids it."""
        remaining = sequence.prefill_end - sequence.num_computed
        length = remaining if self._chunk_size is None else min(remaining, self._chunk_size, self._tokens)
        left_partial = length < remaining
        if not self.has_room(remaining) or (left_partial and self._partial <= 0):
            return False
        self._partial -= left_partial
        self._chunks -= 1
        self._tokens -= length
        self.schedule.prefills.append(sequence.extend(length))
        return True


def _reuses(request: Request) -> bool:
    """Whether the request takes K/V that the cache holds already: log-probabilities of a prompt need every position
    computed."""
    return request.params.prompt_logprobs is None
