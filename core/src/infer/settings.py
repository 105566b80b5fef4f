"""Settings: the command line overrides the environment, which overrides the file, which overrides defaults. Each value
keeps its source.

The sections below are core's. A plugin's own table, such as ``[cache.paged]``, is validated by the plugin's own model.
The whole schema is composed from what is installed, so that unknown keys are found and the JSON schema is complete.
Rules between keys are validators of the models, so they hold however a model is built.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, get_args

from pydantic import (
    BaseModel,
    Field,
    SecretBytes,
    SecretStr,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from infer.contracts.registration import NoSettings, Registration
from infer.contracts.sections import ModelTable, Settings
from infer.errors import SettingsError, first_fault, installing, one_line
from infer.plugins.extension_points import EXTENSION_POINTS

SECRETS = (SecretStr, SecretBytes)
DEFAULT_FILE = "settings.toml"
MODELS = "models"
"""The section with a table for each of several models."""
ENV_PREFIX = "INFER_"
ENV_FILE = "INFER_SETTINGS"
SERVICE_LINK = re.compile(
    r"INFER_(\w+_)?"
    r"((SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)=.*|PORT=(tcp|udp|sctp)://.*)"
)
"""``NAME=value`` as Kubernetes sets it in every pod of a namespace with a Service ``infer`` or ``infer-...``."""


class Offered(Protocol):
    """What settings need of a plugin's offer."""

    @property
    def name(self) -> str: ...
    @property
    def registration(self) -> Registration[Any]: ...
    @property
    def chunks(self) -> bool: ...


class Installed(Protocol):
    """What settings need of the installed plugins; ``infer.plugins.discovery.Plugins`` has it."""

    @property
    def offers(self) -> Mapping[str, Sequence[Offered]]: ...
    @property
    def environment(self) -> frozenset[str]: ...
    def culprits(self) -> str: ...


class TracedSource(PydanticBaseSettingsSource):
    """One source of settings: values by dotted key, each with its origin as messages name it."""

    def __init__(self, settings_cls: type[Settings], entries: Iterable[tuple[str, Any, str]]) -> None:
        super().__init__(settings_cls)
        self.entries = {key: (value, origin) for key, value, origin in entries}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return _nest(self.entries)


@dataclass(frozen=True)
class Loaded:
    settings: Settings
    sources: Mapping[str, str]
    """Where each key's value came from, by dotted key."""


def schema(plugins: Installed) -> type[Settings]:
    """The model of the settings, with a table for every installed plugin that has settings."""
    tables = (
        _Table(about.section, offer.name, offer.registration.settings, offer.registration.description)
        for point, about in EXTENSION_POINTS.items()
        for offer in plugins.offers[point]
        if offer.registration.settings.model_fields
    )
    return _schema(tuple(tables), frozenset(offer.name for offer in plugins.offers["scheduler"] if not offer.chunks))


class _Table(NamedTuple):
    """A plugin's table in a section of the settings, or if that is None, beside the sections."""

    section: str | None
    name: str
    model: type[BaseModel]
    description: str


@functools.lru_cache(maxsize=16)
def _schema(plugins: tuple[_Table, ...], whole_prompts: frozenset[str]) -> type[Settings]:
    """``schema`` with these tables and schedulers that do not prefill in chunks. A command asks several times."""
    sections: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        base: Any = field.annotation
        if name == MODELS:
            continue
        tables: dict[str, Any] = {
            table.name: (table.model, Field(default_factory=table.model, description=table.description))
            for table in plugins
            if table.section == name
        }
        section = cast(Any, create_model(base.__name__, __base__=base, **tables))
        if name == "engine":
            section.whole_prompts = base.whole_prompts | whole_prompts
        sections[name] = (section, section())
    sections |= {table.name: (table.model, table.model()) for table in plugins if table.section is None}
    return create_model("Settings", __base__=Settings, **sections)


