"""Watching an engine's steps."""

from __future__ import annotations

import itertools

from infer import hookimpl
from infer.hookspecs import StepRecord


class Steps:
    """An observer that keeps what it is told."""

    INFER_PLUGIN_API = 1

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self.records.append(record)


def all_decode(record: StepRecord, batch: int) -> bool:
    """Whether a step gave each of ``batch`` sequences a token, and did nothing else."""
    return len(record.work) == batch and all(work.kind == "decode" for work in record.work)


def decode_gaps(steps: Steps, batch: int) -> list[float]:
    """Seconds from one step of ``batch`` decodes to the next."""
    pairs = itertools.pairwise(steps.records)
    return [b.finished - a.finished for a, b in pairs if all_decode(a, batch) and all_decode(b, batch)]
