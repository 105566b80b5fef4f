"""The settings of the processes behind a server: what is theirs, and what is the server's alone."""

from __future__ import annotations

import functools
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from pydantic import BaseModel, SecretStr, ValidationError

from infer.contracts.command import CommandContext
from infer.contracts.registration import ONE_PROCESS
from infer.contracts.sections import ModelTable, ServerSettings, Settings
from infer.errors import SettingsError, first_fault
from infer.settings import MODELS, load_settings, plugin_settings
from infer_router.settings import RouterSettings
from infer_server.http.keys import INGRESS
from infer_server.http.wire import LATEST

PATIENCE_S = 86400.0
"""An engine does not drop an ingress that does not read, for that waits for a client, and drops it in time."""
SEED_BYTES = 64
"""A body has room for the seed that an ingress adds."""
NAME = re.compile(r'[^\s"*:][^\s"*]{0,199}')
OURS = ("host", "port", "api_keys", "cors_origins", "access_log", "max_body_bytes", "stall_timeout_s", "router")
"""Keys of ``[server]`` that are about the address, of which there is one."""
THEIRS = ("served_model_name", "aliases")
"""Keys of ``[server]`` that are about a single model."""


def given(context: CommandContext, *without: str) -> dict[str, Any]:
    """What any source says, nested, but for the sections ``without``."""
    found: dict[str, Any] = {}
    for key, source in context.sources.items():
        if not source.startswith("default") and key.partition(".")[0] not in without:
            *tables, name = key.split(".")
            at = found
            for table in tables:
                at = at.setdefault(table, {})
            at[name] = _plain(functools.reduce(getattr, (*tables, name), context.settings))
    return found


def behind(given: Mapping[str, Any], server: ServerSettings, key: str) -> dict[str, Any]:
    """The settings of an engine that a server is in front of: it lets in who shows the ``key``."""
    own = {name: value for name, value in given.get("server", {}).items() if name != "router"}
    own |= {"host": "127.0.0.1", "port": 0, "api_keys": [key], "cors_origins": []}
    own["access_log"] = False  # the server in front has one
    own["stall_timeout_s"] = PATIENCE_S
    own["max_body_bytes"] = server.max_body_bytes + SEED_BYTES
    return {**given, "server": own}


@dataclass(frozen=True)
class Plan:
    """Several models behind one address."""

    engines: Mapping[str, Mapping[str, Any]]
    """The settings of each model's process."""
    keep_alive_s: Mapping[str, float]
    pinned: frozenset[str]
    names: Mapping[str, str]
    """The model of each name that clients may use, aliases among them."""
    key: str
    """What the processes want to be shown."""
    router: RouterSettings
    adapted: frozenset[str] = frozenset()
    """The models that may have adapters."""
    console: bool = False
    """Whether there is a console."""

    def meant(self, name: str) -> str | None:
        """The model that a client means: by its name or an alias, by an adapter's, or by both with a colon between."""
        names, base = self.names, self.names.get(name.rpartition(":")[0])
        named = names.get(name) or names.get(name.removesuffix(LATEST))
        return named or (base if base in self.adapted else names.get("*"))


