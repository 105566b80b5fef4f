"""The conformance kit: suites that try what the contracts of plugins promise, and the commands ``infer check`` and
``infer new``. See ``docs/testing.md``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infer import hookimpl
from infer.contracts.command import CommandRegistration
from infer_testing import check, new

if TYPE_CHECKING:
    from infer_testing.checkpoints import tiny_checkpoint
    from infer_testing.commands import check_command
    from infer_testing.formats import check_weight_format
    from infer_testing.grammars import check_grammar_backend
    from infer_testing.kernels import check_kernels
    from infer_testing.models import check_model
    from infer_testing.pools import check_pool
    from infer_testing.proposers import check_proposer
    from infer_testing.routes import check_routes
    from infer_testing.schedulers import check_scheduler
    from infer_testing.suite import Check, ConformanceError, Outcome, Suite, Violation
    from infer_testing.tool_formats import check_tool_format

INFER_PLUGIN_API = 2
MODULES = (
    *("suite", "checkpoints", "commands", "formats", "grammars", "kernels", "models", "pools", "proposers"),
    *("schedulers", "tool_formats", "routes"),
)
"""Searched for a name in this order: who checks routes has infer-server, which the last of these imports."""

__all__ = [
    "Check",
    "ConformanceError",
    "Outcome",
    "Suite",
    "Violation",
    "check_command",
    "check_grammar_backend",
    "check_kernels",
    "check_model",
    "check_pool",
    "check_proposer",
    "check_routes",
    "check_scheduler",
    "check_tool_format",
    "check_weight_format",
    "tiny_checkpoint",
]


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [check.COMMAND, new.COMMAND]


def __getattr__(name: str) -> Any:
    """Import the suites only when they are used: whatever discovers plugins imports this module."""
    if name in __all__:
        for module in MODULES:
            found = vars(importlib.import_module(f"infer_testing.{module}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module 'infer_testing' has no attribute {name!r}")
