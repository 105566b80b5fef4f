"""Without a GPU, or with TRITON_INTERPRET=1, Triton's interpreter runs the kernels on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import tests.interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Rows past a tile's end are computed, and never stored: 0 / 0 is no news there."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
