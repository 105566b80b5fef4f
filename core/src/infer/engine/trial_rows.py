"""Rows that kernels are tried with in the start-up check: how many, and of which values."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

ALWAYS = (1, 2, 5, 9, 16)
"""Numbers of rows that every kernel and the output head are tried with, whatever it costs."""
MANY = (77, 128, 200, 256, 512, 1024, 2048, 4096)
ROWS = tuple(dict.fromkeys((*ALWAYS, *range(1, 18), 33, 64, *range(24, 64, 8), *range(18, 65), *MANY)))
"""Numbers of rows that kernels are tried with, and compared with the same rows among the most, in the order in which
they matter."""
EVERY = 256
"""As many sequences as run at a time are tried, too, one more each time up to this number."""
OPERATIONS = 3 << 31
"""A bound on the operations of one kernel with the most rows, on a CPU, and on those with all fewer rows together,
beyond what is always tried. So a product with a large weight is tried with fewer numbers of rows."""
HEAD_OPERATIONS = 9 << 31
"""The second bound for the output head, and for sampling."""
PER_VALUE = 2048
"""How many operations a value of a row counts as, where nothing is multiplied by a weight."""
SHIFT = 97
"""How many values later in the same noise each random row begins."""


def row_counts(
    cost: int, least: int, largest: int, max_batch_size: int, device: torch.device, operations: int = OPERATIONS
) -> list[int]:
    """The numbers of rows to try a kernel with, the most of them first, which is between ``least`` and ``largest``. On
    a CPU, as far as OPERATIONS and ``operations`` go; a row takes ``cost``. Off a CPU, where rows are cheap, all of
    them."""
    bound, left = (OPERATIONS, operations) if device.type == "cpu" else (sys.maxsize, sys.maxsize)
    most = max(least, min(largest, bound // cost))
    counts = [most]
    for n in (*ROWS, *range(65, min(max_batch_size, EVERY) + 1)):
        if n < most and n not in counts and (n in ALWAYS or n * cost <= left):
            counts.append(n)
            left -= n * cost
    return counts


def random_like(x: Tensor, rows: int) -> Tensor:
    """Random rows of the shape, type and scale of those of ``x``; rows of ``x`` in random order if it has integers."""
    generator = torch.Generator().manual_seed(x.dim())
    shape = (rows, *x.shape[1:])
    if not x.dtype.is_floating_point:
        return x[torch.randint(len(x), (rows,), generator=generator).to(x.device)]
    # Each row begins a little later in the same noise: drawing new noise for every row would take as long as the
    # kernels.
    width = math.prod(shape[1:])
    noise = torch.randn(width + SHIFT * rows, generator=generator) * float(x.float().std())
    # Contiguous, as models have it: some libraries' narrow products depend on how rows are aligned.
    return noise.to(x).unfold(0, width, SHIFT)[:rows].contiguous().view(shape)


def counted(numbers: Sequence[int], thing: str) -> str:
    """The numbers, and what they are numbers of."""
    return f"{', '.join(map(str, numbers))} {thing}{'' if list(numbers) == [1] else 's'}"
