"""Every kernel compiles for every architecture of the table, on a machine without a GPU too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_and_fits() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels_triton.compile_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for arch in (80, 90, 100):
        for kernel in ("extend", "merge", "linear", "norm", "rope_store", "gated", "sample"):
            assert f"sm_{arch} {kernel}_kernel: " in done.stdout