def compose(settings: Settings, plugins: Installed) -> Settings:
    """Check settings that were built without knowledge of the installed plugins against them. Raises SettingsError."""
    if type(settings) is not Settings:
        return settings
    return _build(schema(plugins), settings.model_dump(exclude_unset=True), {}, plugins)


def plugin_settings(settings: Settings, point: str, name: str) -> BaseModel:
    """The plugin's own table, validated; NoSettings if it has none."""
    section = EXTENSION_POINTS[point].section
    table = getattr(settings if section is None else getattr(settings, section), name, None)
    return table if isinstance(table, BaseModel) else NoSettings()


def load_settings(
    plugins: Installed,
    *,
    file: str | None = None,
    argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    read_file: bool = True,
) -> Loaded:
    """Merge all sources and validate. ``overrides``, nested and from Python, takes precedence over all others.

    The settings file is ``file``, or INFER_SETTINGS, or ./settings.toml if it exists. Raises SettingsError.
    """
    env = os.environ if env is None else env
    model = schema(plugins)
    model.sources = (
        TracedSource(model, ((key, _value(value), "argument") for key, value in _leaves(overrides or {}))),
        TracedSource(model, arguments(argv)),
        TracedSource(model, _variables(env, plugins.environment)),
        TracedSource(model, _file(file or env.get(ENV_FILE), "--settings" if file else ENV_FILE) if read_file else ()),
    )
    entries = _merged(model)
    tables = _tables(key for key, _, _ in describe_schema(model))
    for key, (value, origin) in entries.items():
        if key in tables:
            raise SettingsError(
                f"{key} = {value!r} (from {origin}): {key} is a table of settings, such as {tables[key]}."
            )
    _nest(entries)  # raises if one source has a table where another has a value
    settings = _build(model, {}, {key: origin for key, (_, origin) in entries.items()}, plugins)
    return Loaded(settings, origins(settings))


def origins(settings: Settings) -> dict[str, str]:
    """Where the value of each dotted key came from."""
    found = {key: origin for key, (_, origin) in _merged(type(settings)).items()}
    mode = settings.engine.batching_mode
    defaults = {"engine.use_chunked_prefill": f"default for {mode}"} if mode in settings.engine.whole_prompts else {}
    return {key: _origin(key, found) or defaults.get(key, "default") for key, _ in describe(settings)}


def _merged(model: type[Settings]) -> dict[str, tuple[Any, str]]:
    """What the sources say together: values and their origins by dotted key."""
    sources = (source for source in reversed(model.sources) if isinstance(source, TracedSource))
    return {key: value for source in sources for key, value in source.entries.items()}


def _build(model: type[Settings], values: dict[str, Any], origins: Mapping[str, str], plugins: Installed) -> Settings:
    try:
        return model(**values)
    except ValidationError as error:
        raise _explain(error, model, origins, plugins) from None
    except (Exception, SystemExit) as error:  # raised by a plugin's own validators
        raise SettingsError(f"The settings cannot be checked: {one_line(error)}.") from error


