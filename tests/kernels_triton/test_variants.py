"""No kernel is compiled while a request waits: one short pass at the start compiles all that serving launches."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.engine.exactness import EDGES, MOST_ROWS
from infer.engine.trial_rows import ROWS
from infer_kernels_triton.configs import INTERPRETER, MANY, TABLE

ROOT = Path(__file__).parents[2]
MOST = 28
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
    configs = [INTERPRETER, *(config for sizes in TABLE.values() for config in sizes.values())]
    tried = {*ROWS, MOST_ROWS}
    for config in configs:
        for low, high in itertools.pairwise([0, *(c.rows for c in config.linear)]):
            assert any(low < rows <= high for rows in tried), (low, high)
        assert config.linear[-1].rows == MANY
        assert all(max(EDGES) > 2 * c.segment for c in config.attention)
