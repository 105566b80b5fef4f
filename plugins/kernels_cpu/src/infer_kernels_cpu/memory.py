"""Memory that is used again, since a pass asks for the same over and over."""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

from infer.device import pages

SMALL = 1 << 18
"""Bytes below which torch's own allocator does as well."""


class Buffers:
    """Where large results go. Freed memory of malloc's goes back to the system, which has to clear it before it gives
    it out again; that takes as long as many a kernel. What is freed here is kept, by size."""

    def __init__(self, small: int = SMALL) -> None:
        self._small = small
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As torch.empty."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < self._small or nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else pages(size)
        lease = memoryview(memory)  # lives as long as the last tensor on it
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=nbytes // dtype.itemsize).view(shape)
