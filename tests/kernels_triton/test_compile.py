"""Every kernel compiles to the expected code for every architecture of the table, also on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels_triton.compile_kernels import SERVED

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
OLDER = {"3.6.0": ["--model", "Llama-3.2-3B", "--forms"], "3.8.0": list[str]()}
"""Releases of Triton that `make install` puts beside the environment: the oldest that the package allows, that of
torch 2.11, and one in between; with what either compiles besides a model."""


def compiled(*narrow: str, triton: str | None = None) -> list[str]:
    """What the compiler says of each kernel; with another release of Triton if one is given."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton is not None:
        beside = ROOT / ".venv" / f"triton-{triton}"
        if not beside.exists():
            pytest.skip(f"there is no {beside}")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(beside), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.kernels_triton.compile_kernels", *narrow]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("arch", SERVED)
def test_every_kernel_compiles_and_fits(arch: int) -> None:
    """And attention waits for the matrix unit once per product, not per instruction of it; loads go on meanwhile;
    decodes add their weights up in the order in which prefills do; a state has one value, however often it is computed;
    and decoded weights reach the matrix unit in registers."""
    said = compiled("--arch", str(arch))
    anywhere = {"extend", "merge", "linear", "norm", "rope_store", "gated", "tops", "narrow", "masses", "draw"}
    anywhere |= {"conv", "delta", "space", "gated_norm"}
    half = {"grouped", "rows"} | ({"add"} if arch == 90 else set())  # of segments of products
    experts = {"route", "plan", "experts", "combine"}
    expected = {"fp32": anywhere, "fp16": anywhere | half, "bf16": anywhere | half | experts}
    for dtype in SERVED[arch]:
        found = {kernel for line in said for kernel in re.findall(rf"^sm_{arch} {dtype} .*? (\w+)_kernel ", line)}
        assert expected[dtype] - found == set(), dtype


@pytest.mark.slow
@pytest.mark.parametrize(("version", "narrow"), OLDER.items())
def test_every_kernel_compiles_under_an_older_triton(version: str, narrow: list[str]) -> None:
    """And fits into shared memory; that it is slower there is no fault."""
    said = compiled("--arch", "90", "--dtype", "bf16", "--model", "gpt-oss-20b", *narrow, triton=version)
    assert f"Triton {version}" in said
    kernels = ("extend", "linear", "grouped", "rows", "experts", "tops", "narrow", "masses", "draw")
    assert [kernel for kernel in kernels if not any(f" {kernel}_kernel " in line for line in said)] == []
