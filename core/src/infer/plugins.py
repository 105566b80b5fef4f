"""Finding plugins, and choosing among them by name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pluggy

from infer import hookspecs
from infer.errors import PluginError
from infer.hookspecs import Registration
from infer.protocols import PLUGIN_API

log = logging.getLogger(__name__)

GROUP = "infer"
HOOKS: Mapping[str, str] = {
    "cache": "infer_cache_pools",
    "model": "infer_models",
    "scheduler": "infer_schedulers",
    "kernels": "infer_kernels",
}
"""Slot -> the hook that fills it."""
KNOWN: Mapping[str, str] = {
    "cache.slotted": "infer-cache-slotted",
    "cache.paged": "infer-cache-paged",
    "kernels.triton": "infer-kernels-triton",
    "kernels.cpu": "infer-kernels-cpu",
    "model.llama": "infer-models",
    "model.qwen3": "infer-models",
    "model.gemma3": "infer-models",
    "checkpoint.demo": "infer-demo",
}
"""What our own distributions offer, for the advice in errors."""


@dataclass(frozen=True)
class Offer:
    """A registration and where it comes from."""

    slot: str
    registration: Registration[Any]
    distribution: str
    version: str

    @property
    def name(self) -> str:
        return self.registration.name


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be used."""

    distribution: str
    version: str
    reason: str


