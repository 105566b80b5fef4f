"""Measuring time on the device, and what the device can do at best."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.gpu.dry import DRY

Run = Callable[[], object]

CACHES = 3
"""As many different inputs are made as are together this many times as large as the L2 cache."""


def seconds(make: Callable[[], Run], nbytes: int, budget_s: float = 0.15) -> float:
    """The median device time, in seconds, of one of the runs that ``make`` makes.

    Runs with different inputs, of ``nbytes`` each, are recorded as one graph, so that neither the L2 cache nor gaps
    between launches distort the time. The median is over replays.
    """
    if DRY:
        began = time.perf_counter()
        make()()
        return time.perf_counter() - began
    cache = torch.cuda.get_device_properties().L2_cache_size
    runs = [make() for _ in range(min(max(2, CACHES * cache // max(nbytes, 1)), 32))]
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in runs]
    one = _elapsed(graph.replay)
    times = [_elapsed(graph.replay) for _ in range(max(5, min(200, int(budget_s / one))))]
    del kept
    return statistics.median(times) / len(runs)


def _elapsed(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Ceilings:
    """What this device can do at best: bytes read and written per second, and bf16 operations per second."""

    bandwidth: float
    flops: float

    @classmethod
    def measure(cls) -> Ceilings:
        if DRY:
            return cls(1e10, 1e11)
        size = 1 << 30
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
        copy = statistics.median(_elapsed(lambda: target.copy_(source)) for _ in range(20))
        n = 8192
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = torch.empty_like(a)
        for _ in itertools.repeat(None, 3):
            torch.mm(a, b, out=out)
        product = statistics.median(_elapsed(lambda: torch.mm(a, b, out=out)) for _ in range(20))
        return cls(2 * size / copy, 2 * n**3 / product)

    def bound(self, nbytes: float, flops: float) -> float:
        """The least time, in seconds, in which the device can move ``nbytes`` and compute ``flops``."""
        return max(nbytes / self.bandwidth, flops / self.flops)
