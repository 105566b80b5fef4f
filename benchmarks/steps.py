"""Recording an engine's steps."""

from __future__ import annotations

import itertools
import random
import statistics
import time

from infer import LLM, SamplingParams, hookimpl
from infer.contracts.records import StepRecord


class Steps:
    """An observer that keeps all step records."""

    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self.records.append(record)


def all_decode(record: StepRecord, batch: int) -> bool:
    """Whether a step decoded ``batch`` sequences and did nothing else."""
    return len(record.work) == batch and all(work.kind == "decode" for work in record.work)


def decode_gaps(steps: Steps, batch: int) -> list[float]:
    """Seconds from one step of ``batch`` decodes to the next."""
    pairs = itertools.pairwise(steps.records)
    return [b.finished - a.finished for a, b in pairs if all_decode(a, batch) and all_decode(b, batch)]


def timed(llm: LLM, steps: Steps, draw: random.Random, batch: int, prompt: int, new: int) -> tuple[float, float]:
    """The seconds until ``batch`` prompts of ``prompt`` random tokens all decode, and the median seconds of a decode
    step."""
    steps.records.clear()
    ids = [[draw.randrange(3, min(8000, llm.served.vocab_size)) for _ in range(prompt)] for _ in range(batch)]
    start = time.perf_counter()
    llm.generate(ids, SamplingParams(temperature=0, max_tokens=new + 2 * batch, ignore_eos=True))
    prefill = next(record.started for record in steps.records if all_decode(record, batch)) - start
    return prefill, statistics.median(decode_gaps(steps, batch))
