"""On Hopper, kernels are assembled by a ptxas that gets products with operands in registers right, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from infer.errors import SettingsError
from infer_kernels_triton.provider import TritonKernels


def made(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> TritonKernels:
    """The provider as it is made on a GPU of that capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return TritonKernels(torch.device("cuda"))


@pytest.mark.parametrize(
    ("capability", "old", "new", "chosen"),
    [
        ((9, 0), "12.8", "13.3", "new"),
        ((9, 0), "13.10", "13.1", "old"),
        ((9, 0), "12.9", "13.2", None),
        ((8, 0), "12.8", "12.9", "old"),
        ((10, 0), "12.8", "12.9", "old"),
    ],
)
def test_the_assembler(
    capability: tuple[int, int],
    old: str,
    new: str,
    chosen: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, release, variable in (("old", old, "TRITON_PTXAS_PATH"), ("new", new, "TRITON_PTXAS_BLACKWELL_PATH")):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        tool.chmod(0o755)
        monkeypatch.setenv(variable, str(tool))
    # From Triton 3.9 on, the newer one is taken by itself; before, Hopper has the older one.
    monkeypatch.setattr("infer_kernels_triton.assembler.get_ptxas", lambda arch: get_ptxas(80))
    if chosen is None:
        with pytest.raises(SettingsError, match=rf"ptxas of CUDA {old} .*old\).* install triton>=3.8, or set TRITON"):
            made(monkeypatch, capability)
        return
    made(monkeypatch, capability)
    assert get_ptxas(80).path == str(tmp_path / chosen)
