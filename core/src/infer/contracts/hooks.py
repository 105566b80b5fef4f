"""The hooks that a plugin may implement.

A plugin is a module named by an entry point of the group ``infer``. It states the contract it was written for
(``INFER_PLUGIN_API = 1``) and marks its functions with ``infer.hookimpl``. Core registers its own parts in the same way
(``infer/builtin.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy
from pydantic import BaseModel

from infer.contracts.protocols import (
    CacheContext,
    CacheFactory,
    CommandFactory,
    ContainerFactory,
    KernelsFactory,
    ModelFactory,
    NoSettings,
    ObserverFactory,
    ProposerFactory,
    ReasoningFactory,
    RoutesFactory,
    SchedulerFactory,
    ToolFormatFactory,
    WeightFormatFactory,
)
from infer.contracts.records import RequestRecord, StepRecord

if TYPE_CHECKING:
    import argparse

hookspec = pluggy.HookspecMarker("infer")
hookimpl = pluggy.HookimplMarker("infer")

F = TypeVar("F")


@dataclass(frozen=True)
class Registration(Generic[F]):
    """One part that a plugin offers for a slot."""

    name: str
    """The name that a user writes in settings.toml: lower-case letters and digits, with single underscores between
    them."""
    factory: F
    description: str
    """One line for ``infer plugins``."""
    settings: type[BaseModel] = NoSettings
    """Validates the plugin's own table in settings.toml, e.g. ``[cache.paged]``. Every field has a default. Unknown
    keys are errors, whatever its ``extra`` says."""
    priority: int = 0
    """If a setting says ``auto``, the highest priority wins; a tie is an error that asks for a choice."""
    unavailable: str | None = None
    """Why the part cannot be used on this machine; None if it can. ``auto`` passes over an unavailable part and logs
    why; to name it is an error."""


@dataclass(frozen=True)
class CacheRegistration(Registration[CacheFactory]):
    """A cache pool that says how long a sequence may become in it, and how it can store K and V."""

    longest: Callable[[CacheContext, Any, int], int] | None = None
    """(context, the pool's settings, bytes that the weights have still to take) -> how many positions of one sequence
    fit into memory. Without it, sequences have at most 4096 positions unless ``engine.max_seq_len`` is set."""
    kv_dtypes: tuple[str, ...] = ()
    """The values of ``cache.kv_dtype`` other than ``auto`` that it stores K and V by, such as ``int8``; a pool whose
    storage is ``infer.cache.KVStorage`` knows them all."""


@dataclass(frozen=True)
class ModelRegistration(Registration[ModelFactory]):
    """A model family, found by the ``architectures`` of a checkpoint's config.json."""

    architectures: tuple[str, ...] = ()
    """Their names; "*" stands for all, for a family of low ``priority`` that runs what no other knows."""


@dataclass(frozen=True)
class ContainerRegistration(Registration[ContainerFactory]):
    """A form of checkpoint, found by the ending of its file's name."""

    suffixes: tuple[str, ...] = ()
    """The endings, such as ".gguf", in lower case; "/" stands for a folder."""


@dataclass(frozen=True)
class WeightFormatRegistration(Registration[WeightFormatFactory]):
    """A way to store weights, found by the ``quant_method`` of config.json's ``quantization_config``."""

    methods: tuple[str, ...] = ()
    """The ``quant_method`` values; "" stands for checkpoints without a ``quantization_config``."""


@dataclass(frozen=True)
class SchedulerRegistration(Registration[SchedulerFactory]):
    """A scheduler, and whether it can prefill a prompt in chunks."""

    chunks: bool = True
    """False if it prefills whole prompts: ``engine.use_chunked_prefill`` is then off, and asking for it is an error."""


@dataclass(frozen=True)
class KernelsRegistration(Registration[KernelsFactory]):
    """A kernel provider and where it can run."""

    devices: tuple[str, ...] = ()
    """Device types (``cpu``, ``cuda``) it can run on; empty for all."""
    kv_dtypes: tuple[str, ...] = ()
    """The values of ``cache.kv_dtype`` other than ``auto`` with which it stores and attends: with ``int8``, caches are
    ``QuantisedKV``."""
    about: str = ""
    """Which variant of it runs on this machine, and why: a line for ``infer plugins``, ``infer doctor`` and the log."""


@dataclass(frozen=True)
class ToolFormatRegistration(Registration[ToolFormatFactory]):
    """A way in which a model family writes tool calls. ``auto`` tries formats in order of ``priority``: formats whose
    calls begin with a mark come before those without."""

    marks: tuple[str, ...] = ()
    """The complete tokens that mark calls, such as ``[TOOL_CALLS]``. If the tokenizer has them as special tokens, they
    are kept in an answer's text, which otherwise leaves special tokens out."""


@dataclass(frozen=True)
class CommandRegistration(Registration[CommandFactory]):
    """A command, ``infer NAME``. ``factory`` runs it, and ``description`` is its line of help."""

    add_arguments: Callable[[argparse.ArgumentParser], object] | None = None
    """Adds the command's arguments to its parser. It is called whenever plugins are discovered, so it must be quick;
    slow imports belong in ``factory``. ``--settings`` and ``--section.key`` are there already."""


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
def infer_schedulers() -> list[SchedulerRegistration]:  # type: ignore[empty-body]
    """Schedulers, chosen by ``engine.batching_mode``."""


@hookspec
def infer_proposers() -> list[Registration[ProposerFactory]]:  # type: ignore[empty-body]
    """Proposers of draft tokens, chosen by ``engine.speculation``."""


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
