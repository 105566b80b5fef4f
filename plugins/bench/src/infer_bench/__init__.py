"""The commands ``infer bench``, ``infer simulate``, ``infer tune`` and ``infer demo``."""

from __future__ import annotations

from infer import hookimpl
from infer.contracts.command import CommandRegistration
from infer_bench import bench, demo, simulate, tune

INFER_PLUGIN_API = 2


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [bench.COMMAND, demo.COMMAND, simulate.COMMAND, tune.COMMAND]