@dataclass
class Plugins:
    """Everything installed, by slot. A broken plugin is reported, and takes nobody else down."""

    manager: pluggy.PluginManager
    offers: dict[str, list[Offer]] = field(default_factory=lambda: {slot: [] for slot in HOOKS})
    broken: list[Broken] = field(default_factory=list)
    _checkpoints: list[tuple[str, Path, str]] = field(default_factory=list)

    @classmethod
    def discover(cls, extra: Sequence[object] = (), *, installed: Iterable[EntryPoint] | None = None) -> Self:
        """Load every entry point of the group ``infer`` and register ``extra`` (modules or objects) besides.

        ``extra`` is asked for explicitly, so what is wrong with it is raised as a PluginError.
        """
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(hookspecs)
        plugins = cls(manager)
        # pluggy's own loader silently skips the second of two distributions with one entry-point name.
        for entry in entry_points(group=GROUP) if installed is None else installed:
            distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "")
            try:
                plugins._add(entry.load(), distribution, version)
            except PluginError as error:
                plugins.broken.append(Broken(distribution, version, str(error)))
            except Exception as error:  # a plugin's import may raise anything; it is told where it matters
                plugins.broken.append(
                    Broken(distribution, version, f"its import failed: {type(error).__name__}: {error}")
                )
        for plugin in extra:
            name = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__name__
            plugins._add(plugin, name, "in process")
        for b in plugins.broken:
            log.warning("the plugin of %s %s is left out: %s", b.distribution, b.version, b.reason)
        return plugins

    def _add(self, plugin: object, distribution: str, version: str) -> None:
        written_for = getattr(plugin, "INFER_PLUGIN_API", None)
        if written_for != PLUGIN_API:
            states = "states no INFER_PLUGIN_API" if written_for is None else f"was made for API {written_for}"
            raise PluginError(
                f"{distribution} {states}, but this infer-core speaks {PLUGIN_API}; install a release for it."
            )
        label = f"{distribution} {version}"
        while self.manager.has_plugin(label):  # one distribution may bring several entry points
            label += "+"
        self.manager.register(plugin, label)
        try:
            self._check_hooks(plugin, distribution)
            filled = {slot: self._call(plugin, hook, []) for slot, hook in HOOKS.items()}
            checkpoints = self._call(plugin, "infer_checkpoints", {})
        except Exception:
            self.manager.unregister(plugin)
            raise
        for slot, registrations in filled.items():
            self.offers[slot] += [Offer(slot, r, distribution, version) for r in registrations]
        self._checkpoints += [(name, path, distribution) for name, path in checkpoints.items()]

    def _check_hooks(self, plugin: object, distribution: str) -> None:
        try:
            self.manager.check_pending()
        except pluggy.PluginValidationError:
            known = [name for name in vars(hookspecs) if name.startswith("infer_")]
            marked = [c.name for c in self.manager.get_hookcallers(plugin) or ()]
            unknown = next(name for name in marked if name not in known)
            close = difflib.get_close_matches(unknown, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the hooks are {', '.join(known)}."
            raise PluginError(f"{distribution} implements the hook {unknown!r}, which does not exist{hint}") from None

    @staticmethod
    def _call(plugin: object, hook: str, default: Any) -> Any:
        function = getattr(plugin, hook, None)
        return function() if function is not None and hasattr(function, f"{GROUP}_impl") else default

    def get(self, slot: str, name: str, setting: str) -> Offer:
        """The one offer of that name. Raises PluginError; an explicit choice never falls back."""
        found = [offer for offer in self.offers[slot] if offer.name == name]
        if not found:
            names = sorted({offer.name for offer in self.offers[slot]})
            raise PluginError(
                f"{setting} is {name!r}, but no such plugin is installed; {_installed(names)}{_pip(slot, name)}"
                f"{self._culprits()}"
            )
        offer = self._only(found, setting)
        if offer.registration.unavailable:
            why = f"{offer.distribution} cannot be used here: {offer.registration.unavailable}"
            raise PluginError(f"{setting} is {name!r}, but {why}.")
        return offer

    def auto(self, slot: str, setting: str, device_type: str | None = None) -> Offer:
        """The installed offer of highest priority that runs on the device; says in the log which and why."""
        able = [
            offer
            for offer in self.offers[slot]
            if device_type is None or not (d := getattr(offer.registration, "devices", ())) or device_type in d
        ]
        for offer in able:
            if offer.registration.unavailable:
                log.warning(
                    "%s: auto passes over %s of %s: %s",
                    *(setting, offer.name, offer.distribution, offer.registration.unavailable),
                )
        able = [offer for offer in able if not offer.registration.unavailable]
        if not able:
            wanted = sorted(d for key, d in KNOWN.items() if key.startswith(f"{slot}."))
            raise PluginError(
                f'{setting} is "auto", but nothing suitable is installed; try: pip install {wanted[0]}.'
                f"{self._culprits()}"
            )
        best = max(offer.registration.priority for offer in able)
        top = [offer for offer in able if offer.registration.priority == best]
        if len({offer.name for offer in top}) > 1:
            names = " and ".join(f"{o.name!r} ({o.distribution})" for o in top)
            raise PluginError(f'{setting} is "auto", but {names} have equal priority; name one of them.')
        chosen = self._only(top, setting)
        others = sorted({offer.name for offer in able} - {chosen.name})
        log.info(
            "%s: auto chose %s of %s%s",
            setting,
            chosen.name,
            chosen.distribution,
            f" over {', '.join(others)} (priority {best})" if others else " (the only one)",
        )
        return chosen

    def family(self, architectures: Sequence[str], name: str) -> Offer:
        """The model family of that name, or for "auto" the one that knows a checkpoint's architecture."""
        setting = "model.family"
        if name != "auto":
            return self.get("model", name, setting)
        found = [o for o in self.offers["model"] if set(architectures) & set(o.registration.architectures)]  # type: ignore[attr-defined]
        if not found:
            known = sorted(a for o in self.offers["model"] for a in o.registration.architectures)  # type: ignore[attr-defined]
            raise PluginError(
                f"The checkpoint's architecture is {' or '.join(architectures) or 'not stated'}, which no installed "
                f"plugin knows; {_installed(known)} pip install infer-models brings Llama, Qwen3 and Gemma 3."
                f"{self._culprits()}"
            )
        if len({offer.name for offer in found}) > 1:
            names = " and ".join(f"{o.name!r} ({o.distribution})" for o in found)
            raise PluginError(f"{names} both know the architecture {architectures[0]}; choose by {setting}.")
        return self._only(found, setting)

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Bundled checkpoints by name. Raises PluginError when two distributions bring one name."""
        owners: dict[str, str] = {}
        for name, _, distribution in self._checkpoints:
            if name in owners:
                raise PluginError(
                    f"{owners[name]} and {distribution} both bring a checkpoint {name!r}; uninstall one of them."
                )
            owners[name] = distribution
        return {name: path for name, path, _ in self._checkpoints}

    def notify(self, hook: str, record: object) -> None:
        """Tell every observer. One that raises is logged, and not asked again."""
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        for implementation in caller.get_hookimpls():
            call: Callable[..., object] = implementation.function
            try:
                call(record)
            except Exception:
                log.exception("the observer %s failed in %s and is left out", implementation.plugin_name, hook)
                caller._remove_plugin(implementation.plugin)

    def _only(self, found: Sequence[Offer], setting: str) -> Offer:
        if len(found) > 1:
            owners = " and ".join(sorted(offer.distribution for offer in found))
            raise PluginError(
                f"{owners} both offer {found[0].name!r} for {setting}; uninstall one of them or choose another name."
            )
        return found[0]

    def _culprits(self) -> str:
        return "".join(f" The plugin of {b.distribution} is broken: {b.reason}" for b in self.broken)


def _installed(names: Sequence[str]) -> str:
    return f"installed: {', '.join(names)}." if names else "none is installed."


def _pip(slot: str, name: str) -> str:
    package = KNOWN.get(f"{slot}.{name}")
    if package:
        return f" Install it: pip install {package}."
    close = difflib.get_close_matches(name, [key.split(".")[1] for key in KNOWN if key.startswith(f"{slot}.")], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
