"""The hooks that plugins implement, by the name that they import; ``infer.contracts`` has their text."""

from infer.contracts.hooks import (
    CacheRegistration,
    KernelsRegistration,
    ModelRegistration,
    Registration,
    SchedulerRegistration,
    WeightFormatRegistration,
    hookimpl,
)
from infer.contracts.records import RequestRecord, StepRecord, Totals, WorkRecord

__all__ = [
    "CacheRegistration",
    "KernelsRegistration",
    "ModelRegistration",
    "Registration",
    "RequestRecord",
    "SchedulerRegistration",
    "StepRecord",
    "Totals",
    "WeightFormatRegistration",
    "WorkRecord",
    "hookimpl",
]
