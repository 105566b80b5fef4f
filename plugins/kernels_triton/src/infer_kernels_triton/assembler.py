"""Which ptxas assembles the kernels for Hopper.

Before CUDA 13.3, ptxas may reuse the registers of an operand while Hopper's asynchronous matrix unit still reads them
(release notes of CUDA 13.3; pull request 11781 of Triton). Attention keeps its weights in such registers, and products
with quantized weights the decoded values.
"""

from __future__ import annotations

import os

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from infer.errors import SettingsError

HOPPER = 9
"""The major compute capability whose matrix unit reads operands from registers on its own time."""
FIXED = (13, 3)


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def choose(major: int) -> None:
    """Have Triton assemble with a ptxas that is right for GPUs of this major compute capability: its own choice, or
    else the newest that it brings. Raises SettingsError if neither is new enough."""
    if major != HOPPER:
        return
    used = get_ptxas(10 * major)
    if _release(used.version) >= FIXED:
        return
    newest = knobs.nvidia.ptxas_blackwell  # what this one assembles runs on older GPUs, too
    if _release(newest.version) < FIXED:
        raise SettingsError(
            f"kernels.backend triton cannot run on this GPU with ptxas of CUDA {used.version} ({used.path}), which "
            "miscompiles products with operands in registers; install triton>=3.8, or set TRITON_PTXAS_PATH and "
            "TRITON_PTXAS_BLACKWELL_PATH to a ptxas of CUDA 13.3 or later, or use kernels.backend reference."
        )
    os.environ["TRITON_PTXAS_PATH"] = newest.path
