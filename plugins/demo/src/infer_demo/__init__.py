"""The checkpoint ``demo``: a toy that writes something like Python, so that the first command downloads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infer import hookimpl

INFER_PLUGIN_API = 2


@hookimpl
def infer_checkpoints() -> Mapping[str, Path]:
    return {"demo": Path(__file__).parent / "checkpoint"}
