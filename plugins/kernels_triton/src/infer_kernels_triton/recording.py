"""Recordings of a pass's kernels as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CudaRecorder:
    """A RecorderProtocol of CUDA graphs. They share one memory pool, since no two of them run at the same time."""

    cheap = False

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        run()  # compiles and allocates what the first run needs, which a graph must not capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay(), replay
