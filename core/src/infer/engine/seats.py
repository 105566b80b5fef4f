"""Seats: which sequences run and which wait, and what a step may still compute. Policies (``schedulers.py``) decide
which sequences are admitted and which are preempted."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import compress
from operator import gt
from typing import TYPE_CHECKING, Any

from infer.contracts.cache import CachePoolProtocol, ForkingPool, RoomyPool, SharingPool
from infer.contracts.request import Request
from infer.contracts.scheduler import Schedule, Sequence, Works

if TYPE_CHECKING:
    from infer.contracts.sections import EngineSettings


class Seats:
    """The running sequences, at most ``max_batch_size`` and each with a slot in the pool, and the waiting ones.

    A policy begins a step with ``begin``, calls ``admit`` for the waiting sequences that it chooses, and returns the
    step's ``schedule``. It forwards its own ``add``, ``finish`` and ``has_work`` to the seats.

    The pool must have room for one sequence of full length. A sequence that runs alone can then always continue, and
    every request ends, provided that the policy does not let two sequences preempt each other for ever.

    If the pool shares prefixes, the requests of a group compute their prompt once: until the first of them has its
    prompt in the cache, the others are not in ``waiting``. If the first leaves before that, the next takes its place.
    """

    def __init__(
        self,
        pool: CachePoolProtocol,
        settings: EngineSettings,
        key: Callable[[Sequence], Any] = lambda sequence: sequence.rank,
    ) -> None:
        """``key`` gives the sort key for ``running`` and ``waiting``. A sequence's key must not change while the
        sequence runs or waits."""
        self._pool = pool
        self._settings = settings
        self.key = key
        self.running: list[Sequence] = []
        """Sorted by key. Sequences in prefill get their chunks in this order."""
        self.waiting: list[Sequence] = []
        """The sequences that may be admitted, sorted by key. By the default key, preempted sequences come before those
        of the same priority that never ran, because they arrived earlier."""
        self._shares = isinstance(pool, SharingPool) and pool.shares
        self._room: Seq[int] | Mapping[int, int] = pool.room if isinstance(pool, RoomyPool) else defaultdict(int)
        """How many positions each slot can have before it has to grow."""
        self._forking = pool if isinstance(pool, ForkingPool) else None
        self._decoding: list[Sequence] = []
        """Who decoded in the last step, if nobody else ran in it."""
        self._edges: list[int] = []
        """How many tokens each of them can have before it needs more room, or has all its tokens."""
        self._groups: dict[str, list[Sequence]] = {}
        """The groups whose prompt is not in the cache yet. The first sequence of each group runs or is in ``waiting``;
        the others are only here."""

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        request = sequence.request
        if self._shares and request.group and _reuses(request):
            members = self._groups.setdefault(request.group, [])
            members.append(sequence)
            if len(members) > 1:
                return
        insort(self.waiting, sequence, key=self.key)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def full(self) -> bool:
        """Whether as many sequences run as may, so that none can be admitted."""
        return len(self.running) >= self._settings.max_batch_size

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, whether it was running or waiting, and free its slot."""
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

    def begin(self, victim: Callable[[], Sequence], *, chunks: bool = True) -> Step:
        """Begin a step: plan one token for every decoding sequence, then a chunk for each sequence in prefill, as far
        as the limits allow; without ``chunks``, ``extend`` does the latter, in another order. While the pool
        has no room for a sequence's next token, preempt the running sequence that ``victim`` returns."""
        if self.running == self._decoding and self._go_on():
            return Step(Works.decodes(self._decoding), self._settings)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        preempted = False
        room, grow = self._room, self._pool.grow
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
            while num_tokens > room[slot] and not grow(slot, num_tokens):
                chosen = victim()
                self.preempt(chosen)
                preempted = True
                if chosen is sequence:
                    break
            else:
                decoding.append(sequence)
        if preempted:  # perhaps a sequence whose token was already planned
            decoding = [sequence for sequence in decoding if sequence.slot is not None]
        if len(decoding) == len(self.running):
            self._decoding, self._edges = decoding, [self._edge(sequence) for sequence in decoding]
        step = Step(Works.decodes(decoding), self._settings)
        for sequence in prefilling if chunks else ():
            if sequence.slot is not None and not self.extend(sequence, step):
                break
        return step

    def _go_on(self) -> bool:
        """Whether all who decoded in the last step can go on as they are. Only those at an edge are looked at."""
        counts = [len(sequence.tokens) for sequence in self._decoding]
        for i in [*compress(range(len(counts)), map(gt, counts, self._edges))]:
            sequence = self._decoding[i]
            if counts[i] >= sequence.max_len or not self._pool.grow(self._slot(sequence), counts[i]):
                return False
            self._edges[i] = self._edge(sequence)
        return True

    def _edge(self, sequence: Sequence) -> int:
        return min(self._room[self._slot(sequence)], sequence.max_len - 1)

    def extend(self, sequence: Sequence, step: Step) -> bool:
        """Plan a chunk for a sequence in prefill; return False if a limit forbids it."""
        self._commit(sequence)
        return step.extend(sequence)

    def admit(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence a slot with room for its whole prompt, so that no prefill runs out of room half-way,
        and plan its first chunk. Return False, with nothing changed, if a limit or the pool does not allow it. Raises
        ValueError if it is called for more sequences than wait, and all in vain: it would be for ever."""
        if step.refused > len(self.waiting):
            raise ValueError(
                f"admit was False {step.refused} times in a row in one step, and {len(self.waiting)} sequences wait: "
                "there is no room, so stop, or ask once for each"
            )
        admitted = self._admit(sequence, step)
        step.refused = 0 if admitted else step.refused + 1
        return admitted

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        if self.full or sequence.pending:
            return False
        if not step.has_room(len(sequence.tokens)):
            return False
        request = sequence.request
        place = self._pool.allocate(sequence.tokens, reuse=_reuses(request), salt=request.prefix_salt)
        if place is None:
            return False
        if request.forks and self._forking is not None:
            self._forking.forks(place.slot, request.forks)
        sequence.slot, sequence.num_computed = place.slot, place.num_cached
        sequence.prefill_end = len(sequence.tokens)
        if not step.extend(sequence):
            self._release(sequence)
            return False
        if not sequence.recomputed:
            sequence.num_cached = place.num_cached
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=self.key)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's slot. The sequence waits again and keeps its tokens; once admitted, it computes
        again whatever the cache no longer holds of it. Raises ValueError if it does not run."""
        if sequence.slot is None:
            raise ValueError(f"{sequence.id} does not run: what victim gives, and who is preempted, is in running")
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self.key)

    def _let_follow(self, first: Sequence) -> None:
        """If ``first`` leads a group, let others follow: all of them if its prompt is in the cache; if it leaves before
        that, the next one, which then leads the group."""
        members = self._groups.get(first.request.group, [])
        if members[:1] != [first]:
            return
        del members[0]
        computed = first.num_computed >= first.num_prompt
        for sequence in members if computed else members[:1]:
            insort(self.waiting, sequence, key=self.key)
        if computed or not members:
            del self._groups[first.request.group]

    def _commit(self, sequence: Sequence) -> None:
        known = min(sequence.num_computed, len(sequence.tokens) - sequence.pending)
        self._pool.commit(self._slot(sequence), sequence.tokens, known)

    def _release(self, sequence: Sequence) -> None:
        self._commit(sequence)
        self._pool.free(self._slot(sequence))
        self._decoding = []  # or somebody could come back to a step that has left it out
        sequence.slot = None
        sequence.num_computed = 0

    @staticmethod
    def _slot(sequence: Sequence) -> int:
        assert sequence.slot is not None, f"{sequence.id} does not run"
        return sequence.slot


