"""What a plugin states about itself: the version of the contracts, its hooks' mark, and what it offers.

A plugin is a module named by an entry point of the group ``infer``. It states the contract it was written for
(``INFER_PLUGIN_API = 2``) and marks its functions with ``infer.hookimpl``. ``hooks.py`` has all hooks on one page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import pluggy
from pydantic import BaseModel, JsonValue

PLUGIN_API = 2
"""Version of the contracts in this package. A plugin states which version it was written for."""
hookspec = pluggy.HookspecMarker("infer")
hookimpl = pluggy.HookimplMarker("infer")
F = TypeVar("F")


ONE_PROCESS: dict[str, JsonValue] = {"x-one-process": True}
"""``json_schema_extra`` of a setting that is a folder which one process at a time may use. Of several models behind one
address, each gets a folder of its own in there."""


class NoSettings(BaseModel, extra="forbid"):
    """The settings model of a plugin that has no settings."""


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
