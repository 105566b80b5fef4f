"""What is installed, what is chosen and why, who implements which hook, and what each setting decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.contracts.sections import Settings
from infer.errors import InferError
from infer.plugins.extension_points import EXTENSION_POINTS
from infer.plugins.inspection import SPECS
from infer.settings import describe, describe_schema, schema

if TYPE_CHECKING:
    from infer.assemble.weights import Stored
    from infer.plugins.discovery import Offer, Plugins


class Survey:
    """What is installed, as rows of tables. What keeps a choice from being made is in ``failed``."""

    def __init__(self, plugins: Plugins, settings: Settings, sources: Mapping[str, str]) -> None:
        """``sources`` says where each setting's value came from."""
        self._plugins, self._settings, self._sources = plugins, settings, sources
        self.failed: list[InferError] = []
        self._there: dict[str, Sequence[str]] = {}
        """What decides among an extension point's offers on this machine, as far as it is known."""
        self._stored: Stored | None = None
        try:
            self._look()
        except InferError as error:
            self.failed.append(error)
        self._chosen = {point: self._choices(point) for point in EXTENSION_POINTS}

    def _look(self) -> None:
        """Find out about the device and, if it is on this machine, about the checkpoint."""
        from infer.assemble.blueprint import Blueprint
        from infer.assemble.weights import stored

        blueprint = Blueprint(self._settings, self._plugins)
        self._there["kernels"] = blueprint.there("kernels")
        path = self._settings.model.path
        if path is None or not (path in self._plugins.checkpoints or Path(path).expanduser().exists()):
            return
        for point in ("container", "model", "weights"):
            self._there[point] = blueprint.there(point)
        self._stored = stored(self._settings, blueprint.chosen("weights"), blueprint.checkpoint)

    def _choices(self, point: str) -> list[Offer]:
        """The offers that are chosen. For an extension point whose choice is made later, and for one of which
        all are used, those that can be."""
        about, chosen = EXTENSION_POINTS[point], EXTENSION_POINTS[point].chosen(self._settings)
        if chosen == "none" or self._plugins.spared(point, self._settings):
            return []
        if self._all_of(point):
            return [offer for offer in self._plugins.offers[point] if not offer.registration.unavailable]
        if point not in self._there and (about.fits == "devices" or (about.fits and chosen == "auto")):
            return []
        try:
            return [self._plugins.choose(point, self._settings, self._there.get(point, ()))]
        except InferError as error:
            self.failed.append(error)
            return []

    def _all_of(self, point: str) -> str:
        """What the table says of an extension point's offers if none is chosen over the others; empty if one is."""
        about = EXTENSION_POINTS[point]
        if about.when and about.chosen(self._settings) == "auto":
            return "" if point in self._there else "when met"
        return "yes" if about.setting is None and not about.when else ""

    def _why(self, offer: Offer) -> str:
        """Why an offer is chosen."""
        about, there = EXTENSION_POINTS[offer.point], self._there.get(offer.point, ())
        auto, all_of_them = about.chosen(self._settings) == "auto", self._all_of(offer.point)
        why = ""
        if about.when and auto:
            why = f"{about.when}: {' or '.join(there) or 'none'}" if there else about.when
        elif about.setting is not None:
            value = about.chosen(self._settings)
            why = f"{about.setting} = {value} (from {self._sources[about.setting]})"
        return why if all_of_them or not auto else f"{why}; {self._plugins.rank(offer, there)}"

    def parts(self) -> list[dict[str, Any]]:
        """A row for each offer of each extension point, for the configured checkpoint if it is on this
        machine, and for each broken plugin."""
        rows: list[dict[str, Any]] = []
        row: dict[str, Any]
        for point, offers in self._plugins.offers.items():
            for offer in offers:
                registration = offer.registration
                taken = offer in self._chosen[point]
                known = (f"knows K/V in {name}" for name in offer.kv_dtypes)
                described = filter(None, (registration.description, *known, offer.about))
                row = {"slot": point, "name": offer.name, "distribution": offer.distribution, "version": offer.version}
                row |= {"chosen": (self._all_of(point) or "yes") if taken else "no"}
                row |= {"why": self._why(offer) if taken else registration.unavailable or ""}
                row |= {"description": "; ".join(described), "priority": registration.priority}
                rows.append(row | {"suits": list(EXTENSION_POINTS[point].named(registration))})
        if self._stored is not None:
            settings, sources = self._settings, self._sources
            row = dict.fromkeys(("distribution", "version"), "-") | {"slot": "checkpoint", "chosen": "yes"}
            row |= {"name": str(settings.model.path), "description": str(self._stored)}
            why = f"model.path = {row['name']} (from {sources['model.path']})"
            rows.append(row | {"why": why, "quantization": vars(self._stored)})
        for b in self._plugins.broken:
            row = {"slot": "-", "name": "-", "distribution": b.distribution, "version": b.version}
            rows.append(row | {"chosen": "broken", "why": b.reason, "description": ""})
        return rows

    def hooks(self) -> list[dict[str, Any]]:
        """A row for each hook: which plugins implement it, in the order in which they were found."""
        callers = self._plugins.manager.hook
        return [
            {
                "hook": name,
                "plugins": [found.plugin_name for found in getattr(callers, name).get_hookimpls()],
                "description": " ".join((spec.__doc__ or "").split()),
            }
            for name, spec in SPECS.items()
        ]

    def settings(self) -> list[dict[str, Any]]:
        """A row for each setting: its value, where this came from, and what it selects if it names a part."""
        selecting = {about.setting: point for point, about in EXTENSION_POINTS.items() if about.setting is not None}
        texts = {key: text for key, text, _ in describe_schema(schema(self._plugins))}
        return [
            {
                "key": key,
                "value": value,
                "source": self._sources[key],
                "decides": texts[key],
                "selects": self._selects(selecting[key]) if key in selecting else None,
            }
            for key, value in describe(self._settings)
        ]

    def _selects(self, point: str) -> dict[str, Any]:
        all_of_them = self._all_of(point)
        return {"slot": point, "parts": [offer.name for offer in self._chosen[point]], "chosen": all_of_them or "yes"}
