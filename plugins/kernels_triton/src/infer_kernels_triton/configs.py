"""Tile sizes per GPU architecture. Sizes that determine the order of a sum are marked; they are the same for every
number of rows, so that a row's bits do not depend on the other rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """Attention tiles for head sizes up to ``head_size``. Decodes and prefills use the same tiles, because the layout
    of a tile over the warps determines the order in which a query's weights are summed."""

    head_size: int
    segment: int
    """Keys that are reduced before results are merged. Determines the order of the sum."""
    block_n: int
    """Keys per step. Determines the order of the sum."""
    block_m: int
    """Rows per program: queries, times the heads that share a K/V head."""
    warps: int
    stages: int
    """Pipeline stages. With two, a tile is loaded only after the previous one has been multiplied."""


@dataclass(frozen=True)
class LinearTile:
    """A tile of x @ w.T."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LinearConfig:
    """Tiles of x @ w.T. All of them sum products one after the other in the order of K."""

    block_k: int
    """Values of K per step, the same in every tile. Determines the order of the sum."""
    tiles: tuple[LinearTile, ...]
    """In the order of their areas, ascending. None has fewer rows than the first."""

    def tile(self, rows: int, columns: int, multiprocessors: int) -> LinearTile:
        """The largest tile that keeps the multiprocessors busy and has no more rows than the first, or more than half
        of its rows; if there is none, the first. Few columns get narrow tiles, so that every multiprocessor reads a
        part of the weight; many get wide ones, which read the rows of x less often."""
        for tile in reversed(self.tiles):
            programs = -(-rows // tile.block_m) * -(-columns // tile.block_n)
            full = tile.block_m == self.tiles[0].block_m or 2 * rows > tile.block_m
            if full and programs >= BUSY * multiprocessors:
                return tile
        return self.tiles[0]


@functools.cache
def reachable(config: LinearConfig, columns: int, multiprocessors: int) -> frozenset[LinearTile]:
    """Every tile that ``LinearConfig.tile`` chooses for some number of rows."""
    found: set[LinearTile] = set()
    rows = itertools.count(1, config.tiles[0].block_m)  # the choice changes only there
    while config.tiles[-1] not in found:
        found.add(config.tile(next(rows), columns, multiprocessors))
    return frozenset(found)


@dataclass(frozen=True)
class GroupedTiles:
    """Tiles of x @ w.T for up to ``rows`` rows and a quantized weight."""

    rows: int
    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class GroupedConfig:
    """Tiles of products with quantized weights, and how these are cut along K into segments."""

    programs: int
    """A weight is cut into segments if it has fewer tiles of the first size. Determines the order of the sum."""
    least: int
    """Blocks per segment, at least. Determines the order of the sum."""
    apart: int
    """Up to so many rows, each segment is summed by programs of its own."""
    tiles: tuple[GroupedTiles, ...]
    """In the order of rows, ascending."""


@dataclass(frozen=True)
class Config:
    """All tiles of one architecture for values of one size."""

    attention: tuple[AttentionConfig, ...]
    """In the order of head sizes, ascending."""
    linear: LinearConfig
    grouped: GroupedConfig


LARGEST_HEAD = 576
"""That of latent attention: a latent vector of 512 values and 64 that are rotated."""
MANY = 1 << 62
BUSY = 0.9
"""The part of the multiprocessors that have to have a program of a product: 128 programs are enough for 132 of them."""
INTERPRETED_MULTIPROCESSORS = 4

# Architectures with eight warps for heads of 128 would spill registers with four.

FLOAT32 = Config(
    # No matrix unit multiplies float32 exactly, so tiles are small; they fit into 99 KiB of shared memory.
    attention=(
        AttentionConfig(64, 256, 32, block_m=32, warps=4, stages=3),
        AttentionConfig(128, 256, 16, block_m=32, warps=8, stages=3),
        AttentionConfig(256, 256, 16, block_m=16, warps=4, stages=3),
        AttentionConfig(512, 256, 16, block_m=16, warps=8, stages=1),
        AttentionConfig(LARGEST_HEAD, 256, 16, block_m=16, warps=8, stages=1),
    ),
    linear=LinearConfig(
        block_k=32,
        tiles=(
            LinearTile(block_m=16, block_n=32, warps=4, stages=6),
            LinearTile(block_m=64, block_n=64, warps=4, stages=3),
        ),
    ),
    grouped=GroupedConfig(
        programs=216,
        least=4,
        apart=16,
        tiles=(
            GroupedTiles(16, block_m=16, block_n=64, warps=4, stages=4),
            GroupedTiles(MANY, block_m=32, block_n=64, warps=4, stages=3),
        ),
    ),
)
AMPERE = Config(
    attention=(
        AttentionConfig(64, 256, 64, block_m=64, warps=4, stages=3),
        AttentionConfig(128, 256, 64, block_m=64, warps=8, stages=3),
        AttentionConfig(256, 256, 32, block_m=32, warps=4, stages=3),
        AttentionConfig(512, 256, 16, block_m=32, warps=8, stages=2),
        AttentionConfig(LARGEST_HEAD, 256, 16, block_m=32, warps=8, stages=1),
    ),
    linear=LinearConfig(
        block_k=64,
        tiles=(
            LinearTile(block_m=16, block_n=32, warps=4, stages=6),
            LinearTile(block_m=32, block_n=32, warps=4, stages=6),
            LinearTile(block_m=64, block_n=64, warps=4, stages=5),
            LinearTile(block_m=128, block_n=128, warps=4, stages=3),
        ),
    ),
    grouped=GroupedConfig(
        programs=216,
        least=4,
        apart=64,
        tiles=(
            GroupedTiles(16, block_m=16, block_n=64, warps=4, stages=5),
            GroupedTiles(64, block_m=64, block_n=64, warps=4, stages=3),
            GroupedTiles(MANY, block_m=128, block_n=128, warps=8, stages=3),
        ),
    ),
)
HOPPER = Config(
    attention=(
        AttentionConfig(64, 256, 64, block_m=64, warps=4, stages=3),
        AttentionConfig(128, 256, 64, block_m=64, warps=4, stages=3),
        AttentionConfig(256, 256, 32, block_m=64, warps=8, stages=3),
        AttentionConfig(512, 256, 32, block_m=32, warps=8, stages=2),
        AttentionConfig(LARGEST_HEAD, 256, 16, block_m=32, warps=8, stages=1),
    ),
    # All of at least 64 rows: fewer would be multiplied by other instructions, which add in another order.
    linear=LinearConfig(
        block_k=64,
        tiles=(
            LinearTile(block_m=64, block_n=16, warps=4, stages=8),
            LinearTile(block_m=64, block_n=32, warps=4, stages=8),
            LinearTile(block_m=64, block_n=64, warps=4, stages=6),
            LinearTile(block_m=64, block_n=128, warps=4, stages=4),
            LinearTile(block_m=128, block_n=128, warps=8, stages=3),
            LinearTile(block_m=128, block_n=256, warps=8, stages=3),
        ),
    ),
    grouped=GroupedConfig(
        programs=264,
        least=4,
        apart=64,
        tiles=(
            GroupedTiles(16, block_m=16, block_n=64, warps=4, stages=6),
            GroupedTiles(64, block_m=64, block_n=64, warps=4, stages=4),
            GroupedTiles(256, block_m=128, block_n=64, warps=4, stages=3),
            GroupedTiles(MANY, block_m=128, block_n=128, warps=8, stages=3),
        ),
    ),
)
BLACKWELL = Config(
    attention=(
        HOPPER.attention[0],
        AttentionConfig(128, 256, 64, block_m=64, warps=8, stages=3),
        *HOPPER.attention[2:],
    ),
    linear=HOPPER.linear,
    grouped=replace(HOPPER.grouped, programs=1),  # no segments: they would stop the pipeline that feeds tensor memory
)
INTERPRETER = Config(
    # Small tiles, so that small inputs in tests cross many edges.
    attention=(AttentionConfig(LARGEST_HEAD, 64, 32, block_m=64, warps=1, stages=1),),
    linear=LinearConfig(
        block_k=32,
        tiles=(
            LinearTile(block_m=16, block_n=16, warps=1, stages=1),
            LinearTile(block_m=32, block_n=32, warps=1, stages=1),
            LinearTile(block_m=32, block_n=64, warps=1, stages=1),
        ),
    ),
    grouped=GroupedConfig(
        programs=4,
        least=2,
        apart=16,
        tiles=(
            GroupedTiles(16, block_m=16, block_n=128, warps=1, stages=1),
            GroupedTiles(MANY, block_m=32, block_n=128, warps=1, stages=1),
        ),
    ),
)

Configs = Mapping[int, Config]
"""Configs by the bytes of a value."""

TABLE: Mapping[int, Configs] = {
    80: {2: AMPERE, 4: FLOAT32},
    90: {2: HOPPER, 4: FLOAT32},
    100: {2: BLACKWELL, 4: FLOAT32},  # until a Blackwell GPU has been measured
    120: {2: AMPERE, 4: FLOAT32},  # Blackwell's smaller GPUs have Ampere's matrix instructions and 99 KiB
}


def multiprocessors(device: torch.device) -> int:
    """How many programs the device computes at a time, at least."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def configs(device: torch.device) -> Configs:
    """The configs of the newest architecture in TABLE that is not newer than the device's. Raises RuntimeError if all
    are."""
    if device.type != "cuda":
        return {2: INTERPRETER, 4: INTERPRETER}
    major, minor = torch.cuda.get_device_capability(device)
    known = [arch for arch in TABLE if arch <= 10 * major + minor]
    if not known:
        raise RuntimeError(f"the Triton kernels need a GPU of compute capability 8.0 or newer, not {major}.{minor}")
    return TABLE[max(known)]
