"""Which tile sizes run where: one table. Sizes that decide the order of a sum are marked; they are the same for every
number of rows, so that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """Tiles of attention for head sizes up to ``head_size``."""

    head_size: int
    segment: int
    """Keys that are reduced before results are merged. Decides the order of the sum."""
    block_n: int
    """Keys per step. Decides the order of the sum."""
    block_m: int
    """Queries, times the heads that share a K/V head, per program."""
    warps: int
    decode_m: int
    """The same for decodes. Hopper and Blackwell have another multiplication below 64, with other sums."""
    decode_warps: int
    stages: int


@dataclass(frozen=True)
class LinearConfig:
    """Tiles of x @ w.T for up to ``rows`` rows."""

    rows: int
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """What one architecture uses."""

    attention: tuple[AttentionConfig, ...]
    """By ascending head size."""
    linear: tuple[LinearConfig, ...]
    """By ascending rows. In all of them, products are summed one after the other in the order of K."""


MANY = 1 << 62

HOPPER = Config(
    attention=(
        AttentionConfig(64, 256, 64, block_m=64, warps=4, decode_m=64, decode_warps=4, stages=3),
        AttentionConfig(128, 256, 64, block_m=64, warps=4, decode_m=64, decode_warps=4, stages=3),
        AttentionConfig(256, 256, 64, block_m=64, warps=8, decode_m=64, decode_warps=8, stages=2),
    ),
    linear=(
        LinearConfig(64, block_m=64, block_n=32, block_k=128, warps=4, stages=6),
        LinearConfig(256, block_m=64, block_n=128, block_k=64, warps=4, stages=4),
        LinearConfig(MANY, block_m=128, block_n=256, block_k=64, warps=8, stages=3),
    ),
)

TABLE: Mapping[int, Config] = {
    80: Config(
        attention=(
            AttentionConfig(64, 256, 64, block_m=64, warps=4, decode_m=16, decode_warps=4, stages=3),
            AttentionConfig(128, 256, 64, block_m=64, warps=8, decode_m=16, decode_warps=4, stages=3),
            AttentionConfig(256, 256, 32, block_m=64, warps=8, decode_m=16, decode_warps=4, stages=2),
        ),
        linear=(
            LinearConfig(16, block_m=16, block_n=32, block_k=128, warps=4, stages=5),
            LinearConfig(64, block_m=64, block_n=64, block_k=64, warps=4, stages=5),
            LinearConfig(MANY, block_m=128, block_n=128, block_k=32, warps=4, stages=4),
        ),
    ),
    90: HOPPER,
    100: HOPPER,  # until a Blackwell GPU has been measured
}

INTERPRETER = Config(
    # Small, so that little input crosses many edges.
    attention=(AttentionConfig(256, 64, 32, block_m=64, warps=1, decode_m=16, decode_warps=1, stages=1),),
    linear=(
        LinearConfig(16, block_m=16, block_n=16, block_k=64, warps=1, stages=1),
        LinearConfig(MANY, block_m=32, block_n=64, block_k=32, warps=1, stages=1),
    ),
)


def config(device: torch.device) -> Config:
    """The entry of the newest architecture that is no newer than the device's. Raises RuntimeError for older ones."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    known = [arch for arch in TABLE if arch <= 10 * major + minor]
    if not known:
        raise RuntimeError(f"the Triton kernels need a GPU of compute capability 8.0 or newer, not {major}.{minor}")
    return TABLE[max(known)]
