"""The gate's verdict depends on the code: it draws nothing anew, and names what fails in company only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants.plant import ROOT

DRAWING = """
import random, sys
import numpy as np, torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import examples

examples.explored = int(sys.argv[1]) if len(sys.argv) > 1 else None
examples.use_profile()
examples.seed_everything()
drawn = [random.random(), np.random.random(), torch.rand(1).item()]

@settings(max_examples=examples.examples(60))
@given(st.integers(), st.text())
def draw(number, text):
    drawn.append((number, text))

draw()
print(drawn)
"""


def drawn(folder: Path, *argv: str, source: str = DRAWING, hash_seed: int = 1) -> str:
    (folder / "drawing.py").write_text(source)
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, folder / "drawing.py", *argv], env=env, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_examples_are_the_same_whatever_else_was_imported(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        f"NUMBERS = {[*range(77_000, 77_400)]}\nWORDS = {['word' + str(i) for i in range(99)]}"
    )
    alone = drawn(tmp_path)
    assert alone.count(", '") >= 60
    assert drawn(tmp_path, source="import other\n" + DRAWING, hash_seed=2) == alone


@pytest.mark.slow  # three interpreters that import torch
def test_an_exploration_draws_more_and_from_its_seed(tmp_path: Path) -> None:
    one, same, other = (drawn(tmp_path, seed) for seed in ("1", "1", "2"))
    assert one == same
    assert one != other
    assert one.count(", '") > 500


FAILING = """
import pathlib, pytest
before = pathlib.Path(__file__).with_suffix(".ran")

@pytest.mark.slow
def test_in_company():
    ran = before.exists()
    before.touch()
    assert ran

@pytest.mark.slow
def test_always():
    assert {always}

@pytest.mark.{mark}
def test_other():
    assert {other}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("always", "other", "mark", "code"), [(1, 1, "quick", 0), (0, 1, "quick", 1), (1, 0, "quick", 1), (1, 0, "slow", 1)]
)
def test_a_slow_test_that_failed_is_run_once_more_alone(
    always: int, other: int, mark: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(FAILING.format(always=always, other=other, mark=mark))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    quick\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.again", "--again", "-n1", "test_it.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    final = mark == "quick" and not other
    assert ("flaky: test_it.py::test_in_company" in done.stdout) is not final
    assert "flaky: test_it.py::test_always" not in done.stdout


@pytest.mark.slow
def test_what_took_longest_and_most_memory_is_listed(tmp_path: Path) -> None:
    for file, body in ("test_a.py", "..."), ("test_b.py", "b'x' * (64 << 20)"):
        (tmp_path / file).write_text(f"def test(): {body}")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.costs", "--durations", "2", "-n1", "."]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert re.search(r"slowest 2 files of \d+ s", done.stdout)
    assert {*re.findall(r"^\d+\.\d\ds (\S+\.py)$", done.stdout, re.MULTILINE)} == {"test_a.py", "test_b.py"}
    (before, peak, test), _ = re.findall(r"^(\d+) MiB, (\d+) at most, \d+ after (\S+)$", done.stdout, re.MULTILINE)
    assert test == "test_b.py::test"
    assert int(peak) >= int(before) + 63  # each is cut off to whole ones
