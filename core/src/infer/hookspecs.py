"""What plugins need to implement hooks, under the name by which they import it. It is defined in
``infer.contracts``."""

from infer.contracts.hooks import (
    CacheRegistration,
    CommandRegistration,
    ContainerRegistration,
    KernelsRegistration,
    ModelRegistration,
    Registration,
    SchedulerRegistration,
    ToolFormatRegistration,
    WeightFormatRegistration,
    hookimpl,
)
from infer.contracts.records import BlockState, RequestRecord, StepRecord, Totals, WorkRecord

__all__ = [
    "BlockState",
    "CacheRegistration",
    "CommandRegistration",
    "ContainerRegistration",
    "KernelsRegistration",
    "ModelRegistration",
    "Registration",
    "RequestRecord",
    "SchedulerRegistration",
    "StepRecord",
    "ToolFormatRegistration",
    "Totals",
    "WeightFormatRegistration",
    "WorkRecord",
    "hookimpl",
]
