"""Adapters that are loaded into a running engine, and let go."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infer.checkpoint import ending
from infer.contracts.adapters import Adapter, AdapterReaderProtocol, AdaptingModel, LowRank
from infer.contracts.model import ModelProtocol
from infer.contracts.sections import Settings
from infer.engine.adapters import AdapterSlots
from infer.engine.loop import EngineLoop
from infer.errors import CheckpointError, PluginError, RequestError, SettingsError
from infer.plugins.discovery import Plugins
from infer.plugins.inspection import Named

log = logging.getLogger(__name__)


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
    ) -> None:
        """Load those that the settings name. ``name`` is that of the base, ``config`` its config.json. Raises
        InferError."""
        made = model.adapters if isinstance(model, AdaptingModel) else None
        if made is None:
            raise SettingsError(
                f"{type(model).__name__} applies no adapters; leave out adapters.load and adapters.folder, or choose "
                "another model.family."
            )
        self._engine_loop, self._slots, self._model = engine_loop, slots, made
        self._settings, self._plugins, self._names = settings, plugins, [name, *settings.server.aliases]
        self._config = config
        for entry in settings.adapters.load:
            name, _, path = entry.partition("=")
            try:
                self.load(name, Path(path))
            except (CheckpointError, PluginError, RequestError) as error:
                raise SettingsError(f"adapters.load has {entry!r}: {error}") from error

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
        if name in self._names:
            raise RequestError(f"{name!r} is the name of the model itself; choose another.", param="lora_name")
        slot = self._slots.reserve(name)
        try:
            changes = self._read(path)
            prepared = self._model.prepare(changes)
            adapter = Adapter(name, slot, _digest(changes), str(path))
            self._engine_loop.between_steps(lambda: self._model.put(slot, prepared)).result()
        except BaseException:
            self._slots.give_up(name, slot)
            raise
        self._slots.open(adapter)
        log.info("adapter %s: %d layers changed, from %s", name, len(changes), path)
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

    def _read(self, path: Path) -> Mapping[str, LowRank]:
        """Raises CheckpointError."""
        if not path.exists():
            raise CheckpointError(f"There is no adapter at {path}.")
        offer = self._plugins.choose("adapter", self._settings, [ending(path)])
        with Named(f"{offer.whose} cannot read {path}"):
            reader: AdapterReaderProtocol = offer.build(self._settings, path, self._config)
            changes = reader.changes()
        most = self._settings.adapters.max_rank
        for place, change in changes.items():
            if len(change.a_RK) > most:
                raise CheckpointError(
                    f"The adapter's change of {place!r} has rank {len(change.a_RK)}, but adapters.max_rank is {most}; "
                    "raise it."
                )
        if not changes:
            raise CheckpointError(f"The adapter at {path} changes nothing.")
        return changes


def _digest(changes: Mapping[str, LowRank]) -> str:
    """Of all that an adapter's results depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for path, (a_RK, b_NR, scale) in sorted(changes.items()):
        digest.update(repr((path, scale, *((x.dtype, x.shape) for x in (a_RK, b_NR)))).encode())
        for x in (a_RK, b_NR):
            digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
