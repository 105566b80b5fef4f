"""Console tests do not depend on how fast the machine is."""

from __future__ import annotations

import math

import pytest

from infer_console import messages


@pytest.fixture(autouse=True)
def _maps_are_due_however_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one map may take so long that the next is due only after the test's last step."""
    monkeypatch.setattr(messages, "MAP_SHARE", math.inf)