def several(context: CommandContext, words: Sequence[str] = ()) -> Plan:
    """The plan for the models ``words``, names of tables or else what ``model.path`` may be, or without any, for those
    of all tables. Every model's settings are checked. Raises SettingsError."""
    tables = dict(context.settings.models)
    server = context.settings.server
    for name in THEIRS:
        if getattr(server, name):
            raise SettingsError(
                f"server.{name} = {getattr(server, name)!r} is about one model, but there are several; leave it out, "
                "and name each by its table, [models.NAME], and its aliases."
            )
    common = given(context, MODELS)
    if len(words) > 1 and context.sources["model.path"].startswith("--"):
        raise SettingsError(
            f"--model.path = {context.settings.model.path!r} is given besides {len(words)} models; leave one out."
        )
    for word in words:
        if words.count(word) > 1:
            raise SettingsError(f"The model {word!r} is given {words.count(word)} times; leave out all but one.")
    if words:
        chosen = {word: tables[word] for word in words if word in tables}
        for word in words:
            if word not in tables:
                chosen[_named(word, chosen)] = {"model": {"path": word}}
        tables = chosen
    router = cast(RouterSettings, plugin_settings(context.settings, "routes", "router"))
    key = INGRESS + secrets.token_hex(32)
    names: dict[str, str] = {}
    engines: dict[str, Mapping[str, Any]] = {}
    keeps: dict[str, float] = {}
    pinned, adapted = set[str](), set[str]()
    folders = [(path, at) for path in _folders(type(context.settings)) if (at := _at(common, path)) is not None]
    for name, table in tables.items():
        own = _own(name, table)
        merged = _merged(common, {key: value for key, value in table.items() if key not in ModelTable.model_fields})
        for path, at in folders:
            if _at(table, path) is None:
                value: Any = str(Path(at) / f"model-{quote(name, safe='')}")
                merged = _merged(merged, functools.reduce(lambda value, key: {key: value}, reversed(path), value))
        adapters = _checked(name, merged, context).adapters
        for each in (name, *own.aliases, *adapters.paths):
            if each in names:
                raise SettingsError(f"{MODELS}.{name}: the name {each!r} is that of {names[each]!r} already.")
            names[each] = name
        if adapters.slots:
            adapted.add(name)
        settings = behind(merged, server, key)
        settings["server"] |= {"served_model_name": name, "aliases": list(own.aliases)}
        engines[name] = settings
        keep = router.keep_alive_s if own.keep_alive_s is None else own.keep_alive_s
        keeps[name] = math.inf if keep < 0 else keep
        if own.pinned:
            pinned.add(name)
    console = getattr(plugin_settings(context.settings, "routes", "console"), "enabled", False)
    return Plan(engines, keeps, frozenset(pinned), names, key, router, frozenset(adapted), console)


def _own(name: str, table: Mapping[str, Any]) -> ModelTable:
    where = f"{MODELS}.{name}"
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"{MODELS}.{name[:80]!r} is no name of a model: it has spaces, quotes, * or a leading colon."
        )
    for key in OURS:
        if isinstance(table.get("server"), Mapping) and key in table["server"]:
            raise SettingsError(f"{where}.server.{key} cannot differ by model: there is one address; set server.{key}.")
    for key in THEIRS:
        if isinstance(table.get("server"), Mapping) and key in table["server"]:
            raise SettingsError(f"{where}.server.{key} is not needed: the table's name and {where}.aliases say it.")
    try:
        return ModelTable(**{key: value for key, value in table.items() if key in ModelTable.model_fields})
    except ValidationError as error:
        fault = first_fault(error)
        raise SettingsError(f"{where}.{'.'.join(map(str, fault.path))} = {fault.value!r}: {fault.text}.") from None


def _checked(name: str, merged: Mapping[str, Any], context: CommandContext) -> Settings:
    """The settings of a model's process. Raises SettingsError."""
    try:
        settings = load_settings(context.plugins, env={}, overrides=merged, read_file=False).settings
    except SettingsError as error:
        raise SettingsError(f"{MODELS}.{name}: {error}") from None
    if settings.model.path is None:
        raise SettingsError(f"{MODELS}.{name}.model.path is not set: give a folder, file, hub id or bundled name.")
    return settings


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(common)
    for key, value in own.items():
        there = merged.get(key)
        both = isinstance(there, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(there, value) if both else value  # type: ignore[arg-type]
    return merged


def _folders(model: type[BaseModel], *path: str) -> Iterator[tuple[str, ...]]:
    """Where the settings have folders that one process at a time may use."""
    for name, field in model.model_fields.items():
        default, extra = field.get_default(call_default_factory=True), field.json_schema_extra
        if isinstance(default, BaseModel):
            yield from _folders(type(default), *path, name)
        elif isinstance(extra, dict) and ONE_PROCESS.items() <= extra.items():
            yield (*path, name)


def _at(tables: Any, path: Sequence[str]) -> Any:
    """The value at a path of tables; None if there is none."""
    return functools.reduce(lambda at, key: at.get(key) if isinstance(at, Mapping) else None, path, tables)


def _named(word: str, taken: Mapping[str, Any]) -> str:
    """The name of a model that is given by its path: the last part of a path, a hub id as it is."""
    path = Path(word).expanduser()
    name = path.resolve().name.removesuffix(".gguf") if path.exists() else word.rstrip("/")
    if name in taken:
        raise SettingsError(
            f"{word!r} would be called {name!r}, as another is; give each a name by a table [models.NAME]."
        )
    return name


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return [_plain(each) for each in value] if isinstance(value, list) else value
