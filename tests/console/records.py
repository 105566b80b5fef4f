"""Records as an engine makes them."""

from __future__ import annotations

from collections.abc import Callable

from infer.contracts.records import RequestRecord, StepRecord, WorkRecord


def step(index: int, *ids: str, blocks: Callable[[], bytes] | None = lambda: bytes([0, 1, 2, 3])) -> StepRecord:
    """A step in which all of these decode, a second after the one before it."""
    return StepRecord(
        index=index,
        started=float(index),
        finished=index + 0.5,
        work=[WorkRecord(id, "decode", 5 + index, 1, True) for id in ids],
        passes=1,
        decodes=len(ids),
        chunks=0,
        computed_tokens=len(ids),
        padded_tokens=len(ids),
        running=len(ids),
        waiting=0,
        free_tokens=90,
        blocks=blocks,
    )


def ended(id: str) -> RequestRecord:
    return RequestRecord(id, 5, 3, 0, "length", 0.0, 0.0, 0.5, 1.0, 0, free_tokens=100)
