"""Reusing the memory of results, since every pass needs the same sizes again."""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

from infer.device import pages

SMALL = 1 << 18
"""Below this many bytes torch's own allocator is as fast."""


class Buffers:
    """Allocates large results, and keeps freed memory, by size. malloc returns large freed blocks to the system, which
    has to clear them before it hands them out again; that takes as long as some kernels."""

    def __init__(self, small: int = SMALL) -> None:
        self._small = small
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Like ``torch.empty``."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < self._small or nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else pages(size)
        lease = memoryview(memory)  # lives as long as the last tensor on it
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=nbytes // dtype.itemsize).view(shape)
