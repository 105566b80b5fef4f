"""What core itself brings, registered through the hooks that every plugin uses."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from infer.checkpoint.folder import Folder
from infer.checkpoint.locate import FOLDER
from infer.checkpoint.tensors import PlainFormat
from infer.commands import COMMANDS
from infer.contracts.hooks import (
    CommandRegistration,
    ContainerRegistration,
    KernelsRegistration,
    Registration,
    SchedulerRegistration,
    ToolFormatRegistration,
    WeightFormatRegistration,
    hookimpl,
)
from infer.contracts.protocols import ProposerFactory, ReasoningFactory, ReasoningTags, Route, RoutesFactory
from infer.engine.draft import DraftProposer, DraftSettings
from infer.engine.ngram import NgramProposer, NgramSettings
from infer.engine.schedulers import ContinuousScheduler, StaticScheduler
from infer.kernels.reference import ReferenceKernels
from infer.text.tool_formats import harmony, mistral, objects, python, xml
from infer.text.tool_formats.reader import Script, scripted

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
def infer_proposers() -> list[Registration[ProposerFactory]]:
    return [
        Registration(
            "ngram",
            lambda context, settings: NgramProposer(settings),
            "what followed the same tokens earlier in prompt and answer",
            NgramSettings,
            priority=10,
        ),
        Registration("draft", DraftProposer, "a second, smaller model", DraftSettings),
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
def infer_tool_formats() -> list[ToolFormatRegistration]:
    """Those that nothing need announce are tried last."""
    return [
        ToolFormatRegistration(
            "tags", scripted(objects.tagged), "JSON objects between tags (Qwen, Hermes)", marks=objects.TOKENS
        ),
        ToolFormatRegistration(
            "xml", scripted(xml.xml), "functions and their parameters as tags (Qwen3-Coder)", marks=xml.TOKENS
        ),
        ToolFormatRegistration(
            "mistral", scripted(mistral.mistral), "JSON behind [TOOL_CALLS] (Mistral)", marks=mistral.TOKENS
        ),
        ToolFormatRegistration(
            "harmony", scripted(harmony.harmony), "messages to functions, in channels (gpt-oss)", marks=harmony.TOKENS
        ),
        ToolFormatRegistration(
            "python", scripted(python.python), "Python's calls (Llama 4)", priority=-10, marks=python.TOKENS
        ),
        ToolFormatRegistration(
            "json", scripted(objects.bare), "bare JSON objects (Llama 3)", priority=-20, marks=(objects.PYTHON_TAG,)
        ),
    ]


@hookimpl
def infer_reasoning_formats() -> list[Registration[ReasoningFactory]]:
    channels = ReasoningTags(
        harmony.OPENING, harmony.CLOSING, lambda tools: Script(functools.partial(harmony.harmony, tools=tools))
    )
    return [
        Registration("think", lambda settings: ReasoningTags("<think>", "</think>"), "between <think> tags"),
        Registration("harmony", lambda settings: channels, "in the channel analysis (gpt-oss)", priority=10),
    ]


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [*COMMANDS]


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [
        Registration("chat", _endpoints("chat_completions"), "POST /v1/chat/completions"),
        Registration("completions", _endpoints("completions"), "POST /v1/completions"),
        Registration("embeddings", _endpoints("embeddings"), "POST /v1/embeddings"),
        Registration("rerank", _endpoints("rerank"), "POST /v1/rerank and /v1/score"),
        Registration("responses", _endpoints("responses"), "POST /v1/responses"),
        Registration("decisions", _endpoints("decisions"), "POST /v1/decisions and /v1/systemone"),
        Registration("tokenization", _endpoints("tokenization"), "POST /tokenize and /detokenize, GET /tokenizer_info"),
        Registration("about", _endpoints("about"), "GET /v1/models, /health and /ready"),
        Registration("metrics", _endpoints("metrics"), "GET /metrics, for Prometheus"),
    ]


def _endpoints(module: str) -> RoutesFactory:
    """The routes of a module of the server, which is imported when there is one."""

    def make(service: Any, settings: Any, /) -> Sequence[Route]:
        routes: Sequence[Route] = importlib.import_module(f"infer.server.{module}").routes(service, settings)
        return routes

    return make
