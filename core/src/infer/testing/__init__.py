"""The conformance kit: suites that try what the contracts of plugins promise. See ``docs/testing.md``."""

from infer.testing.checkpoints import tiny_checkpoint
from infer.testing.commands import check_command
from infer.testing.formats import check_weight_format
from infer.testing.kernels import check_kernels
from infer.testing.models import check_model
from infer.testing.pools import check_pool
from infer.testing.proposers import check_proposer
from infer.testing.schedulers import check_scheduler
from infer.testing.suite import Check, ConformanceError, Outcome, Suite, Violation
from infer.testing.tool_formats import check_tool_format

__all__ = [
    "Check",
    "ConformanceError",
    "Outcome",
    "Suite",
    "Violation",
    "check_command",
    "check_kernels",
    "check_model",
    "check_pool",
    "check_proposer",
    "check_scheduler",
    "check_tool_format",
    "check_weight_format",
    "tiny_checkpoint",
]
