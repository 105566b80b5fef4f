"""Adapters that are loaded into a running engine, and let go."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer.checkpoint import ending
from infer.contracts.adapters import Adapter, AdapterReaderProtocol, AdaptersProtocol, AdaptingModel, LowRank, NamesBase
from infer.contracts.model import ModelProtocol
from infer.contracts.sections import Settings
from infer.engine.adapters import AdapterSlots
from infer.engine.loop import EngineLoop
from infer.errors import CheckpointError, PluginError, RequestError, SettingsError
from infer.plugins.discovery import Plugins
from infer.plugins.inspection import Named

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that has been read, and that the model's ``AdaptersProtocol.put`` takes."""

    path: Path
    layers: int
    """How many layers it changes."""
    values: int
    """How many values it has, each in the model's type."""
    digest: str
    parts: Any


class LoadedAdapters:
    """The adapters that a running engine has. Methods may be called from any thread; ``load`` takes a while."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        slots: AdapterSlots,
        model: ModelProtocol,
        settings: Settings,
        plugins: Plugins,
        name: str,
        config: Mapping[str, Any],
        first: Mapping[str, PreparedAdapter],
    ) -> None:
        """``name`` is that of the base, ``config`` its config.json, and ``first`` what ``adapters_to_load`` has read.
        Raises InferError."""
        self._engine_loop, self._slots, self._model = engine_loop, slots, adapters_of(model)
        self._settings, self._plugins, self._names = settings, plugins, [name, *settings.server.aliases]
        self._config = config
        for name, prepared in first.items():
            with _blamed(name, prepared.path), self._slot(name) as slot:
                self._put(name, slot, prepared)

    def loaded(self) -> Sequence[Adapter]:
        return self._slots.loaded

    def find(self, model: str) -> Adapter | None:
        """The adapter that a request's ``model`` means: its name alone, or behind the base's and a colon."""
        if adapter := self._slots.find(model):
            return adapter
        base, _, name = model.rpartition(":")
        return self._slots.find(name) if base in self._names or (base and "*" in self._names) else None

    def load(self, name: str, path: Path) -> Adapter:
        """Load an adapter, while the engine serves others. Raises RequestError if it cannot have this name or no more
        adapters fit, and CheckpointError if it is damaged, not computed here, or made for another base."""
        with self._slot(name) as slot:
            prepared = prepare_adapter(path, self._model, self._settings, self._plugins, self._config)
            return self._put(name, slot, prepared)

    @contextmanager
    def _slot(self, name: str) -> Iterator[int]:
        """A slot for an adapter of this name, free again if it gets none. Raises RequestError."""
        if name in self._names:
            raise RequestError(f"{name!r} is the name of the model itself; choose another.", param="lora_name")
        slot = self._slots.reserve(name)
        try:
            yield slot
        except BaseException:
            self._slots.give_up(name, slot)
            raise

    def _put(self, name: str, slot: int, prepared: PreparedAdapter) -> Adapter:
        adapter = Adapter(name, slot, prepared.digest, str(prepared.path))
        self._engine_loop.between_steps(lambda: self._model.put(slot, prepared.parts)).result()
        self._slots.open(adapter)
        log.info("adapter %s: %d layers changed, from %s", name, prepared.layers, prepared.path)
        return adapter

    def unload(self, name: str) -> Adapter | None:
        """Take no more requests for an adapter; those that are open end as they would. None if there is none of that
        name."""
        return self._slots.let_go(name, self._empty)

    def _empty(self, slot: int) -> None:
        """Free a slot that no open request uses."""

        def empty() -> None:
            self._model.put(slot, None)
            self._slots.release(slot)

        self._engine_loop.between_steps(empty)


def adapters_of(model: ModelProtocol) -> AdaptersProtocol:
    """The adapters of a model that is to have some. Raises SettingsError if it applies none."""
    made = model.adapters if isinstance(model, AdaptingModel) else None
    if made is None:
        raise SettingsError(
            f"{type(model).__name__} applies no adapters; leave out adapters.load and adapters.folder, or choose "
            "another model.family."
        )
    return made


def adapters_to_load(
    model: ModelProtocol, settings: Settings, plugins: Plugins, config: Mapping[str, Any]
) -> Mapping[str, PreparedAdapter]:
    """The adapters that the settings name, read and prepared for the model, of which a sketch will do where only their
    sizes are wanted. Raises SettingsError."""
    if not settings.adapters.slots:
        return {}
    adapters, prepared = adapters_of(model), dict[str, PreparedAdapter]()
    for name, path in settings.adapters.paths.items():
        with _blamed(name, path):
            prepared[name] = prepare_adapter(path, adapters, settings, plugins, config)
    return prepared


def prepare_adapter(
    path: Path, adapters: AdaptersProtocol, settings: Settings, plugins: Plugins, config: Mapping[str, Any]
) -> PreparedAdapter:
    """Read an adapter, and convert it for the model that applies it. Raises CheckpointError."""
    changes = _read(path, settings, plugins, config)
    values = sum(a_RK.numel() + b_NR.numel() for a_RK, b_NR, _ in changes.values())
    return PreparedAdapter(path, len(changes), values, _digest(changes), adapters.prepare(changes))


def _read(path: Path, settings: Settings, plugins: Plugins, config: Mapping[str, Any]) -> Mapping[str, LowRank]:
    """What an adapter changes of the base with this config.json. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"There is no adapter at {path}.")
    offer = plugins.choose("adapter", settings, [ending(path)])
    with Named(f"{offer.whose} cannot read {path}"):
        reader: AdapterReaderProtocol = offer.build(settings, path, config)
        changes, base = reader.changes(), reader.base if isinstance(reader, NamesBase) else None
    model = str(settings.model.path)
    if base is not None and _last(base) != _last(model):
        log.warning(
            "the adapter at %s was made for %r by its own account, but the model is %r: unless only names differ, "
            "its answers are of no use",
            *(path, base[:200], model),
        )
    most = settings.adapters.max_rank
    for place, change in changes.items():
        if len(change.a_RK) > most:
            raise CheckpointError(
                f"The adapter's change of {place!r} has rank {len(change.a_RK)}, but adapters.max_rank is {most}; "
                "raise it."
            )
    if not changes:
        raise CheckpointError(f"The adapter at {path} changes nothing.")
    return changes


def _last(name: str) -> str:
    """Of a hub id or path, what is the same wherever a model is kept."""
    return name.rstrip("/").rpartition("/")[2].lower()


@contextmanager
def _blamed(name: str, path: Path) -> Iterator[None]:
    """What is wrong with an adapter is a fault of the setting that names it."""
    try:
        yield
    except (CheckpointError, PluginError, RequestError) as error:
        raise SettingsError(f"adapters.load has '{name}={path}': {error}") from error


def _digest(changes: Mapping[str, LowRank]) -> str:
    """Of all that an adapter's results depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for path, (a_RK, b_NR, scale) in sorted(changes.items()):
        digest.update(repr((path, scale, *((x.dtype, x.shape) for x in (a_RK, b_NR)))).encode())
        for x in (a_RK, b_NR):
            digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
