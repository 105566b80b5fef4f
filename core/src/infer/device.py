"""Small arrays to the device and back, and host memory on huge pages."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's malloc.h."""
KEPT = 32 << 20
"""Blocks below this size are what glibc keeps of its own accord."""
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux says how much memory control groups may use, and in which of them this process is."""
HUGE_PAGE = 2 << 20
LARGE = 8 * HUGE_PAGE
"""Bytes from which on part of a huge page is nothing to a tensor."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux's mman.h."""
THREAD = "infer-pages"
VERSIONS = {"": ("", "max", "current"), "memory": ("memory", "limit_in_bytes", "usage_in_bytes")}
"""Of the groups of version 2 and of those of version 1 for memory: their folder, and the files of limit and use."""


_bounds = (0, sys.maxsize)


def bound_memory(least: int, most: int) -> None:
    """From now on, ``free_memory`` says no less and no more than this in this process: what others may take later is
    not this one's, and an arithmetic about a machine that is empty is done on one that is not."""
    global _bounds
    _bounds = (least, most)


def free_memory(device: torch.device) -> int:
    """Bytes of memory that can be allocated now: the GPU's, or the machine's within the limits of the control groups
    that the process is in, as containers and services set them; within the bounds of ``bound_memory``."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = min([psutil.virtual_memory().available, *_left_by_cgroups()])
    least, most = _bounds
    return max(least, min(free, most))


def _left_by_cgroups() -> Iterator[int]:
    """What each control group with a limit has left. The kernel drops a group's cached files when memory runs out, so
    that these count as free."""
    for line in OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []:
        _, controllers, own = line.split(":", 2)
        for controller in VERSIONS.keys() & {*controllers.split(",")}:
            root, most, now = VERSIONS[controller]
            group = CGROUPS / root / own.strip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(CGROUPS / root):
                    break
                limit, used, kinds = (folder / f"memory.{name}" for name in (most, now, "stat"))
                if limit.exists() and used.exists() and (bound := limit.read_text().strip()) != "max":
                    stat = dict(line.split() for line in kinds.read_text().splitlines()) if kinds.exists() else {}
                    files = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                    yield int(bound) - int(used.read_text()) + int(files)


def taken_by(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes of a GPU's memory that a run takes at a time, besides what is taken already. On a CPU nothing is
    run, and the answer is 0: nobody counts there, and pools leave half of the memory."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()  # or what the run has taken would not count as free
    return most - before


def upload(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """``values`` on ``device``. On a CPU, the result shares memory with ``values``.

    The pinned pages come from torch's caching allocator, which does not hand them out again before the copy is done.
    """
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class FixedTensor:
    """A tensor that stays where it is, for recorded passes to read what the host writes before each replay."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._array = tensor.numpy() if tensor.device.type == "cpu" else None
        """The same memory. torch takes several times as long as numpy to copy small arrays."""

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """Copy ``values`` into the leading rows, and columns, without waiting."""
        place: Any = slice(len(values)) if values.ndim == 1 else tuple(map(slice, values.shape))
        if self._array is not None:
            self._array[place] = values
        else:
            self.tensor[place].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def put(self, rows: np.ndarray[Any, Any], values: Tensor) -> None:
        """Copy ``values``, which are on the same device, into the given rows."""
        if self._array is not None:
            self._array[rows] = values.numpy()
        else:
            self.tensor[upload(rows, self.tensor.device)] = values


@contextmanager
def blocks_given_back() -> Iterator[None]:
    """Until the context ends, malloc returns large blocks to the system as soon as they are freed. Once a block of up
    to 32 MiB has been freed, glibc keeps all such blocks, and while a checkpoint is loaded, what it keeps grows to a
    tenth of the weights, and to a third of those of many small experts."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):  # another C library
        yield
        return
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    try:
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, KEPT)
        libc.mallopt(TRIM_THRESHOLD, 2 * KEPT)
        libc.malloc_trim(0)


def pages(nbytes: int) -> mmap.mmap:
    """New zeroed host memory, on huge pages if the system has them; it takes no room before it is touched. With small
    pages, part of the time in which a weight is read goes into looking up pages."""
    memory = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)  # private: mappings that forks share get small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, share: float = 0.0) -> Tensor:
    """Like ``torch.zeros``, but on a CPU in memory from ``pages``. A large tensor begins behind this ``share`` of a
    huge page. The system clears a page when it is first written: with a share of their own, tensors that fill up alike
    do not all wait for that in the same pass."""
    if device.type != "cpu" or 0 in shape:  # no memory cannot be mapped
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    skipped = int(share * HUGE_PAGE) // mmap.PAGESIZE * mmap.PAGESIZE if nbytes > LARGE else 0
    return torch.frombuffer(pages(skipped + nbytes), dtype=dtype, count=count, offset=skipped).view(shape)


def clear_first_pages(tensors: Sequence[Tensor]) -> None:
    """Have the system clear the page in which each large tensor of host memory begins, in a thread of its own: the
    first pass would wait for that otherwise, for 0.3 s in some virtual machines, if the huge pages are those of every
    layer's K and V. What the tensors hold stays. Systems before Linux 5.14 clear pages when they are written."""
    large = [each for each in tensors if each.device.type == "cpu" and each.nbytes > LARGE]
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not large or not hasattr(libc, "madvise"):
        return

    def clear() -> None:
        for each in large:
            page = each.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(1), POPULATE_WRITE)

    threading.Thread(target=clear, name=THREAD, daemon=True).start()


def download(values: Tensor) -> Tensor:
    """Start copying ``values`` to the host. The result is valid once the device has reached a later ``mark``."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit. Unlike with ``torch.equal``, a NaN equals itself."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished everything launched before this call."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def caller() -> str:
    """Module and name of the innermost calling function that belongs neither to torch nor to the module that asks."""
    frame = sys._getframe(1)
    passed = {"torch", str(frame.f_globals["__name__"])}
    while frame.f_back is not None and not passed.isdisjoint(
        ((name := str(frame.f_globals.get("__name__"))), name.partition(".")[0])
    ):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
