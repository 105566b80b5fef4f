"""Finds the installed plugins and chooses among them by name."""

from __future__ import annotations

import difflib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import pluggy
from pydantic import BaseModel

from infer.contracts import hooks as hookspecs
from infer.contracts.cache import CacheContext, CacheRegistration
from infer.contracts.proposer import ProposerRegistration
from infer.contracts.registration import Registration, hookimpl
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.sections import Settings
from infer.errors import InferError, PluginError, SettingsError, in_short, installing, one_line
from infer.plugins import inspection
from infer.plugins.extension_points import EXTENSION_POINTS
from infer.plugins.inspection import RECORDS
from infer.settings import plugin_settings

log = logging.getLogger(__name__)
MAX_SHOWN = 100
"""The most characters of a checkpoint's names that a message repeats."""

GROUP = "infer"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile. What imports make stays, and to look through it again and again takes a sixth
    of a start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Offer:
    """A registration and the distribution that it comes from."""

    point: str
    registration: Registration[Any]
    distribution: str
    version: str

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def whose(self) -> str:
        """The plugin as an error message names it."""
        return f"The {self.point} plugin {self.name!r} of {self.distribution}"

    @property
    def chunks(self) -> bool:
        """Whether it can prefill in chunks; only a scheduler may say that it cannot."""
        return not isinstance(self.registration, SchedulerRegistration) or self.registration.chunks

    @property
    def longest(self) -> Callable[[CacheContext, Any, int], int] | None:
        """``CacheRegistration.longest``; None for other plugins."""
        return self.registration.longest if isinstance(self.registration, CacheRegistration) else None

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """The values of ``cache.kv_dtype`` other than ``auto`` that a cache pool or kernels know."""
        return getattr(self.registration, "kv_dtypes", ())

    @property
    def states(self) -> bool:
        """``CacheRegistration.states``; False for other plugins."""
        return isinstance(self.registration, CacheRegistration) and self.registration.states

    @property
    def proposer(self) -> ProposerRegistration | None:
        """The registration of a proposer that may need a draft head; None for other plugins."""
        return self.registration if isinstance(self.registration, ProposerRegistration) else None

    @property
    def about(self) -> str:
        """``KernelsRegistration.about``; empty for other plugins."""
        return getattr(self.registration, "about", "")

    def own(self, settings: Settings) -> BaseModel:
        """The plugin's own table in the settings."""
        return plugin_settings(settings, self.point, self.name)

    def build(self, settings: Settings, *given: Any) -> Any:
        """What the factory makes of ``given`` and of the plugin's own table, checked against the contract of its
        extension point. Raises PluginError."""
        contract = EXTENSION_POINTS[self.point].contract
        assert contract is not None
        return self.make(contract, *given, self.own(settings))

    def make(self, contract: type, *given: Any) -> Any:
        """Call the factory with ``given`` and check the result against the contract. Raises PluginError."""
        return inspection.make(self.whose, contract, self.registration.factory, *given)


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be used."""

    distribution: str
    version: str
    reason: str


@dataclass
class Plugins:
    """All installed plugins, by extension point. A broken plugin is reported and does not affect the others."""

    manager: pluggy.PluginManager
    offers: dict[str, list[Offer]] = field(default_factory=lambda: {point: [] for point in EXTENSION_POINTS})
    broken: list[Broken] = field(default_factory=list)
    environment: frozenset[str] = frozenset()
    """The INFER_* variables that plugins read themselves."""
    _checkpoints: list[tuple[str, Path, str]] = field(default_factory=list)

    @classmethod
    @_uncollected()
    def discover(cls, extra: Sequence[object] = (), *, installed: Iterable[EntryPoint] | None = None) -> Self:
        """Load every entry point of the group ``infer``, and register ``extra`` (modules or objects) as well. One that
        is installed, too, is registered once, so that a plugin's tests name it whether it is installed or not.

        The caller asks for ``extra`` explicitly, so a fault in it is raised as a PluginError.
        """
        import infer.openmp  # noqa: F401 (before a plugin imports torch)

        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(hookspecs)
        plugins, loaded = cls(manager), list[object]()
        # pluggy's own loader silently skips the second of two distributions with one entry-point name.
        for entry in entry_points(group=GROUP) if installed is None else installed:
            distribution, version = _origin(entry)
            try:
                with inspection.blame("its import failed"):
                    plugin = entry.load()
                plugins._add(plugin, distribution, version)
                loaded.append(plugin)
            except PluginError as error:
                plugins.broken.append(Broken(distribution, version, str(error)))
        for plugin in extra:
            if any(plugin is one for one in loaded):
                continue
            name = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__name__
            try:
                plugins._add(plugin, name, "in process")
            except PluginError as error:
                raise PluginError(f"The plugin {name} is broken: {error}") from error
        for b in plugins.broken:
            log.warning("the plugin of %s %s is left out: %s", b.distribution, b.version, b.reason)
        return plugins

    def _add(self, plugin: object, distribution: str, version: str) -> None:
        """Add a plugin. If anything is wrong with it, raise a PluginError and add nothing."""
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
                for point in (point for point, about in EXTENSION_POINTS.items() if about.hook == hook):
                    offers += [
                        Offer(point, r, distribution, version) for r in inspection.registrations(point, hook, returned)
                    ]
            label = f"{distribution} {version}"
            while self.manager.has_plugin(label):  # one distribution may bring several entry points
                label += "+"
            # pluggy compares plugins and reads all their attributes, which may raise, so it gets the hooks alone.
            functions = {attribute: function for attribute, _, function in hooks}
            self._register(label, functions, f"The observer of {distribution}")
        except (PluginError, KeyboardInterrupt):
            raise
        except BaseException as error:  # any access to a foreign object may raise
            raise PluginError(f"it cannot be inspected: {one_line(error)}.") from error
        for offer in offers:
            self.offers[offer.point].append(offer)
        self._checkpoints += [(name, path, distribution) for name, path in found.items()]

    def _register(self, label: str, functions: Mapping[str, Callable[..., object]], whose: str) -> ModuleType:
        module = ModuleType(whose)
        vars(module).update(functions)
        try:
            self.manager.register(module, label)
        except Exception:
            self.manager.unregister(module)
            raise
        return module

    def get(self, point: str, name: str, setting: str) -> Offer:
        """The only offer of that name. Raises PluginError: an explicit choice never falls back to another."""
        found = [offer for offer in self.offers[point] if offer.name == name]
        if not found:
            names = sorted({offer.name for offer in self.offers[point]})
            raise PluginError(
                f"{setting} is {name!r}, but no such plugin is installed; {_installed(names)}"
                f"{advice(point, name, names)}{self.culprits()}"
            )
        offer = self._only(found, setting)
        if offer.registration.unavailable:
            why = f"{offer.distribution} cannot be used here: {offer.registration.unavailable}"
            raise PluginError(f"{setting} is {name!r}, but {why}.")
        return offer

    def check_names(self, settings: Settings) -> None:
        """Raises PluginError if the settings name what is not installed or cannot be used here. Some choices are made
        only after the weights have been loaded, which is late to find a misspelled name."""
        for point, about in EXTENSION_POINTS.items():
            if about.setting is not None and (name := about.chosen(settings)) not in ("auto", "none"):
                self.get(point, name, about.setting)

    def choose(self, point: str, settings: Settings, there: Sequence[str] = ()) -> Offer:
        """The offer that the settings name for an extension point. For "auto", or if it has no setting, the offer
        of highest priority among those that suit ``there``: the device's type, the checkpoint's architectures or its
        quantization method. The log says which offer was chosen and why. Raises PluginError or SettingsError.
        """
        about = EXTENSION_POINTS[point]
        name = about.chosen(settings)
        if about.setting is None or name == "auto":
            return self._auto(point, there)
        offer = self.get(point, name, about.setting)
        if about.fits == "devices" and not about.suits(offer.registration, there):
            runs = " and ".join(about.named(offer.registration))
            raise SettingsError(
                f"{about.setting} {name!r} runs on {runs}, but the model is on {' or '.join(there)}; "
                "choose another or set model.device."
            )
        return offer

    def suited(self, point: str) -> list[str]:
        """All that the offers of an extension point say that they suit."""
        about = EXTENSION_POINTS[point]
        return [one for offer in self.offers[point] for one in about.named(offer.registration)]

    def spared(self, point: str, settings: Settings) -> bool:
        """Whether an extension point has nothing to choose from, and the server does without."""
        about = EXTENSION_POINTS[point]
        return about.optional and about.chosen(settings) == "auto" and not self.offers[point]

    def _auto(self, point: str, there: Sequence[str]) -> Offer:
        about = EXTENSION_POINTS[point]
        what = about.setting or about.when.removeprefix("by ")
        able = [offer for offer in self.offers[point] if about.suits(offer.registration, there)]
        for offer in able:
            if offer.registration.unavailable:
                log.warning(
                    "%s: auto passes over %s of %s: %s",
                    *(what, offer.name, offer.distribution, offer.registration.unavailable),
                )
        able = [offer for offer in able if not offer.registration.unavailable]
        shown = {"setting": about.setting, "there": in_short(" or ".join(there), MAX_SHOWN) or "not stated"}
        if not able:
            named = sorted({*self.suited(point)} - {""})
            known = "".join(f", {one}" for one in named)
            install = installing(min(about.packages.values(), default=""))
            advice = "".join(f"{installing(p)} brings one; " for p in {*map(about.packages.get, there)} if p)
            text = about.missing.format(
                known=known, installed=_installed(named), install=install, advice=advice, **shown
            )
            raise PluginError(f"{text}{self.culprits()}")
        best = max(offer.registration.priority for offer in able)
        top = [offer for offer in able if offer.registration.priority == best]
        if len({offer.name for offer in top}) > 1:
            names = " and ".join(f"{o.name!r} ({o.distribution})" for o in top)
            raise PluginError(about.tie.format(names=names, **shown))
        chosen = self._only(top, what)
        log.info("%s: auto chose %s of %s, %s", what, chosen.name, chosen.distribution, self.rank(chosen, there))
        return chosen

    def rank(self, chosen: Offer, there: Sequence[str] = ()) -> str:
        """What ``auto`` preferred an offer to."""
        suits = EXTENSION_POINTS[chosen.point].suits
        able = (offer.registration for offer in self.offers[chosen.point])
        others = sorted({r.name for r in able if suits(r, there) and not r.unavailable} - {chosen.name})
        return f"over {', '.join(others)} (priority {chosen.registration.priority})" if others else "the only one"

    def candidates(self, point: str, settings: Settings) -> list[Offer]:
        """The offers among which the checkpoint decides: the one that the settings name, none for "none", and for
        "auto" all that can be used, the highest priority first. If two have the same name, auto leaves out both and
        logs it. Raises PluginError."""
        setting, name = EXTENSION_POINTS[point].setting, EXTENSION_POINTS[point].chosen(settings)
        assert setting is not None
        if name != "auto":
            return [] if name == "none" else [self.get(point, name, setting)]
        found = []
        for offer in sorted(self.offers[point], key=lambda offer: (-offer.registration.priority, offer.name)):
            try:
                found.append(self.get(point, offer.name, setting))
            except PluginError as error:
                log.warning("%s: auto passes over %s of %s: %s", setting, offer.name, offer.distribution, error)
        return found

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Bundled checkpoints by name."""
        return {name: path for name, path, _ in self._checkpoints}

    def check_bundled(self, name: str) -> None:
        """Raises PluginError if two distributions bring a checkpoint of that name."""
        owners = sorted(distribution for found, _, distribution in self._checkpoints if found == name)
        if len(owners) > 1:
            raise PluginError(f"{' and '.join(owners)} both bring a checkpoint {name!r}; uninstall one of them.")

    def observe(self, settings: Settings) -> Callable[[], None]:
        """Make the installed observers and register them. An observer that cannot be made is left out, and the log says
        why. The returned function unregisters and closes them."""
        made = ExitStack()
        for offer in self.offers["observer"]:
            try:
                self.get("observer", offer.name, f"observers.{offer.name}")
                observer = offer.build(settings)
                unsubscribe = self.subscribe(offer.whose, observer)
            except InferError as error:
                log.warning("the observer %s of %s is left out: %s", offer.name, offer.distribution, error)
                continue
            made.callback(_close, offer, observer)
            made.callback(unsubscribe)
        return made.close

    def subscribe(self, whose: str, observer: object) -> Callable[[], None]:
        """Notify an object from now on, until the returned function is called. Raises PluginError."""
        module = self._register(f"{whose} {id(observer)}", _records(whose, observer), whose)
        return lambda: self.manager.unregister(module)

    def notify(self, hook: str, record: object) -> None:
        """Notify every observer. An observer that raises is logged and not called again."""
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        for implementation in caller.get_hookimpls():
            call: Callable[..., object] = implementation.function
            try:
                call(record)
            except (Exception, SystemExit):
                whose = cast(ModuleType, implementation.plugin).__name__
                log.exception("%s failed in %s and is left out", whose, hook)
                with suppress(ValueError):  # another thread may have unregistered it meanwhile
                    caller._remove_plugin(implementation.plugin)

    def _only(self, found: Sequence[Offer], setting: str) -> Offer:
        if len(found) > 1:
            owners = " and ".join(sorted(offer.distribution for offer in found))
            raise PluginError(
                f"{owners} both offer {found[0].name!r} for {setting}; uninstall one of them or choose another name."
            )
        return found[0]

    def culprits(self) -> str:
        """A sentence for each broken plugin, which may explain why something is missing."""
        return "".join(f" The plugin of {b.distribution} is broken: {b.reason}" for b in self.broken)


