"""Core's own schedulers and reference kernels, registered through the hooks that every plugin uses."""

from __future__ import annotations

from infer.engine.schedulers import ContinuousScheduler, StaticScheduler
from infer.hookspecs import KernelsRegistration, Registration, hookimpl
from infer.kernels.reference import ReferenceKernels
from infer.protocols import SchedulerFactory

INFER_PLUGIN_API = 1


@hookimpl
def infer_schedulers() -> list[Registration[SchedulerFactory]]:
    return [
        Registration(
            "continuous",
            lambda context, settings: ContinuousScheduler(context.pool, context.engine),
            "iteration-level batching with chunked prefill and a token budget",
        ),
        Registration(
            "static",
            lambda context, settings: StaticScheduler(context.pool, context.engine),
            "holds a batch until all its members finish; for comparison",
        ),
    ]


@hookimpl
def infer_kernels() -> list[KernelsRegistration]:
    return [
        KernelsRegistration(
            "reference",
            lambda device, settings: ReferenceKernels(),
            "plain torch: the meaning of every kernel",
        )
    ]
