"""Whole models with random weights: decode steps, offline throughput, and how busy the device is."""

from __future__ import annotations

import gc
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.dry import DEVICE, DRY
from benchmarks.gpu.timing import Ceilings
from benchmarks.shapes import Costs, write
from benchmarks.steps import Steps, decode_gaps

from infer import LLM, SamplingParams

BATCHES = (1, 2) if DRY else (1, 8, 32, 128, 256)
CONTEXT = 16 if DRY else 1024
DECODED = 8 if DRY else 192
OFFLINE = (2, 16, 48) if DRY else (256, 1024, 1024)
"""(requests, prompt tokens, new tokens)."""
PROFILED_S = 0.01 if DRY else 1.0


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def exactly(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@contextmanager
def engine(config: Mapping[str, Any], device: str, **sections: Mapping[str, Any]) -> Iterator[tuple[LLM, Steps]]:
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write(Path(folder), config)),
            plugins=[steps],
            **{"model": {"load_format": "dummy", "device": device}, **sections},
        )
    with llm:
        yield llm, steps


def decode(llm: LLM, steps: Steps, costs: Costs, batch: int, ceilings: Ceilings | None) -> dict[str, Any]:
    """Measure decode steps of ``batch`` sequences, which begin with CONTEXT positions."""
    steps.records.clear()
    llm.generate(prompts(batch, CONTEXT, costs.vocab_size, batch), exactly(DECODED))
    gaps = sorted(decode_gaps(steps, batch))
    step = statistics.median(gaps)
    nbytes = costs.decode_bytes([CONTEXT + DECODED // 2] * batch)
    flops = batch * costs.flops(CONTEXT + DECODED // 2, 1)
    return {
        "sequences": batch,
        "step ms": step * 1e3,
        "tokens/s": batch / step,
        "GB/s": nbytes / step / 1e9,
        "of bound": ceilings.bound(nbytes, flops) / step if ceilings else None,
        "ITL p99/p50": gaps[math.ceil(0.99 * len(gaps)) - 1] / step,
    }


def offline(llm: LLM, steps: Steps, costs: Costs, ceilings: Ceilings | None) -> dict[str, Any]:
    """Measure all requests submitted at once, next to the time of all prefill and then all decode at their bounds."""
    requests, prompt, new = OFFLINE
    steps.records.clear()
    began = time.perf_counter()
    llm.generate(prompts(requests, prompt, costs.vocab_size, 1), exactly(new))
    took = time.perf_counter() - began
    bound = None
    if ceilings:
        prefill = requests * costs.flops(0, prompt)
        bound = prefill / ceilings.flops
        for i in range(1, new):
            flops = requests * costs.flops(prompt + i, 1)
            bound += ceilings.bound(costs.decode_bytes([prompt + i] * requests), flops)
    gaps = decode_gaps(steps, requests)
    return {
        "requests": requests,
        "prompt": prompt,
        "new": new,
        "seconds": took,
        "output tokens/s": requests * new / took,
        "of bound": bound / took if bound else None,
        "decode step ms": statistics.median(gaps) * 1e3 if gaps else None,
        "steps": len(steps.records),
    }


def busy(llm: LLM, costs: Costs, batch: int) -> dict[str, Any]:
    """The fraction of a second of steady decode during which a kernel ran, according to CUPTI."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    handles = [
        llm.submit(p, exactly(llm.served.max_seq_len - CONTEXT))
        for p in prompts(batch, CONTEXT, costs.vocab_size, 1000 + batch)
    ]
    for handle in handles:
        next(iter(handle.events()))
    with profile(activities=[ProfilerActivity.CPU if DRY else ProfilerActivity.CUDA]) as seen:
        time.sleep(PROFILED_S)
    for handle in handles:
        handle.abort()
        for _ in handle.events():
            pass
    spans = sorted((e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == DeviceType.CUDA)
    return {"sequences": batch, "device busy": covered(spans)}


def covered(spans: Sequence[tuple[float, float]]) -> float | None:
    """The fraction of the time from the first span's start to the last one's end that any span covers; None without
    spans. ``spans`` are sorted by their starts."""
    if not spans:
        return None
    inside, reached = 0.0, spans[0][0]
    for start, end in spans:
        inside += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return inside / (reached - spans[0][0]) if reached > spans[0][0] else None


def measure(config: Mapping[str, Any], ceilings: Ceilings, exact: bool, quantization: str = "none") -> dict[str, Any]:
    """Measure all figures of one model, and free its memory."""
    try:
        return _measure(config, ceilings, exact, quantization)
    finally:  # only here: a ``with`` statement within the function would still hold the model
        gc.collect()
        torch.cuda.empty_cache()


def _measure(config: Mapping[str, Any], ceilings: Ceilings, exact: bool, quantization: str) -> dict[str, Any]:
    costs = Costs(config, quantization)
    sections: dict[str, Mapping[str, Any]] = {
        "engine": {"max_batch_size": max(BATCHES), "max_seq_len": sum(OFFLINE[1:]), "max_tokens_per_step": 8192},
        "model": {"load_format": "dummy", "device": DEVICE.type, "quantization": quantization},
        "kernels": {"backend": "reference"} if DRY else {"backend": "triton", "triton": {"exact": exact}},
    }
    began = time.perf_counter()
    with engine(config, DEVICE.type, **sections) as (llm, steps):
        ready = time.perf_counter() - began
        llm.generate(prompts(2, CONTEXT, costs.vocab_size, 0), exactly(8))  # compile what has not been compiled yet
        return {
            "exact": llm.served.exact,
            "ready s": ready,
            "decode": [decode(llm, steps, costs, batch, ceilings) for batch in BATCHES],
            "busy": [busy(llm, costs, batch) for batch in ((1,) if DRY else (1, 32))],
            "offline": offline(llm, steps, costs, ceilings),
        }
