"""The hooks that a plugin may implement. Core registers its own parts by them, too: ``infer/plugins/builtin.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infer.contracts.adapters import AdapterRegistration
from infer.contracts.cache import CacheFactory
from infer.contracts.command import CommandRegistration
from infer.contracts.grammar import GrammarBackendFactory
from infer.contracts.kernels import KernelsRegistration
from infer.contracts.model import ModelRegistration
from infer.contracts.proposer import ProposerFactory
from infer.contracts.records import ObserverFactory, RequestRecord, StepRecord
from infer.contracts.registration import Registration, hookspec
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.server import RoutesFactory
from infer.contracts.text import ReasoningFactory, ToolFormatRegistration
from infer.contracts.weights import ContainerRegistration, TokenizerRegistration, WeightFormatRegistration


@hookspec
def infer_cache_pools() -> list[Registration[CacheFactory]]:  # type: ignore[empty-body]
    """Cache pools, chosen by ``cache.backend``."""


@hookspec
def infer_models() -> list[ModelRegistration]:  # type: ignore[empty-body]
    """Model families, chosen by the checkpoint's architecture or ``model.family``."""


@hookspec
def infer_containers() -> list[ContainerRegistration]:  # type: ignore[empty-body]
    """What checkpoints are kept in, chosen by the ending of the file's name."""


@hookspec
def infer_weight_formats() -> list[WeightFormatRegistration]:  # type: ignore[empty-body]
    """Ways to store weights, chosen by the checkpoint's quantization."""


@hookspec
def infer_tokenizers() -> list[TokenizerRegistration]:  # type: ignore[empty-body]
    """Forms of tokenizers besides tokenizer.json, chosen by the file's name."""


@hookspec
def infer_adapters() -> list[AdapterRegistration]:  # type: ignore[empty-body]
    """What adapters (LoRA) are kept in, chosen by the ending of the file's name."""


@hookspec
def infer_schedulers() -> list[SchedulerRegistration]:  # type: ignore[empty-body]
    """Schedulers, chosen by ``engine.batching_mode``."""


@hookspec
def infer_proposers() -> list[Registration[ProposerFactory]]:  # type: ignore[empty-body]
    """Proposers of draft tokens, chosen by ``engine.speculation``."""


@hookspec
def infer_grammar_backends() -> list[Registration[GrammarBackendFactory]]:  # type: ignore[empty-body]
    """Backends of structured outputs, chosen by ``engine.grammar_backend``."""


@hookspec
def infer_kernels() -> list[KernelsRegistration]:  # type: ignore[empty-body]
    """Kernel providers, chosen by ``kernels.backend``."""


@hookspec
def infer_tool_formats() -> list[ToolFormatRegistration]:  # type: ignore[empty-body]
    """Ways to write tool calls, chosen by ``model.tool_format`` or by the calls that the chat template writes."""


@hookspec
def infer_reasoning_formats() -> list[Registration[ReasoningFactory]]:  # type: ignore[empty-body]
    """Ways to write reasoning, chosen by ``model.reasoning`` or by the closing tag in the chat template."""


@hookspec
def infer_observers() -> list[Registration[ObserverFactory]]:  # type: ignore[empty-body]
    """Observers that have settings, ``[observers.NAME]``, or something to close. Each is made once per engine."""


@hookspec
def infer_routes() -> list[Registration[RoutesFactory]]:  # type: ignore[empty-body]
    """Endpoints of ``infer serve``, with settings in ``[server.NAME]``. All installed ones are served."""


@hookspec
def infer_commands() -> list[CommandRegistration]:  # type: ignore[empty-body]
    """Commands of the command line."""


@hookspec
def infer_checkpoints() -> Mapping[str, Path]:  # type: ignore[empty-body]
    """Bundled checkpoints: names that ``model.path`` may give instead of a folder or a hub id."""


@hookspec
def infer_step_finished(record: StepRecord) -> None:
    """Called in the engine's thread after every step, so it must be quick. An observer that raises is logged and not
    called again."""


@hookspec
def infer_request_finished(record: RequestRecord) -> None:
    """Called in the engine's thread after a request has ended; the same rules apply."""
