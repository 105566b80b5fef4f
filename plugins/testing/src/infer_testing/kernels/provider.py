"""The kernels that are tried, and what they are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from infer.contracts.kernels import Activation, GateActivation, KernelsProtocol
from infer.kernels.reference import ReferenceKernels
from infer_testing.numbers import random_tensor
from infer_testing.suite import Suite

SHAPES = ((1, 1), (1, 16), (3, 17), (7, 64), (2, 257), (5, 1024), (130, 48))
"""Rows and their sizes."""
LAYERS = ((33, 17), (16, 16), (1, 8), (64, 200), (96, 64), (48, 1000))
"""Outputs and inputs of products."""
ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200)
"""Numbers of rows that kernels are tried with, and compared with the same rows among MOST_ROWS."""
MOST_ROWS = 300
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATES: tuple[GateActivation, ...] = get_args(GateActivation)


@dataclass
class Provider:
    """The kernels that are tried."""

    kernels: KernelsProtocol
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    kv_dtypes: Sequence[str] = ()
    """As in its registration."""

    def dtype(self, draw: random.Random) -> torch.dtype:
        return draw.choice(self.dtypes)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, draw: random.Random) -> Tensor:
        return random_tensor(*shape, dtype=dtype, seed=draw.randrange(1 << 30)).to(self.device)


SUITE: Suite[Provider] = Suite("check_kernels")
check = SUITE.check
EXACT = ReferenceKernels()
"""The meaning of every kernel. It is called with fp32 values, and its result is compared with rounding in mind."""


def wide(x: Tensor) -> Tensor:
    """In fp32 on the CPU, for the reference."""
    return x.cpu().float()
