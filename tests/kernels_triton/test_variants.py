"""No kernel is compiled while a request waits: one short pass at the start compiles all that serving launches."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.engine.exactness import MOST_ROWS
from infer.engine.trial_attention import EDGES
from infer.engine.trial_rows import ROWS
from infer_kernels_triton.configs import INTERPRETER, TABLE, reachable

ROOT = Path(__file__).parents[2]
CONFIGS = [INTERPRETER, *(config for sizes in TABLE.values() for config in sizes.values())]
COLUMNS = (1024, 2048, 2560, 3072, 4096, 5120, 6144, 14336, 16384, 28672, 128256)
MULTIPROCESSORS = (40, 108, 132, 148)
MOST = 33
"""Variants of all kernels of one model."""


@pytest.mark.slow
def test_serving_compiles_nothing_new() -> None:
    """Batches of any composition, chunks, preemption, every way of drawing; in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels_triton.serve_variants"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for family, seen in json.loads(done.stdout.splitlines()[-1]).items():
        assert seen["launches"] > 500, family
        assert seen["preempted"], family
        assert seen["split"], family
        assert seen["later"] == [], family
        assert len(seen["start"]) <= MOST, (family, seen["start"])


def test_the_start_up_check_reaches_every_tile_and_several_segments() -> None:
    for config in CONFIGS:
        for columns, count in itertools.product(COLUMNS, MULTIPROCESSORS):
            tried = {config.linear.tile(rows, columns, count) for rows in (*ROWS, MOST_ROWS)}
            any_rows = {config.linear.tile(rows, columns, count) for rows in range(1, MOST_ROWS + 1, 16)}
            assert tried == any_rows, (config.linear, columns, count)
        assert all(max(EDGES) > 2 * c.segment for c in config.attention)


def test_every_tile_that_is_chosen_was_compiled_when_the_weight_was_packed() -> None:
    for config in CONFIGS:
        for columns, count in itertools.product((1, 70, *COLUMNS), MULTIPROCESSORS):
            compiled = reachable(config.linear, columns, count)
            for rows in (*range(1, 300), *range(300, 50_000, 37)):
                assert config.linear.tile(rows, columns, count) in compiled, (config.linear, rows, columns, count)


def test_tiles_are_in_the_order_of_their_areas_and_none_has_fewer_rows_than_the_first() -> None:
    for config in CONFIGS:
        tiles = config.linear.tiles
        assert [*tiles] == sorted(tiles, key=lambda tile: tile.block_m * tile.block_n)
        assert min(tile.block_m for tile in tiles) == tiles[0].block_m


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 512, (64, 16)),  # too few columns for all multiprocessors
        (1, 2048, (64, 16)),
        (1, 4096, (64, 32)),
        (1, 16384, (64, 128)),
        (1, 128256, (64, 128)),  # not a larger tile, most of whose rows would be none
        (64, 2048, (64, 16)),
        (65, 128256, (128, 256)),
        (128, 2048, (64, 32)),
        (2048, 2048, (128, 256)),
    ],
)
def test_tiles_keep_132_multiprocessors_busy(rows: int, columns: int, expected: tuple[int, int]) -> None:
    tile = TABLE[90][2].linear.tile(rows, columns, 132)
    assert (tile.block_m, tile.block_n) == expected
