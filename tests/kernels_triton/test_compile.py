"""Every kernel compiles to the expected code for every architecture of the table, also on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
OLDER = ("3.6.0", "3.8.0")
"""Releases of Triton that `make install` puts beside the environment: the oldest that the package allows, that of
torch 2.11, and one in between."""


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
@pytest.mark.parametrize(
    "narrow",
    [
        ["--arch", "90", "--dtype", "bf16", "--model", "Llama-3.2-3B"],
        pytest.param(
            ["--dtype", "fp32", "--model", "Llama-3.2-3B", "--model", "Gemma-3-1B", "--model", "Gemma-4-E2B"],
            marks=pytest.mark.slow,
        ),
        *(pytest.param(["--arch", arch], marks=pytest.mark.slow) for arch in ("80", "90", "100")),
    ],
    ids=["few", "fp32", "sm_80", "sm_90", "sm_100"],
)
def test_every_kernel_compiles_and_fits(narrow: list[str]) -> None:
    """And attention waits for the matrix unit once per product, not per instruction of it; loads go on meanwhile;
    decodes add their weights up in the order in which prefills do; and decoded weights reach the matrix unit in
    registers."""
    said = compiled(*narrow)
    kernels = [
        "extend",
        "merge",
        "linear",
        "norm",
        "rope_store",
        "gated",
        "sample",
        "conv",
        "delta",
        "space",
        "gated_norm",
    ]
    if "fp32" not in narrow:
        kernels += ["grouped", "rows"]
    if "--model" not in narrow:
        kernels += ["route", "plan", "experts", "combine"]
    for arch in [narrow[1]] if "--arch" in narrow else ["80", "90", "100"]:
        lines = [line for line in said if line.startswith(f"sm_{arch} ")]
        expected = [*kernels, "add"] if arch == "90" and "grouped" in kernels else kernels  # of segments of products
        assert [kernel for kernel in expected if not any(f" {kernel}_kernel " in line for line in lines)] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER)
def test_every_kernel_compiles_under_an_older_triton(version: str) -> None:
    """And fits into shared memory; that it is slower there is no fault."""
    models = [word for name in ("gpt-oss-20b", "Granite-3.1-1B-A400M") for word in ("--model", name)]
    said = compiled("--arch", "90", "--dtype", "bf16", *models, "--forms", triton=version)
    assert f"Triton {version}" in said
    kernels = ("extend", "linear", "grouped", "rows", "experts", "sample")
    assert [kernel for kernel in kernels if not any(f" {kernel}_kernel " in line for line in said)] == []