def describe(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, to be shown: of an address, not what logs in there."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from describe(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" == MODELS:
            yield from _models(type(settings), value)
        else:
            yield f"{prefix}{name}", _shown(value)


def _models(model: type[BaseModel], tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The keys of ``[models.NAME]``, whose types are those of the sections that they override. What is none of them
    is not shown, for it may be a secret under a name that is misspelled."""
    known = {key for key, _, _ in describe_schema(model)}
    for name, table in tables.items():
        for key, value in _leaves(table):
            hidden = key not in ModelTable.model_fields and (key not in known or _secret(model, key.split(".")))
            yield f"{MODELS}.{_quoted(name)}.{key}", "**********" if hidden else _shown(value)


def _shown(value: Any) -> Any:
    """The value with asterisks in place of user and password in every URL."""
    if isinstance(value, str):
        return re.sub(r"(?<=://)[^/?#\s]*@", "**********@", value)
    if isinstance(value, (list, tuple)):
        return [*map(_shown, value)]
    return {key: _shown(each) for key, each in value.items()} if isinstance(value, dict) else value


def describe_schema(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every dotted key with its description and default."""
    for name, field in model.model_fields.items():
        if f"{prefix}{name}" == MODELS:  # whose keys are those of the sections
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from describe_schema(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or "", default


def _tables(keys: Iterable[str]) -> dict[str, str]:
    """The tables that dotted keys are in, each with the first of its keys."""
    found: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        for n in range(1, len(parts)):
            found.setdefault(".".join(parts[:n]), key)
    return found


def meant(key: str, known: Sequence[str]) -> str:
    """Which of the dotted keys ``known`` may be meant by an unknown one; empty if none is like it."""
    lasts = {name.rpartition(".")[2]: name for name in reversed(known)}
    whole = difflib.get_close_matches(key, known, n=1)
    last = [lasts[name] for name in difflib.get_close_matches(key.rpartition(".")[2], lasts, n=1)]
    return next(iter(whole + last if "." in key else last + whole), "")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the settings, ``--a.b value`` and ``--a.b=value``, wherever they stand before a ``--``. Returns
    (settings, the rest)."""
    settings, rest, words = [], [], list(argv)
    while words and words[0] != "--":
        word = words.pop(0)
        key, equals, _ = word.partition("=")
        if word.startswith("--") and "." in key:
            settings += [word] if equals else [word, *words[:1]]
            words = words if equals else words[1:]
        else:
            rest.append(word)
    return settings, rest + words


def _file(named: str | None, origin: str) -> Iterator[tuple[str, Any, str]]:
    path = Path(named or DEFAULT_FILE)
    try:
        if not path.exists():
            if named:
                raise SettingsError(f"The settings file {named} (from {origin}) does not exist.")
            return
        if not path.is_file():
            raise SettingsError(f"The settings file {path} is no file.")
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin with a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from None
    for key, value in _leaves(content):
        yield key, _value(value), str(path)


def _variables(env: Mapping[str, str], foreign: frozenset[str]) -> Iterator[tuple[str, Any, str]]:
    """The settings among the variables: ``INFER_A__B=value``. Plugins read ``foreign`` ones themselves, and Kubernetes
    sets some that are not settings. An empty one is no setting: a unit or a container may have found no value for it,
    which must not take away a file's keys, for example."""
    for variable, text in env.items():
        if not text or not variable.startswith(ENV_PREFIX) or variable == ENV_FILE or variable in foreign:
            continue
        if "__" in variable or not SERVICE_LINK.fullmatch(f"{variable}={text}"):
            yield variable.removeprefix(ENV_PREFIX).lower().replace("__", "."), _none(text), variable


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and (value or prefix != f"{MODELS}."):
            yield from _leaves(value, f"{prefix}{_quoted(name)}.")
        else:
            yield f"{prefix}{_quoted(name)}", value


def _quoted(name: str) -> str:
    """A part of a dotted key, in quotes if it has dots itself, as TOML has it: models have such names."""
    return f'"{name}"' if "." in name else name


def parts(key: str) -> list[str]:
    """The parts of a dotted key, of which some may be in quotes."""
    return [part.strip('"') for part in re.findall(r'"[^"]*"|[^."]+', key)]


def _nest(entries: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, origin) in entries.items():
        *tables, name = parts(key)
        at = nested
        for table in tables:
            at = at.setdefault(table, {})
            if not isinstance(at, dict):
                raise SettingsError(f"{key} (from {origin}): {table!r} is a value, not a table.")
        at[name] = value
    return nested


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Where a key's value, a part of it, or what it is a part of came from; empty if no source has it."""
    related = (o for k, o in origins.items() if k.startswith(f"{key}.") or key.startswith(f"{k}."))
    return origins.get(key) or next(related, "")


def arguments(argv: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Parse ``--a.b value`` and ``--a.b=value``. Raises SettingsError."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word.partition("=")[0]:
            shown = word.partition("=")[0]
            raise SettingsError(f"{shown!r} is not understood; settings are given as --section.key value.")
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not rest:
                raise SettingsError(f"--{key} needs a value: --{key} value.")
            value = rest.pop(0)
        if not key.startswith(f"{MODELS}."):  # what follows is a name
            key = key.replace("-", "_")
        yield key, _none(value), f"--{key}"


def _value(value: Any) -> Any:
    """The value of a setting from a file or a program. TOML has no null, so "none" means it there, as on the command
    line, and in a program as well, since people move settings from one to the other."""
    return _none(value) if isinstance(value, str) else value


def _none(text: str) -> str | None:
    return None if text.lower() in ("none", "null", "") else text


def _secret(kind: Any, path: Sequence[str]) -> bool:
    """Whether what lies at ``path`` in a value of this type, or a part of that, is nothing that a message may show."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields
        met = [fields[path[0]]] if path and path[0] in fields else fields.values()
        return any(_secret(field.annotation, path[1:]) for field in met)
    return kind in SECRETS or any(_secret(part, path) for part in get_args(kind))


def _explain(
    error: ValidationError, model: type[Settings], origins: Mapping[str, str], plugins: Installed
) -> SettingsError:
    fault = first_fault(error)
    if fault.kind == "rule":
        text, of = fault.context["text"], fault.context["of"]
        source = _origin(of.partition(" ")[0], origins)
        return SettingsError(text.replace(of, f"{of} (from {source})", 1) if of and source else text)
    path = [str(part) for part in fault.path]
    key = ".".join(path)
    source = _origin(key, origins)
    origin = f" (from {source})" if source else ""
    if fault.kind != "extra_forbidden":
        value = "" if _secret(model, path) else f" = {fault.value!r}"
        return SettingsError(f"{key}{value}{origin}: {fault.text}.")
    known = [name for name, _, _ in describe_schema(model)]
    for point, about in EXTENSION_POINTS.items():
        for offer in plugins.offers[point]:
            table = f"{about.section}.{offer.name}" if about.section else offer.name
            if table in Settings.model_fields:  # a command may be called as a section is; it has no table
                continue
            if key == table:
                return SettingsError(f"{key}{origin}: the plugin {offer.name!r} has no settings; leave it out.")
            if key.startswith(f"{table}."):
                own = [name.removeprefix(f"{table}.") for name in known if name.startswith(f"{table}.")]
                close = meant(key.removeprefix(f"{table}."), own)
                hint = f"did you mean {close}?" if close else f"it has {', '.join(own)}."
                return SettingsError(f"{key}{origin} is not a setting of {offer.name}; {hint}")
    packages = {
        name: at
        for point in EXTENSION_POINTS.values()
        if point.section == path[0]
        for name, at in point.packages.items()
    }
    owner = path[1] if len(path) > 1 and path[1] in packages else path[0]
    packages |= {
        name: at for point in EXTENSION_POINTS.values() if point.section is None for name, at in point.packages.items()
    }
    if package := packages.get(owner):
        return SettingsError(
            f"{key}{origin}: the plugin {owner!r} is not installed: {installing(package)}.{plugins.culprits()}"
        )
    if source.startswith(ENV_PREFIX):
        whole = next(k for k, o in origins.items() if o == source)
        close = meant(whole, known).replace(".", "__").upper()
        hint = f" Did you mean {ENV_PREFIX}{close}?" if close else ""
    else:
        tables = [table for table in sorted(_tables(known)) if not key.startswith(f"{table}.")]
        close = meant(key, [*known, *tables])
        hint = f" Did you mean {close!r}?" if close else ""
    hint = hint or " `infer settings` lists all."
    return SettingsError(f"{key}{origin} is not a setting.{hint}{plugins.culprits()}")
