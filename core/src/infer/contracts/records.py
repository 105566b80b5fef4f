"""The contract of observers, and what they receive: a record of each step, and one of each request when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class WorkRecord(NamedTuple):
    """What one sequence did in a step."""

    request_id: str
    kind: str
    """``decode`` or ``prefill``."""
    start: int
    length: int
    sampled: bool
    """Whether it drew a token."""
    proposed: int = 0
    """How many of the positions were those of draft tokens."""
    accepted: int = 0
    """How many of the draft tokens the answer took, in addition to the token that was drawn after them."""


class Totals(NamedTuple):
    """Token counts of all requests since the start."""

    prompt: int = 0
    """Prompt tokens. A prompt is counted when its first token is generated, or when the request ends without any."""
    cached: int = 0
    """Prompt tokens among these that the cache already held."""
    generated: int = 0
    proposed: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """Draft tokens that answers took; they are among ``generated``."""


NO_TOKENS = Totals()
"""Before any token."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished engine step. Times are seconds on ``time.perf_counter``."""

    index: int
    started: float
    finished: float
    work: Sequence[WorkRecord]
    passes: int
    decodes: int
    """How many sequences decoded."""
    chunks: int
    """How many sequences prefilled a chunk."""
    computed_tokens: int
    """Tokens that went through the model, in all passes together."""
    padded_tokens: int
    """How many tokens these would be if every sequence were padded to the longest of its pass."""
    running: int
    waiting: int
    free_tokens: int
    totals: Totals = NO_TOKENS
    proposed: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """How many of them answers took, each in addition to the one token that a decode yields. A draft that equals an
    answer's last token is not among them, nor are those beyond it: without them, the answer would have ended there as
    well."""
    blocks: Callable[[], bytes] | None = None
    """Makes a map of the cache, a ``BlockState`` per block as a byte; None if the pool has none. Call it only while the
    observer is called, in the engine's thread. It takes time in proportion to the number of blocks."""
    failed_passes: int = 0
    """Passes that raised since the previous record. Nothing else here counts them."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request. Times are seconds on ``time.perf_counter``."""

    request_id: str
    num_prompt: int
    num_generated: int
    num_cached: int
    finish_reason: str
    arrival: float
    started: float | None
    """When the request first took part in a pass."""
    first_token: float | None
    finished: float
    preemptions: int
    trace: Mapping[str, str] = field(default_factory=dict)
    """The client's W3C trace headers, ``traceparent``, ``tracestate`` and ``baggage``."""
    free_tokens: int = 0
    """How many positions the cache could allocate after the request was freed."""
    totals: Totals = NO_TOKENS
    proposed: int = 0
    """Draft tokens that were verified for the request."""
    accepted: int = 0
    """How many of them the answer took."""


class ObserverProtocol(Protocol):
    """Watches the engine. An observer has ``infer_step_finished``, ``infer_request_finished`` or both, which the
    engine's thread calls as it calls the hooks of these names. It may have ``close``, called once when the engine has
    ended."""


class ObserverFactory(Protocol):
    """Makes an observer; ``settings`` is its own table, ``[observers.NAME]``."""

    def __call__(self, settings: Any) -> ObserverProtocol: ...
