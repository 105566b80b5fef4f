"""The extension points that plugins can fill. Discovery, choice, the settings' tables and the advice in errors
all follow from one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from infer.contracts.adapters import AdapterReaderProtocol, AdapterRegistration
from infer.contracts.cache import CachePoolProtocol, CacheRegistration
from infer.contracts.command import CommandRegistration
from infer.contracts.grammar import GrammarBackendProtocol
from infer.contracts.kernels import KernelsProtocol, KernelsRegistration
from infer.contracts.model import ModelProtocol, ModelRegistration
from infer.contracts.proposer import ProposerProtocol, ProposerRegistration
from infer.contracts.records import ObserverProtocol
from infer.contracts.registration import Registration
from infer.contracts.scheduler import SchedulerProtocol, SchedulerRegistration
from infer.contracts.text import PartProtocol, ToolFormatRegistration
from infer.contracts.weights import (
    ContainerProtocol,
    ContainerRegistration,
    TokenizerRegistration,
    WeightFormatProtocol,
    WeightFormatRegistration,
)
from infer.plugins.commands import LISTED

ANY = "*"
"""What a registration names that suits all."""


@dataclass(frozen=True)
class ExtensionPoint:
    """One kind of part that plugins offer."""

    hook: str
    """The hook that returns the registrations."""
    section: str | None
    """The section of the settings that holds the plugins' tables; None if these tables are sections themselves."""
    registration: type[Registration[Any]] = Registration
    contract: type | None = None
    """The Protocol of what the factories make; None if whoever calls them checks it."""
    setting: str | None = None
    """The setting that names the choice. If there is none, the checkpoint decides, or all offers are used."""
    fits: str | None = None
    """The field of a registration that lists what it suits, such as ``devices``: ``auto`` takes only offers whose list
    has what is there."""
    when: str = ""
    """What decides in place of a setting, in the words of ``infer plugins``."""
    missing: str = '{setting} is "auto", but nothing suitable is installed; try: {install}.'
    """The error if no offer suits what is there. It may name {there}, {known}, {installed}, {install}, {setting} and
    {advice}: which package brings an offer that does, if ``packages`` says so."""
    tie: str = '{setting} is "auto", but {names} have equal priority; name one of them.'
    """The error if several suit it and have equal priority. It may name {names}, {there} and {setting}."""
    optional: bool = False
    """Whether a server can do without. "auto" then takes nothing where nothing is installed."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Offers of our own distributions, or what these suit, and the package of each, for the advice in errors."""

    def chosen(self, settings: BaseModel) -> str:
        """What the settings ask for; "auto" if there is no setting, and "none" if they ask for nothing."""
        if self.setting is None:
            return "auto"
        section, key = self.setting.split(".")
        name: str | None = getattr(getattr(settings, section), key)
        return "none" if name is None else name

    def suits(self, registration: Registration[Any], there: Sequence[str]) -> bool:
        """Whether a registration suits one of ``there``. One that need not say what it suits, and does not, suits all,
        and so does one that says ``*``."""
        named = self.named(registration)
        return bool(set(named) & {*there, ANY}) or not (named or self.bound)

    def named(self, registration: Registration[Any]) -> tuple[str, ...]:
        """What a registration says that it suits."""
        return getattr(registration, self.fits, ()) if self.fits else ()

    @property
    def bound(self) -> bool:
        """Whether a registration must say what it suits."""
        return self.fits not in (None, "devices")


