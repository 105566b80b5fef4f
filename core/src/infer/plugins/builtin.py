"""What core itself brings, registered through the hooks that every plugin uses."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from infer.checkpoint.folder import Folder
from infer.checkpoint.locate import FOLDER
from infer.checkpoint.tensors import PlainFormat
from infer.commands import COMMANDS
from infer.contracts.command import CommandRegistration
from infer.contracts.kernels import KernelsRegistration
from infer.contracts.registration import Registration, hookimpl
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.server import Route, RoutesFactory
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


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [
        Registration("chat", _endpoints("chat_completions"), "POST /v1/chat/completions"),
        Registration("completions", _endpoints("completions"), "POST /v1/completions"),
        Registration("tokenization", _endpoints("tokenization"), "POST /tokenize and /detokenize, GET /tokenizer_info"),
        Registration("adapters", _endpoints("adapters"), "POST /v1/load_lora_adapter and /v1/unload_lora_adapter"),
        Registration("about", _endpoints("about"), "GET /v1/models, /health and /ready"),
        Registration("metrics", _endpoints("metrics"), "GET /metrics, for Prometheus"),
    ]


def _endpoints(module: str) -> RoutesFactory:
    """The routes of a module of the server, which is imported when there is one."""

    def make(service: Any, settings: Any, /) -> Sequence[Route]:
        routes: Sequence[Route] = importlib.import_module(f"infer.server.endpoints.{module}").routes(service, settings)
        return routes

    return make
