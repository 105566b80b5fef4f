"""The contract of schedulers, and what they plan with: ``Sequence``, the engine's record of a request, and
``Schedule``, the plan of a step. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.registration import Registration
from infer.contracts.sections import EngineSettings

if TYPE_CHECKING:
    from infer.contracts.request import Request

PENDING = -1
"""A placeholder in ``Sequence.tokens`` for a token that has not been read back from the device yet. The device has
drawn it by the time a pass needs it there."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine: its tokens, and how many of them the cache holds."""

    request: Request
    order: int
    """The sequence's place in the order of arrival."""
    max_len: int
    """The sequence ends at this many tokens, prompt included."""
    id: str = field(init=False)
    rank: tuple[float, int] = field(init=False)
    """(priority, arrival order), or the first of them as seconds: core's schedulers sort by it. It never changes."""
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    """Leading positions whose K/V are in the cache, or will be before any later pass runs. The scheduler sets it at
    admission, the engine with each pass."""
    prefill_end: int = 0
    """The sequence decodes once this many positions are computed: the number of tokens it had when it was admitted. Set
    by the scheduler."""
    slot: int | None = None
    """Its slot in the cache while it runs. Set by the scheduler."""
    num_cached: int = 0
    """How many prompt tokens the cache held when the sequence was first admitted. Set by the scheduler."""
    preemptions: int = 0
    """How often it has lost its slot to another. Set by the scheduler."""
    isolations: int = 0
    """How often it has lost its slot because a pass raised. Set by the engine."""
    counted: int = 0
    """Up to which position its owner's account has been charged; what is computed again costs nothing. Set by a
    scheduler that keeps accounts."""
    proposed: int = 0
    """How many draft tokens have been verified for it. Set by the engine."""
    accepted: int = 0
    """How many of them its answer has taken. Set by the engine."""
    prompt_scored: int = 0
    """How many prompt positions have their logprobs, or have been pooled. Set by the engine."""
    started: float | None = None
    """When it first took part in a pass, on ``time.perf_counter``. Set by the engine."""

    arrived: InitVar[float] = 0.0
    """When it arrived, in seconds on any clock."""
    aging_s: InitVar[float | None] = None
    """``engine.priority_aging_s``."""

    def __post_init__(self, arrived: float, aging_s: float | None) -> None:
        self.id = self.request.id
        self.tokens = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        priority = self.request.priority
        self.rank = (priority if aging_s is None else arrived + priority * aging_s, self.order)

    def restart(self) -> None:
        """It has no slot any more, and is computed again because a pass raised."""
        self.slot, self.num_computed, self.prefill_end = None, 0, 0
        self.isolations += 1

    @property
    def pending(self) -> int:
        """How many PENDING tokens ``tokens`` ends with."""
        count = 0
        while self.tokens[-1 - count] == PENDING:
            count += 1
        return count

    @property
    def recomputed(self) -> bool:
        """Whether it has had a slot before, and lost it."""
        return self.preemptions + self.isolations > 0

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt has been computed, so that tokens are drawn one after the other."""
        return self.slot is not None and self.num_computed >= self.prefill_end

    @property
    def complete(self) -> bool:
        """Whether all its tokens have been drawn, though perhaps not read back."""
        return len(self.tokens) >= self.max_len

    def extend(self, length: int) -> Work:
        """Its next piece of work."""
        start = self.num_computed
        return Work(self, start, length, int(start + length == len(self.tokens)), start >= self.prefill_end)


class Work(NamedTuple):
    """Extend ``sequence`` by positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    draws: int
    """Tokens to draw, one after each of the work's last ``draws`` positions: 1 if the work reaches the sequence's last
    token, else 0; more than 1 to verify draft tokens."""
    decode: bool
    """False while the sequence computes the tokens that it had when it was admitted."""
    drafts: tuple[int, ...] = ()
    """Draft tokens, which follow the sequence's own in positions [end - len(drafts), end). A scheduler plans none; the
    engine adds them."""

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + self.length


