"""What core itself brings, registered through the hooks that every plugin uses."""

from __future__ import annotations

from infer.checkpoint.folder import Folder
from infer.checkpoint.locate import FOLDER
from infer.checkpoint.tensors import PlainFormat
from infer.commands.own import COMMANDS
from infer.contracts.command import CommandRegistration
from infer.contracts.kernels import KernelsRegistration
from infer.contracts.registration import hookimpl
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.weights import ContainerRegistration, WeightFormatRegistration
from infer.engine.schedulers import ContinuousScheduler, FairScheduler, StaticScheduler
from infer.kernels.reference import ReferenceKernels

INFER_PLUGIN_API = 2


@hookimpl
def infer_schedulers() -> list[SchedulerRegistration]:
    return [
        SchedulerRegistration(
            "continuous",
            lambda context, settings: ContinuousScheduler(context.pool, context.engine),
            "iteration-level batching with chunked prefill and a token budget",
        ),
        SchedulerRegistration(
            "fair",
            lambda context, settings: FairScheduler(context.pool, context.engine),
            "as continuous, with fair shares between API keys and between the users of each",
        ),
        SchedulerRegistration(
            "static",
            lambda context, settings: StaticScheduler(context.pool, context.engine),
            "holds a batch until all its members finish; for comparison",
            chunks=False,
        ),
    ]


@hookimpl
def infer_containers() -> list[ContainerRegistration]:
    return [
        ContainerRegistration(
            "folder",
            lambda path, settings: Folder(path),
            "config.json, safetensors and tokenizer.json in a folder",
            suffixes=(FOLDER,),
        )
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
            kv_dtypes=("int8",),
        )
    ]


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [*COMMANDS]