EXTENSION_POINTS: Mapping[str, ExtensionPoint] = {
    "cache": ExtensionPoint(
        "infer_cache_pools",
        "cache",
        CacheRegistration,
        CachePoolProtocol,
        "cache.backend",
        packages={"paged": "infer-cache-paged", "slotted": "infer-cache-slotted"},
    ),
    "model": ExtensionPoint(
        "infer_models",
        "model",
        ModelRegistration,
        ModelProtocol,
        "model.family",
        fits="architectures",
        when="by the checkpoint's architecture",
        missing="The checkpoint's architecture is {there}, which no installed plugin knows; {installed} {install} "
        "brings Llama, Qwen, Mistral, Phi-3, OLMo 2 and Gemma 3, and infer-models-transformers runs what "
        "else transformers can.",
        tie="{names} both know the architecture {there}; choose by {setting}.",
        packages=dict.fromkeys(
            ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3"),
            "infer-models",
        )
        | {"transformers": "infer-models-transformers"},
    ),
    "container": ExtensionPoint(
        "infer_containers",
        "model",
        ContainerRegistration,
        ContainerProtocol,
        fits="suffixes",
        when="by the ending of the checkpoint's file",
        missing="model.path leads to a file ({there}) that no installed plugin reads; infer reads folders that hold "
        "config.json and safetensors, and {install} brings .gguf.",
        tie="{names} both read {there}; uninstall one of them.",
        packages={"gguf": "infer-formats"},
    ),
    "weights": ExtensionPoint(
        "infer_weight_formats",
        "model",
        WeightFormatRegistration,
        WeightFormatProtocol,
        fits="methods",
        when="by the checkpoint's quantization_config",
        missing="The checkpoint has a quantization_config of quant_method {there!r}, which no installed plugin reads; "
        "{advice}infer loads float32, float16 and bfloat16 weights{known}.",
        tie="{names} both read weights of quant_method {there!r}; uninstall one of them.",
        packages=dict.fromkeys(("awq", "compressed-tensors", "fp8", "gptq", "mxfp4"), "infer-formats"),
    ),
    "tokenizer": ExtensionPoint(
        "infer_tokenizers",
        "model",
        TokenizerRegistration,
        fits="files",
        when="by the name of the tokenizer's file",
        missing="The tokenizer is {there}, which no installed plugin reads; {install} brings some.",
        tie="{names} both read {there}; uninstall one of them.",
        packages=dict.fromkeys(("tekken", "tiktoken"), "infer-formats"),
    ),
    "adapter": ExtensionPoint(
        "infer_adapters",
        "adapters",
        AdapterRegistration,
        AdapterReaderProtocol,
        fits="suffixes",
        when="by the ending of the adapter's file",
        missing="The adapter's path leads to {there}, which no installed plugin reads; {install} brings PEFT's "
        "folders and GGUF files.",
        tie="{names} both read adapters in {there}; uninstall one of them.",
        packages=dict.fromkeys(("gguf", "peft"), "infer-formats"),
    ),
    "scheduler": ExtensionPoint(
        "infer_schedulers", "engine", SchedulerRegistration, SchedulerProtocol, "engine.batching_mode"
    ),
    "proposer": ExtensionPoint(
        "infer_proposers",
        "engine",
        ProposerRegistration,
        ProposerProtocol,
        "engine.speculation",
        packages=dict.fromkeys(("draft", "eagle3", "mtp", "ngram", "suffix"), "infer-speculation"),
    ),
    "grammar": ExtensionPoint(
        "infer_grammar_backends",
        "engine",
        contract=GrammarBackendProtocol,
        setting="engine.grammar_backend",
        optional=True,
        packages={"llguidance": "infer-llguidance"},
    ),
    "kernels": ExtensionPoint(
        "infer_kernels",
        "kernels",
        KernelsRegistration,
        KernelsProtocol,
        "kernels.backend",
        fits="devices",
        packages={"cpu": "infer-kernels-cpu", "triton": "infer-kernels-triton"},
    ),
    "tool_format": ExtensionPoint(
        "infer_tool_formats",
        "model",
        ToolFormatRegistration,
        PartProtocol,
        "model.tool_format",
        when="by what the chat template writes",
        packages=dict.fromkeys(
            (
                *("tags", "action", "xml", "glm", "kimi", "kimi3", "deepseek", "dsml", "minimax", "minicpm", "solar"),
                *("gemma", "mistral", "harmony", "python", "json"),
            ),
            "infer-tool-formats",
        ),
    ),
    "reasoning": ExtensionPoint(
        "infer_reasoning_formats",
        "model",
        setting="model.reasoning",
        when="by the chat template",
        packages=dict.fromkeys(
            ("think", "minimax_m3", "hunyuan", "gemma", "command", "apertus", "mistral", "seed", "harmony"),
            "infer-tool-formats",
        ),
    ),
    "observer": ExtensionPoint(
        "infer_observers",
        "observers",
        contract=ObserverProtocol,
        packages={"otel": "infer-otel", "timeline": "infer-console"},
    ),
    "routes": ExtensionPoint(
        "infer_routes",
        "server",
        packages={
            "agents": "infer-agents",
            "console": "infer-console",
            "decisions": "infer-decisions",
            **dict.fromkeys(("embeddings", "rerank"), "infer-embeddings"),
            "ollama": "infer-ollama",
            "router": "infer-router",
            **dict.fromkeys(("chat", "completions", "tokenization", "adapters", "about", "metrics"), "infer-server"),
        },
    ),
    "command": ExtensionPoint(
        "infer_commands",
        None,
        CommandRegistration,
        packages={name: package for name, (package, _) in LISTED.items() if package != "infer-core"},
    ),
}
