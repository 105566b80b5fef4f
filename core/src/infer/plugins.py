"""Finding plugins, and choosing among them by name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pluggy

from infer import hookspecs, inspection
from infer.errors import InferError, PluginError, SettingsError, say
from infer.hookspecs import (
    CacheRegistration,
    KernelsRegistration,
    ModelRegistration,
    Registration,
    SchedulerRegistration,
    WeightFormatRegistration,
    hookimpl,
)
from infer.inspection import HOOKS, RECORDS
from infer.protocols import CacheContext, ObserverProtocol
from infer.settings import KNOWN, Settings, plugin_settings

log = logging.getLogger(__name__)

GROUP = "infer"
CHOSEN_BY: Mapping[str, str] = {
    "cache": "cache.backend",
    "kernels": "kernels.backend",
    "scheduler": "engine.batching_mode",
    "model": "model.family",
}
"""Slot -> the setting that names its plugin. Of observers all are taken."""


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

    @property
    def whose(self) -> str:
        """As a sentence names it."""
        return f"The {self.slot} plugin {self.name!r} of {self.distribution}"

    @property
    def devices(self) -> tuple[str, ...]:
        """The device types that it is bound to; none for all."""
        return self.registration.devices if isinstance(self.registration, KernelsRegistration) else ()

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.registration.architectures if isinstance(self.registration, ModelRegistration) else ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways to quantise that it reads."""
        return self.registration.methods if isinstance(self.registration, WeightFormatRegistration) else ()

    @property
    def chunks(self) -> bool:
        """Whether it can prefill in chunks."""
        return not isinstance(self.registration, SchedulerRegistration) or self.registration.chunks

    @property
    def longest(self) -> Callable[[CacheContext, Any, int], int] | None:
        """Of a cache, what tells how many positions one sequence may have."""
        return self.registration.longest if isinstance(self.registration, CacheRegistration) else None

    def make(self, contract: type, *given: Any) -> Any:
        """What its factory makes, checked against the contract. Raises PluginError."""
        return inspection.make(self.whose, contract, self.registration.factory, *given)


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
    environment: frozenset[str] = frozenset()
    """INFER_* variables that plugins read themselves."""
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
            distribution, version = _whence(entry)
            try:
                with inspection.blame("its import failed"):
                    plugin = entry.load()
                plugins._add(plugin, distribution, version)
            except PluginError as error:
                plugins.broken.append(Broken(distribution, version, str(error)))
        for plugin in extra:
            name = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__name__
            try:
                plugins._add(plugin, name, "in process")
            except PluginError as error:
                raise PluginError(f"The plugin {name} is broken: {error}") from error
        for b in plugins.broken:
            log.warning("the plugin of %s %s is left out: %s", b.distribution, b.version, b.reason)
        return plugins

    def _add(self, plugin: object, distribution: str, version: str) -> None:
        """Take a plugin, or raise a PluginError that says what is wrong with it, and nothing of it stays."""
        try:
            inspection.check_api(plugin)
            self.environment |= inspection.environment(plugin)
            hooks = inspection.hooks(plugin)
            offers: list[Offer] = []
            found: dict[str, Path] = {}
            for attribute, hook, function in hooks:
                if hook in RECORDS:
                    continue
                with inspection.blame(f"its {attribute}() failed"):
                    returned = function()
                if hook == "infer_checkpoints":
                    found |= inspection.checkpoints(returned)
                for slot in (slot for slot, fills in HOOKS.items() if fills == hook):
                    offers += [
                        Offer(slot, r, distribution, version) for r in inspection.registrations(slot, hook, returned)
                    ]
            label = f"{distribution} {version}"
            while self.manager.has_plugin(label):  # one distribution may bring several entry points
                label += "+"
            # pluggy gets the hooks alone: it compares plugins with each other, and asks for all they have.
            self._register(label, {attribute: function for attribute, _, function in hooks})
        except (PluginError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an object may raise wherever it is touched
            raise PluginError(f"it cannot be inspected: {say(error)}.") from error
        for offer in offers:
            self.offers[offer.slot].append(offer)
        self._checkpoints += [(name, path, distribution) for name, path in found.items()]

    def _register(self, label: str, functions: Mapping[str, Callable[..., object]]) -> ModuleType:
        module = ModuleType(label)
        vars(module).update(functions)
        try:
            self.manager.register(module, label)
        except Exception:
            self.manager.unregister(module)
            raise
        return module

    def get(self, slot: str, name: str, setting: str) -> Offer:
        """The one offer of that name. Raises PluginError; an explicit choice never falls back."""
        found = [offer for offer in self.offers[slot] if offer.name == name]
        if not found:
            names = sorted({offer.name for offer in self.offers[slot]})
            raise PluginError(
                f"{setting} is {name!r}, but no such plugin is installed; {_installed(names)}{_pip(slot, name)}"
                f"{self.culprits()}"
            )
        offer = self._only(found, setting)
        if offer.registration.unavailable:
            why = f"{offer.distribution} cannot be used here: {offer.registration.unavailable}"
            raise PluginError(f"{setting} is {name!r}, but {why}.")
        return offer

    def choose(self, slot: str, settings: Settings, device_type: str) -> Offer:
        """What the settings choose for a slot on a device. Raises PluginError or SettingsError."""
        setting = CHOSEN_BY[slot]
        section, key = setting.split(".")
        name = getattr(getattr(settings, section), key)
        if name == "auto":
            return self.auto(slot, setting, device_type)
        offer = self.get(slot, name, setting)
        if offer.devices and device_type not in offer.devices:
            raise SettingsError(
                f"{setting} {name!r} runs on {' and '.join(offer.devices)}, but the model is on {device_type}; "
                "choose another or set model.device."
            )
        return offer

    def auto(self, slot: str, setting: str, device_type: str | None = None) -> Offer:
        """The installed offer of highest priority that runs on the device; says in the log which and why."""
        able = [o for o in self.offers[slot] if device_type is None or not o.devices or device_type in o.devices]
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
                f"{self.culprits()}"
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
        found = [o for o in self.offers["model"] if set(architectures) & set(o.architectures)]
        if not found:
            known = sorted(a for o in self.offers["model"] for a in o.architectures)
            raise PluginError(
                f"The checkpoint's architecture is {' or '.join(architectures) or 'not stated'}, which no installed "
                f"plugin knows; {_installed(known)} pip install infer-models brings Llama, "
                f"Qwen, Mistral, Phi-3, OLMo 2 and Gemma 3."
                f"{self.culprits()}"
            )
        if len({offer.name for offer in found}) > 1:
            names = " and ".join(f"{o.name!r} ({o.distribution})" for o in found)
            raise PluginError(f"{names} both know the architecture {architectures[0]}; choose by {setting}.")
        return self._only(found, setting)

    def weight_format(self, method: str) -> Offer:
        """What reads weights that are quantised so; the empty method is that of plain ones. Raises PluginError."""
        found = [o for o in self.offers["weights"] if method in o.methods and not o.registration.unavailable]
        if not found:
            known = sorted({m for o in self.offers["weights"] for m in o.methods if m})
            raise PluginError(
                f"The checkpoint has a quantization_config of quant_method {method!r}, which no installed plugin "
                f"reads; infer loads float32, float16 and bfloat16 weights{''.join(f', {m}' for m in known)}."
                f"{self.culprits()}"
            )
        if len(found) > 1:
            names = " and ".join(f"{o.name!r} ({o.distribution})" for o in found)
            raise PluginError(f"{names} both read weights of quant_method {method!r}; uninstall one of them.")
        return found[0]

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Bundled checkpoints by name."""
        return {name: path for name, path, _ in self._checkpoints}

    def check_bundled(self, name: str) -> None:
        """Raises PluginError where two distributions bring a checkpoint of that name."""
        owners = sorted(distribution for found, _, distribution in self._checkpoints if found == name)
        if len(owners) > 1:
            raise PluginError(f"{' and '.join(owners)} both bring a checkpoint {name!r}; uninstall one of them.")

    def observe(self, settings: Settings) -> Callable[[], None]:
        """Make the installed observers. One that cannot be made is left out, and the log says why. What comes back ends
        them: it closes each once."""
        made = ExitStack()
        for offer in self.offers["observer"]:
            try:
                self.get("observer", offer.name, f"observers.{offer.name}")
                observer = offer.make(ObserverProtocol, plugin_settings(settings, "observer", offer.name))
                module = self._register(f"{offer.whose} {id(observer)}", _records(offer, observer))
            except InferError as error:
                log.warning("the observer %s of %s is left out: %s", offer.name, offer.distribution, error)
                continue
            made.callback(_close, offer, observer)
            made.callback(self.manager.unregister, module)
        return made.close

    def notify(self, hook: str, record: object) -> None:
        """Tell every observer. One that raises is logged, and not asked again."""
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        for implementation in caller.get_hookimpls():
            call: Callable[..., object] = implementation.function
            try:
                call(record)
            except (Exception, SystemExit):
                log.exception("the observer %s failed in %s and is left out", implementation.plugin_name, hook)
                caller._remove_plugin(implementation.plugin)

    def _only(self, found: Sequence[Offer], setting: str) -> Offer:
        if len(found) > 1:
            owners = " and ".join(sorted(offer.distribution for offer in found))
            raise PluginError(
                f"{owners} both offer {found[0].name!r} for {setting}; uninstall one of them or choose another name."
            )
        return found[0]

    def culprits(self) -> str:
        """What may explain that something is missing."""
        return "".join(f" The plugin of {b.distribution} is broken: {b.reason}" for b in self.broken)


def _whence(entry: EntryPoint) -> tuple[str, str]:
    """(distribution, version), as far as its metadata can be read."""
    try:
        return (str(entry.dist.name), str(entry.dist.version)) if entry.dist else ("unknown", "")
    except Exception:  # a half-removed distribution has no metadata, and none of the errors that it gives is documented
        return f"of the entry point {entry.name}", ""


def _records(offer: Offer, observer: object) -> dict[str, Callable[..., object]]:
    """The hooks that an observer wants to be called by."""

    def forward(call: Callable[..., object]) -> Callable[..., object]:
        def told(record: object) -> object:
            return call(record)

        return hookimpl(told)

    found = {}
    for hook in RECORDS:
        if (call := getattr(observer, hook, None)) is not None:
            try:
                inspection.check_function(hook, hook, call, {})
            except PluginError as error:
                raise PluginError(f"{offer.whose} cannot be used: {error}") from None
            found[hook] = forward(call)
    if not found:
        raise PluginError(
            f"{offer.whose} cannot be used: its factory made one of type {type(observer).__name__}, which has "
            f"neither {RECORDS[0]} nor {RECORDS[1]}."
        )
    return found


def _close(offer: Offer, observer: object) -> None:
    try:
        if callable(close := getattr(observer, "close", None)):
            close()
    except (Exception, SystemExit) as error:
        log.warning("%s failed when it was closed: %s", offer.whose, say(error))


def _installed(names: Sequence[str]) -> str:
    return f"installed: {', '.join(names)}." if names else "none is installed."


def _pip(slot: str, name: str) -> str:
    package = KNOWN.get(f"{slot}.{name}")
    if package:
        return f" Install it: pip install {package}."
    close = difflib.get_close_matches(name, [key.split(".")[1] for key in KNOWN if key.startswith(f"{slot}.")], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