def _origin(entry: EntryPoint) -> tuple[str, str]:
    """The entry point's (distribution, version), as far as its metadata can be read."""
    try:
        if entry.dist is None:
            return "unknown", ""
        metadata = entry.dist.metadata  # read and parsed whenever it is asked for
        return str(metadata["Name"]), str(metadata["Version"])
    except Exception:  # a half-removed distribution has no metadata, and the errors that this raises are undocumented
        return f"of the entry point {entry.name}", ""


def _records(whose: str, observer: object) -> dict[str, Callable[..., object]]:
    """The hooks that an observer has methods for, each a function that calls the method. Raises PluginError."""

    def forward(call: Callable[..., object]) -> Callable[..., object]:
        def notified(record: object) -> object:
            return call(record)

        return hookimpl(notified)

    found = {}
    for hook in RECORDS:
        if (call := getattr(observer, hook, None)) is not None:
            try:
                inspection.check_function(hook, hook, call, {})
            except PluginError as error:
                raise PluginError(f"{whose} cannot be used: {error}") from None
            found[hook] = forward(call)
    if not found:
        raise PluginError(
            f"{whose} cannot be used: its factory made one of type {type(observer).__name__}, which has "
            f"neither {RECORDS[0]} nor {RECORDS[1]}."
        )
    return found


def _close(offer: Offer, observer: object) -> None:
    try:
        if callable(close := getattr(observer, "close", None)):
            close()
    except (Exception, SystemExit) as error:
        log.warning("%s failed when it was closed: %s", offer.whose, one_line(error))


def _installed(names: Sequence[str]) -> str:
    return f"installed: {', '.join(names)}." if names else "none is installed."


def advice(point: str, name: str, installed: Sequence[str]) -> str:
    """What to do about a name that no plugin has, as a sentence after a space; empty if nobody knows."""
    packages = EXTENSION_POINTS[point].packages
    if package := packages.get(name):
        return f" Install it: {installing(package)}."
    close = difflib.get_close_matches(name, {*packages, *installed}, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
