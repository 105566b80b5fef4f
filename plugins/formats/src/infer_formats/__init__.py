"""The ways in which published checkpoints store quantised weights."""

from __future__ import annotations

from infer import hookimpl
from infer.hookspecs import WeightFormatRegistration

INFER_PLUGIN_API = 1


@hookimpl
def infer_weight_formats() -> list[WeightFormatRegistration]:
    return []
