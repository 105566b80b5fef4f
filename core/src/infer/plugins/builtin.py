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
from infer.contracts.command import CommandRegistration
from infer.contracts.kernels import KernelsRegistration
from infer.contracts.registration import Registration, hookimpl
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.server import Route, RoutesFactory
from infer.contracts.text import ReasoningFactory, ReasoningTags, ToolFormatRegistration
from infer.contracts.weights import ContainerRegistration, WeightFormatRegistration
from infer.engine.schedulers import ContinuousScheduler, FairScheduler, StaticScheduler
from infer.kernels.reference import ReferenceKernels
from infer.text.tool_formats import gemma, harmony, mistral, objects, python, sections, xml
from infer.text.tool_formats.reader import Script, scripted

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
def infer_tool_formats() -> list[ToolFormatRegistration]:
    """Those that nothing need announce are tried last."""
    xmls = {
        "xml": "functions and their parameters as tags (Qwen3-Coder, Nemotron 3, Seed-OSS)",
        "glm": "keys and values of arguments in tags (GLM 4.5 and later, Hunyuan 3)",
        "minimax": "tags with the names of functions (MiniMax M2 and M3)",
        "dsml": "tags with types of arguments (DeepSeek V3.2 and V4)",
        "minicpm": "tags with names, and CDATA (MiniCPM5)",
        "kimi3": "tags of special tokens (Kimi K3)",
    }
    sectioned = {
        "deepseek": "JSON behind the name, in a section of calls (DeepSeek V3, V3.1 and R1)",
        "kimi": "JSON behind a call's id, in a section of calls (Kimi K2)",
        "solar": "JSON behind the name, in special tokens (Solar Open)",
    }
    return [
        ToolFormatRegistration(
            "tags",
            scripted(objects.tagged),
            "JSON objects between tags (Qwen, Hermes, Command, Apertus, Nemotron Nano, GigaChat)",
            marks=objects.TOKENS,
            forms=(objects.FORM,),
            unless=(objects.KEYED,),
        ),
        *(
            ToolFormatRegistration(
                name,
                scripted(functools.partial(xml.xml, name=name)),
                says,
                marks=xml.TOKENS[name],
                forms=(xml.FORM,) if name == "xml" else (),
            )
            for name, says in xmls.items()
        ),
        *(
            ToolFormatRegistration(
                name, scripted(functools.partial(sections.sections, name=name)), says, marks=sections.TOKENS[name]
            )
            for name, says in sectioned.items()
        ),
        ToolFormatRegistration(
            "action", scripted(objects.announced), "JSON objects behind Action: (Command R)", forms=(objects.FORM,)
        ),
        ToolFormatRegistration(
            "gemma", scripted(gemma.gemma), "objects with tokens around strings (Gemma 4)", marks=gemma.TOKENS
        ),
        ToolFormatRegistration(
            "mistral",
            scripted(mistral.mistral),
            "JSON behind [TOOL_CALLS] (Mistral)",
            marks=mistral.TOKENS,
            forms=mistral.FORMS,
        ),
        ToolFormatRegistration(
            "harmony", scripted(harmony.harmony), "messages to functions, in channels (gpt-oss)", marks=harmony.TOKENS
        ),
        ToolFormatRegistration(
            "python", scripted(python.python), "Python's calls (Llama 4, LFM2)", priority=-10, marks=python.TOKENS
        ),
        ToolFormatRegistration(
            "json",
            scripted(objects.bare),
            "bare JSON objects (Llama 3)",
            priority=-20,
            marks=(objects.PYTHON_TAG,),
            forms=(objects.FORM,),
        ),
    ]


@hookimpl
def infer_reasoning_formats() -> list[Registration[ReasoningFactory]]:
    channels = ReasoningTags(
        harmony.OPENING, harmony.CLOSING, lambda tools: Script(functools.partial(harmony.harmony, tools=tools))
    )
    tags = {
        "think": ("<think>", "</think>", "between <think> tags"),
        "minimax_m3": ("<mm:think>", "</mm:think>", "between <mm:think> tags (MiniMax M3)"),
        "hunyuan": ("<think:opensource>", "</think:opensource>", "between <think:opensource> tags (Hunyuan 3)"),
        "gemma": ("<|channel>thought", "<channel|>", "in the channel thought (Gemma 4)"),
        "command": ("<|START_THINKING|>", "<|END_THINKING|>", "between <|START_THINKING|> tags (Command)"),
        "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "between <|inner_prefix|> tags (Apertus)"),
    }
    return [
        *(
            # Templates of others name </think> as well, to take it out of a history.
            Registration(name, _between(opening, closing), says, priority=0 if name == "think" else 5)
            for name, (opening, closing, says) in tags.items()
        ),
        Registration("harmony", lambda settings: channels, "in the channel analysis (gpt-oss)", priority=10),
    ]


def _between(opening: str, closing: str) -> ReasoningFactory:
    return lambda settings: ReasoningTags(opening, closing)


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