class Step:
    """The plan of a step so far, and what remains of the step's limits."""

    def __init__(self, decodes: Works, settings: EngineSettings) -> None:
        unlimited = 1 << 62
        tokens, chunks = settings.max_tokens_per_step, settings.max_prefill_chunks_per_step
        partial = settings.max_num_partial_prefills
        self.schedule = Schedule(decodes, [], settings.mixed_batches)
        self.refused = 0
        """How often in a row ``Seats.admit`` has been False."""
        self._tokens = (unlimited if tokens is None else tokens) - len(decodes)
        self._chunks = unlimited if chunks is None else chunks
        self._partial = unlimited if partial is None else partial
        self._chunk_size = settings.prefill_chunk_size if settings.use_chunked_prefill else None

    def has_room(self, remaining: int) -> bool:
        """Whether a prompt with ``remaining`` tokens to compute could get its next chunk: a cheap test before
        allocating."""
        whole = self._chunk_size is None and remaining > self._tokens
        return self._tokens > 0 and self._chunks > 0 and not whole

    def extend(self, sequence: Sequence) -> bool:
        """Plan the sequence's next chunk; return False if a limit forbids it."""
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
    """Whether the request may use K/V that the cache already holds. Prompt logprobs and means need every position
    computed."""
    return request.params.prompt_logprobs is None and request.pooling != "mean"
