"""Core's own schedulers, weight format and reference kernels, registered through the hooks that every plugin uses."""

from __future__ import annotations

from infer.checkpoint.tensors import PlainFormat
from infer.contracts.hooks import KernelsRegistration, SchedulerRegistration, WeightFormatRegistration, hookimpl
from infer.engine.schedulers import ContinuousScheduler, StaticScheduler
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
def infer_weight_formats() -> list[WeightFormatRegistration]:
    return [
        WeightFormatRegistration(
            "safetensors",
            lambda config, files, settings: PlainFormat(files),
            "float32, float16 and bfloat16, as models compute with them",
            methods=("",),
        )
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
