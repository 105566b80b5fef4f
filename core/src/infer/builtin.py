"""Core's own schedulers and reference kernels, registered through the hooks that every plugin uses."""

from __future__ import annotations

from infer.engine.schedulers import ContinuousScheduler, StaticScheduler
from infer.hookspecs import KernelsRegistration, SchedulerRegistration, hookimpl
from infer.kernels.reference import ReferenceKernels

INFER_PLUGIN_API = 1


@hookimpl
def infer_schedulers() -> list[SchedulerRegistration]:
    return [
        SchedulerRegistration(
            "continuous",
            lambda context, settings: ContinuousScheduler(context.pool, context.engine),
            "iteration-level batching with chunked prefill and a token budget",
        ),
        SchedulerRegistration(
            "static",
            lambda context, settings: StaticScheduler(context.pool, context.engine),
            "holds a batch until all its members finish; for comparison",
            chunks=False,
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
