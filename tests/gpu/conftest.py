"""Tests that need a GPU: ``pytest tests/gpu tests/kernels_triton``. With GPU_DRY_RUN=1 they run without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.gpu.dry import DRY

if DRY:
    import tests.interpreter  # noqa: F401

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not DRY and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip("there is no GPU here"))