class Works(Seq[Work]):
    """Works as columns, one for each field of ``Work``. A step may have hundreds of works, so that an item is made only
    when it is read."""

    __slots__ = ("columns", "decode", "drafts", "draws", "lens", "sequences", "starts")

    def __init__(
        self,
        sequences: Seq[Sequence],
        starts: Seq[int],
        lens: Seq[int],
        draws: Seq[int],
        decode: Seq[bool],
        drafts: Seq[tuple[int, ...]],
    ) -> None:
        self.columns: tuple[Seq[Any], ...] = sequences, starts, lens, draws, decode, drafts
        self.sequences, self.starts, self.lens, self.draws = sequences, starts, lens, draws
        self.decode, self.drafts = decode, drafts

    @classmethod
    def of(cls, works: Seq[Work]) -> Works:
        """The columns of works, of which there is at least one."""
        return works if isinstance(works, Works) else cls(*zip(*works, strict=True))

    @classmethod
    def decodes(cls, sequences: Seq[Sequence]) -> Works:
        """Each sequence's next work if it decodes."""
        starts, ones = [sequence.num_computed for sequence in sequences], (1,) * len(sequences)
        return cls(sequences, starts, ones, ones, (True,) * len(sequences), ((),) * len(sequences))

    @property
    def single(self) -> bool:
        """Whether each decodes and draws one token, so that nothing else is computed."""
        return all(self.decode) and all(self.draws) and sum(self.lens) == len(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Work]:
        return map(Work._make, zip(*self.columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Work: ...
    @overload
    def __getitem__(self, index: slice) -> Works: ...
    def __getitem__(self, index: int | slice) -> Work | Works:
        fields: list[Any] = [column[index] for column in self.columns]
        return Works(*fields) if isinstance(index, slice) else Work(*fields)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of one step. A sequence is in at most one of the two."""

    decodes: Seq[Work]
    prefills: list[Work]
    mixed: bool = False

    def passes(self) -> Iterator[Seq[Work]]:
        """The works of each forward pass. If ``mixed``, one pass has all of them, so that the weights are read once;
        otherwise decodes go first, for a low inter-token latency."""
        if self.mixed and self.decodes and self.prefills:
            yield [*self.decodes, *self.prefills]
        else:
            yield from (works for works in (self.decodes, self.prefills) if works)


class SchedulerProtocol(Protocol):
    """Decides which sequences compute which positions in a step. It handles integers only: no tensors, no text."""

    def add(self, sequence: Sequence) -> None:
        """The sequence waits from now on: a new one, or one that is computed again after ``finish`` because a pass
        raised."""

    def schedule(self) -> Schedule:
        """Plan one step; the schedule is empty if nothing can run. Of its prompts, the engine may compute less than is
        planned, or nothing: by ``engine.target_itl_ms``, or because a pass raised."""

    def finish(self, sequence: Sequence) -> None:
        """The sequence, running or waiting, has ended, or is added again at once, because a pass raised: free its
        place in the cache at once."""

    def has_work(self) -> bool:
        """Whether any sequence runs or waits, even if nothing of it can run now."""


@dataclass(frozen=True)
class SchedulerContext:
    """What a scheduler is made from."""

    pool: CachePoolProtocol
    engine: EngineSettings


class SchedulerFactory(Protocol):
    """Makes a scheduler; ``settings`` is its own table, ``[engine.NAME]``."""

    def __call__(self, context: SchedulerContext, settings: Any) -> SchedulerProtocol: ...


@dataclass(frozen=True)
class SchedulerRegistration(Registration[SchedulerFactory]):
    """A scheduler, and whether it can prefill a prompt in chunks."""

    chunks: bool = True
    """False if it prefills whole prompts: ``engine.use_chunked_prefill`` is then off, and asking for it is an error."""
