"""python -m benchmarks.gpu.sweep [--json FILE]: time other tiles of products and attention than those in the table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from benchmarks.gpu import lines
from benchmarks.gpu.dry import DEVICE, DRY, SHAPES
from benchmarks.gpu.kernels import ragged, randn
from benchmarks.gpu.timing import Run, seconds
from benchmarks.shapes import Costs

from infer.contracts.attention import AttentionSpec
from infer.weight import GroupedWeight
from infer_kernels_triton import attention, grouped, matmul
from infer_kernels_triton.configs import (
    MANY,
    AttentionConfig,
    GroupedConfig,
    GroupedTiles,
    LinearConfig,
    LinearTile,
    configs,
    multiprocessors,
)
from infer_kernels_triton.provider import WAVES

SHAPE = "Llama-3.2-1B"
ROWS = (2,) if DRY else (1, 16, 64, 256, 4096)
ATTENTION = (((1,), (40,)),) if DRY else (((1,) * 8, (1023,) * 8), ((1,) * 128, (1023,) * 128), ((4096,), (0,)))
"""Batches, each as (lengths, starts)."""


def linears() -> Iterator[LinearConfig]:
    """Configs of one tile each."""
    if DRY:
        yield LinearConfig(32, (LinearTile(16, 16, 1, 1),))
        return
    for m, n, k, stages in itertools.product((64, 128), (16, 32, 64, 128, 256), (64, 128), (3, 4, 6, 8)):
        deep = stages < 8 or m * n <= 64 * 32  # a larger tile has enough to load with fewer stages
        if deep and (m + n) * k * 2 * stages <= 220 * 1024 and m * n <= 128 * 256:
            yield LinearConfig(k, (LinearTile(m, n, 8 if m * n >= 128 * 128 else 4, stages),))


def grouped_tiles(costs: Costs) -> Iterator[dict[str, Any]]:
    """Tiles of products with int4 weights, and into how many programs few columns are cut."""
    own = configs(DEVICE)[2].grouped
    for name, rows in itertools.product(("o", "gate_up"), ROWS):
        n, k = costs.linear_shapes[name]
        nbytes = n * k // 2 + n * k // 16 + 2 * rows * (n + k)
        table = next(c for c in own.tiles if c.rows >= rows)
        counts = () if DRY or rows > own.apart else (1, 132, 528)
        for programs, tiles in (*((p, table) for p in counts), *((own.programs, t) for t in (table, *groupeds(rows)))):
            # Packed with the table's first tile, which decides on the segments, and multiplied with the other one.
            config = replace(own, programs=programs)
            swept = replace(config, tiles=(replace(tiles, rows=MANY),))

            def product(
                config: GroupedConfig = config, swept: GroupedConfig = swept, rows: int = rows, n: int = n, k: int = k
            ) -> Run:
                codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
                weight = GroupedWeight(codes, randn(n, k // 32).abs() / 16, dtype=torch.bfloat16)
                x, packed = randn(rows, k), grouped.pack(weight, None, config)
                return lambda: grouped.linear(x, packed, replace(swept, apart=MANY if rows <= swept.apart else 0))

            is_own = tiles is table and programs == own.programs
            line = timed(f"int4 {name}", f"{rows}x{n}x{k}", tiles, is_own, product, nbytes)
            yield line | {"programs": programs}


def groupeds(rows: int) -> Iterator[GroupedTiles]:
    if DRY:
        return
    for m, n, stages in itertools.product((16, 32, 64, 128, 256), (64, 128), (2, 3, 4, 6)):
        if m <= max(16, 2 * rows) and m * 256 * stages <= 200 * 1024 and (rows <= 256 or m >= 64):
            yield GroupedTiles(MANY, m, n, 8 if n == 128 else 4, stages)


def attentions(base: AttentionConfig) -> Iterator[AttentionConfig]:
    for block_m, warps, stages in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 2), (128, 8, 2), (128, 8, 3)):
        yield replace(base, block_m=block_m, warps=warps, stages=stages)


def measure() -> Iterator[dict[str, Any]]:
    costs, own, count = Costs(SHAPES[SHAPE]), configs(DEVICE)[2], multiprocessors(DEVICE)
    for (name, (n, k)), rows in itertools.product(costs.linear_shapes.items(), ROWS):
        nbytes = 2 * (n * k + rows * (n + k))
        table = replace(own.linear, tiles=(own.linear.tile(rows, n, count),))
        for config in (table, *linears()):

            def product(config: LinearConfig = config, rows: int = rows, n: int = n, k: int = k) -> Run:
                x, weight = randn(rows, k), randn(n, k)
                return lambda: matmul.linear(x, weight, None, config, count)

            (tile,) = config.tiles
            line = timed(f"linear {name}", f"{rows}x{n}x{k}", tile, config is table, product, nbytes)
            yield line | {"block_k": config.block_k}
    H, K, E = costs.num_attention_heads, costs.num_key_value_heads, costs.head_dim
    spec = AttentionSpec(H, K, E, E**-0.5)
    base = next(c for c in own.attention if c.head_size >= E)
    programs = WAVES * count
    for lens, starts in ATTENTION:
        longest = max(start + length for start, length in zip(starts, lens, strict=True))
        blocks = len(lens) * -(-longest // 16)
        nbytes = 4 * K * E * sum(start + length for start, length in zip(starts, lens, strict=True))
        for tiles in (base, *attentions(base)):

            def attend(
                tiles: AttentionConfig = tiles,
                lens: tuple[int, ...] = lens,
                starts: tuple[int, ...] = starts,
                blocks: int = blocks,
            ) -> Run:
                k, v = (randn(blocks, 16, K, E) for _ in range(2))
                where, q = ragged(list(lens), list(starts), blocks), randn(sum(lens), H, E)
                return lambda: attention.extend_attention(q, k, v, where, spec, tiles, programs, first=False)

            yield timed("attention", f"{len(lens)} of {lens[0]} at {starts[0]}", tiles, tiles is base, attend, nbytes)
    yield from grouped_tiles(costs)


def timed(
    what: str, size: str, config: LinearTile | GroupedTiles | AttentionConfig, table: bool, make: Any, nbytes: int
) -> dict[str, Any]:
    line = {"kernel": what, "size": size, "table": table, **asdict(config)}
    try:
        line["us"] = seconds(make, nbytes, 0.02) * 1e6
    except Exception as error:  # a tile that does not fit; others may
        line["error"] = f"{type(error).__name__}: {error}"[:200]
    return line


if __name__ == "__main__":
    sys.exit(lines.main("python -m benchmarks.gpu.sweep", "Other tiles beside those of the table.", measure()))
