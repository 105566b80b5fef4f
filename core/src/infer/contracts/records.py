"""What observers are told: of each step, and of each request at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """What one sequence did in a step."""

    request_id: str
    kind: str
    """``decode`` or ``prefill``."""
    start: int
    length: int
    sampled: bool
    """Whether it got a token."""


class Totals(NamedTuple):
    """Tokens of all requests since the start."""

    prompt: int = 0
    """Of prompts: counted with the first token of the answer, or with the end where none came."""
    cached: int = 0
    """Those of them that the cache already held."""
    generated: int = 0


NO_TOKENS = Totals()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished engine step. Times are seconds on ``time.perf_counter``."""

    index: int
    started: float
    finished: float
    work: Sequence[WorkRecord]
    passes: int
    decodes: int
    """Sequences that decoded."""
    chunks: int
    """Sequences that were prefilled."""
    computed_tokens: int
    """Of all passes."""
    padded_tokens: int
    """Tokens these passes would have had if each row were padded to the longest of its pass."""
    running: int
    waiting: int
    free_tokens: int
    totals: Totals = NO_TOKENS


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
    """When it first got into a pass."""
    first_token: float | None
    finished: float
    preemptions: int
    trace: Mapping[str, str] = field(default_factory=dict)
    """The client's headers that name its trace (W3C's ``traceparent`` and ``tracestate``)."""
    free_tokens: int = 0
    """Positions that could be allocated once it had gone."""
    totals: Totals = NO_TOKENS
