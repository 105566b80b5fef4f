"""Getting a step's small arrays to where the kernels run and back, without waiting; recording what is done there."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray[Any, Any], device: torch.device, out: Tensor | None = None) -> Tensor:
    """``values`` on ``device``; into the leading rows of ``out`` where that is given.

    Pinned pages come from torch's caching allocator, which does not hand them out again before the copy is done.
    """
    host = torch.from_numpy(values)
    if device.type == "cpu":
        if out is None:
            return host
        rows = out[: values.shape[0]]
        rows.numpy()[...] = values  # what torch needs to copy small arrays is several times as long
        return rows
    host = host.pin_memory()
    if out is None:
        return host.to(device, non_blocking=True)
    return out[: len(host)].copy_(host, non_blocking=True)


def pages(nbytes: int) -> mmap.mmap:
    """Fresh memory of the host's: zeros that take no room before they are touched, on huge pages where the system has
    them. With small pages, a part of the time in which a weight is read goes into finding them."""
    memory = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)  # memory shared with forks has small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros; on a CPU, of ``pages``."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def download(values: Tensor) -> Tensor:
    """``values`` on the host, to be read once a later ``mark`` has been reached."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal, of NaN too."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done all that it was told so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def caller() -> str:
    """The innermost function, by module and name, that is neither torch's nor of the module that asks."""
    frame = sys._getframe(1)
    passed = {"torch", str(frame.f_globals["__name__"])}
    while frame.f_back is not None and not passed.isdisjoint(
        ((name := str(frame.f_globals.get("__name__"))), name.partition(".")[0])
    ):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


class CudaRecorder:
    """A RecorderProtocol. CUDA graphs that share one pool of memory, since they never run at a time."""

    cheap = False

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        run()  # whatever is compiled or allocated the first time may not be part of a graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay(), replay
