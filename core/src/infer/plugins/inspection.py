"""Checks what a plugin brings before anything relies on it: its hooks, its registrations and what its factories make.

Whatever is wrong with a plugin raises a PluginError whose text continues "The plugin of NAME is broken: ".
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args, get_type_hints

from pydantic import BaseModel, create_model
from typing_extensions import get_protocol_members

from infer.contracts import hooks as hookspecs
from infer.contracts.registration import PLUGIN_API, Registration
from infer.contracts.sections import Section, Settings
from infer.contracts.text import PartProtocol, Piece
from infer.errors import InferError, PluginError, one_line
from infer.plugins.extension_points import EXTENSION_POINTS
from infer.settings import ENV_FILE, ENV_PREFIX, describe

RECORDS = ("infer_step_finished", "infer_request_finished")
"""The hooks that the engine calls with records of its steps and requests."""
SPECS = {name: spec for name, spec in vars(hookspecs).items() if name.startswith("infer_")}
NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
PIECES = get_args(get_type_hints(Piece)["kind"])
RESERVED = ("auto", "none", "null")

Hook = tuple[str, str, Callable[..., Any]]
"""(attribute of the plugin, hook that it implements, function)"""


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn whatever a plugin's code raises, including ``sys.exit``, into a PluginError that begins with ``what``."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{what}: {one_line(error)}.") from error


def check_api(plugin: object) -> None:
    """Raises PluginError if the plugin was not written for this version of the contracts."""
    with blame("its INFER_PLUGIN_API cannot be read"):
        written_for = getattr(plugin, "INFER_PLUGIN_API", None)
    if written_for is None:
        raise PluginError(
            f"it states no INFER_PLUGIN_API: write INFER_PLUGIN_API = {PLUGIN_API}, which this infer-core speaks, into "
            "its module, or install a release that has it."
        )
    if type(written_for) is not int:
        raise PluginError(
            f"its INFER_PLUGIN_API is {_show(written_for)}, not a number; write INFER_PLUGIN_API = {PLUGIN_API}."
        )
    if written_for != PLUGIN_API:
        raise PluginError(
            f"it was made for API {written_for}, but this infer-core speaks {PLUGIN_API}; install a release for it."
        )


def environment(plugin: object) -> frozenset[str]:
    """The INFER_* variables that a plugin reads itself, as its INFER_PLUGIN_ENV lists them. Raises PluginError."""
    with blame("its INFER_PLUGIN_ENV cannot be read"):
        names = getattr(plugin, "INFER_PLUGIN_ENV", ())
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise PluginError(f"its INFER_PLUGIN_ENV is {_show(names)}, not a list of names.")
    for name in names:
        if not isinstance(name, str) or not name.startswith(ENV_PREFIX) or "__" in name or name == ENV_FILE:
            raise PluginError(
                f"its INFER_PLUGIN_ENV has {_show(name)}; a variable of its own begins with {ENV_PREFIX}, is not "
                f"{ENV_FILE} and has no double underscore, by which settings are told."
            )
    return frozenset(names)


def hooks(plugin: object) -> list[Hook]:
    """The hooks that a plugin implements, whatever the names of its functions. Raises PluginError."""
    with blame("its attributes cannot be listed"):
        attributes = [str(name) for name in dir(plugin)]
    found = []
    for attribute in attributes:
        ours = attribute.startswith("infer_")
        try:
            function = getattr(plugin, attribute)
            marks = getattr(function, "infer_impl", None)
        except Exception as error:
            if ours:
                raise PluginError(f"its {attribute} cannot be read: {one_line(error)}.") from error
            continue
        if isinstance(function, ModuleType) or function is SPECS.get(attribute):
            continue  # a module may be called infer_models, and ``from hooks import *`` brings in the hookspecs
        if isinstance(marks, dict):
            hook = marks.get("specname") or attribute
            if hook not in SPECS and marks.get("optionalhook"):
                continue
            check_function(attribute, hook, function, marks)
            found.append((attribute, hook, function))
        elif attribute in SPECS or (ours and _own_function(function, plugin)):
            raise PluginError(
                f"its {attribute} is not marked as a hook: put @hookimpl (from infer) above it; names that begin with "
                "infer_ are for hooks."
            )
    if not found:
        raise PluginError(f"it implements no hook; the hooks are {', '.join(SPECS)}, marked with @hookimpl.")
    return found


def _own_function(function: object, plugin: object) -> bool:
    """Whether it is a function that the plugin defines, rather than one that it imports."""
    if not inspect.isroutine(function):
        return False
    return not isinstance(plugin, ModuleType) or getattr(function, "__module__", None) == plugin.__name__


def check_function(attribute: str, hook: str, function: Callable[..., Any], marks: Mapping[str, Any]) -> None:
    """Raises PluginError if the function cannot be called as the hook is called."""
    if hook not in SPECS:
        close = difflib.get_close_matches(hook, SPECS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; the hooks are {', '.join(SPECS)}."
        raise PluginError(f"it implements the hook {hook!r}, which does not exist{hint}")
    if not inspect.isroutine(function):
        raise PluginError(f"its {attribute} is marked as a hook, but is {_show(function)}, not a function.")
    if marks.get("wrapper") or marks.get("hookwrapper"):
        raise PluginError(f"its {attribute} wraps other plugins' hooks, which infer does not support.")
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise PluginError(f"its {attribute} is async or a generator; hooks are plain functions that return.")
    wanted = list(inspect.signature(SPECS[hook]).parameters)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # native code does not always have a signature
        return
    empty, positional = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [p.name for p in signature.parameters.values() if p.kind is positional and p.default is empty]
    try:
        signature.bind(*wanted)
        fits = set(needed) <= set(wanted)
    except TypeError:
        fits = False
    if not fits:
        takes = f"takes {', '.join(signature.parameters)}" if signature.parameters else "takes nothing"
        raise PluginError(f"its {attribute} {takes}, but is called as {hook}({', '.join(wanted)}).")


def registrations(point: str, hook: str, returned: object) -> list[Registration[Any]]:
    """The registrations that a hook returned, each checked to be valid for its extension point. Raises PluginError."""
    kind = EXTENSION_POINTS[point].registration
    if not isinstance(returned, (list, tuple)):
        raise PluginError(f"its {hook}() returned {_show(returned)}, not a list of {kind.__name__}s.")
    with blame(f"what its {hook}() returned cannot be read"):
        items = list(returned)
    found = [_registration(point, f"its {hook}()", kind, item) for item in items]
    names = [registration.name for registration in found]
    for name in names:
        if names.count(name) > 1:
            raise PluginError(f"its {hook}() offers the name {name!r} twice.")
    return found


def _registration(point: str, at: str, kind: type[Registration[Any]], value: object) -> Registration[Any]:
    """The checked registration, copied to core's own class so that the plugin cannot change it afterward."""
    if not isinstance(value, Registration) or (EXTENSION_POINTS[point].bound and not isinstance(value, kind)):
        raise PluginError(f"{at} lists {_show(value)}, not a {kind.__name__}.")
    with blame(f"a registration of {at} cannot be read"):
        given = {f.name: getattr(value, f.name) for f in fields(kind) if hasattr(value, f.name)}
    name = given["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
        raise PluginError(
            f"{at} offers the name {_show(name)}; a name has lower-case letters, digits and single underscores "
            f"between them, and is not {', '.join(RESERVED[:-1])} or {RESERVED[-1]}."
        )
    at = f"{at} offers {name!r}, but its"
    if not callable(given["factory"]):
        raise PluginError(f"{at} factory is {_show(given['factory'])}, which cannot be called.")
    for field in ["description", "about"]:
        text = given.get(field, "")
        if not isinstance(text, str) or not text.isprintable():
            raise PluginError(f"{at} {field} is {_show(text)}, not one line of text.")
    if type(given["priority"]) is not int:
        raise PluginError(f"{at} priority is {_show(given['priority'])}, not a whole number.")
    why = given["unavailable"]
    if why is not None and not (isinstance(why, str) and why and why.isprintable()):
        raise PluginError(f"{at} unavailable is {_show(why)}, neither None nor one line that says why.")
    for field in {"architectures", "devices", "kv_dtypes", "files", "methods", "marks", "suffixes"} & given.keys():
        several = given[field]
        if not isinstance(several, (list, tuple)) or not all(isinstance(one, str) for one in several):
            raise PluginError(f"{at} {field} is {_show(several)}, not a tuple of strings.")
        given[field] = tuple(several)
    for field in {"chunks", "draft_head"} & given.keys():
        if type(given[field]) is not bool:
            raise PluginError(f"{at} {field} is {_show(given[field])}, neither True nor False.")
    for field in {"longest", "head_path"} & given.keys():
        if given[field] is not None and not callable(given[field]):
            raise PluginError(f"{at} {field} is {_show(given[field])}, which cannot be called.")
    if "add_arguments" in given:
        _try_arguments(given["add_arguments"], at)
    given["settings"] = _settings(given["settings"], at)
    if given["settings"].model_fields and _taken(EXTENSION_POINTS[point].section, name):
        raise PluginError(f"{at} settings cannot be a table of that name, which is infer's own; rename it.")
    return kind(**given)


def _try_arguments(add: object, at: str) -> None:
    """Raises PluginError if a command's ``add_arguments`` does not work on a parser."""
    if add is None:
        return
    if not callable(add):
        raise PluginError(f"{at} add_arguments is {_show(add)}, which cannot be called.")
    with blame(f"{at} add_arguments failed"):
        _help(add)


@functools.cache
def _help(add: Callable[[argparse.ArgumentParser], object]) -> str:
    """A command's help. Raises what its ``add_arguments`` raises, or what argparse does with what it added."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings")
    add(parser)
    return parser.format_help()


def _taken(section: str | None, name: str) -> bool:
    """Whether a section of the settings, or if None the settings themselves, already use that name."""
    model: Any = Settings if section is None else Settings.model_fields[section].annotation
    return name in model.model_fields or hasattr(Settings if section is None else Section, name)


def _settings(model: object, at: str) -> type[BaseModel]:
    """The model of a plugin's own table, with unknown keys forbidden. It is checked here because every command
    validates and describes it."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(f"{at} settings is {_show(model)}, not a class that extends pydantic's BaseModel.")
    with blame(f"{at} settings have no value without the user's"):
        model()
    with blame(f"{at} settings cannot be described"):
        return _described(model)


@functools.cache
def _described(model: type[BaseModel]) -> type[BaseModel]:
    """The model with unknown keys forbidden. Raises what describing it raises."""
    strict = _strict(model)
    strict.model_json_schema()
    json.dumps(dict(describe(strict())), default=str)
    return strict


def _strict(model: type[BaseModel]) -> type[BaseModel]:
    nested = {
        name: (strict, field)
        for name, field in model.model_fields.items()
        if isinstance(inner := field.annotation, type)
        and issubclass(inner, BaseModel)
        and (strict := _strict(inner)) is not inner
    }
    if model.model_config.get("extra") == "forbid" and not nested:
        return model
    strict = cast("type[BaseModel]", type(model.__name__, (model,), {"model_config": {"extra": "forbid"}}))
    return create_model(model.__name__, __base__=strict, **cast(Any, nested))


def checkpoints(returned: object) -> dict[str, Path]:
    """What ``infer_checkpoints`` returned, checked. Raises PluginError."""
    if not isinstance(returned, Mapping):
        raise PluginError(f"its infer_checkpoints() returned {_show(returned)}, not names with their folders.")
    with blame("what its infer_checkpoints() returned cannot be read"):
        items = list(returned.items())
    for name, folder in items:
        if not isinstance(name, str) or not name or not isinstance(folder, (str, os.PathLike)):
            raise PluginError(
                f"its infer_checkpoints() has {_show(name)}: {_show(folder)}, where a name and a folder are wanted."
            )
    with blame("a folder of its infer_checkpoints() cannot be read"):
        return {name: Path(folder) for name, folder in items}


class Named:
    """Like ``blame``, for the code of a chosen plugin. Errors of infer's own, such as a SettingsError, and a lack of
    memory pass unchanged, because they say themselves what is wrong. It can be used again and again, at a quarter of
    what a generator's context costs."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, InferError) or short_of_memory(error):
            return
        raise PluginError(f"{self._what}: {one_line(error)}.") from error


def make(whose: str, contract: type, factory: Callable[..., Any], *given: Any) -> Any:
    """Call a factory and check that the result has all members of the contract. Raises PluginError."""
    with Named(f"{whose} cannot be made"):
        made = factory(*given)
    if made is None:
        raise PluginError(f"{whose} cannot be made: its factory returned None.")
    if isinstance(made, type):
        raise PluginError(
            f"{whose} cannot be made: its factory returned the class {made.__name__}, not an object of it."
        )
    lacking = sorted(name for name in get_protocol_members(contract) if not _has(made, name, contract))
    if lacking:
        raise PluginError(
            f"{whose} cannot be used: its factory made one of type {type(made).__name__}, which lacks "
            f"{', '.join(lacking)} of {contract.__name__}."
        )
    for name in sorted(get_protocol_members(contract)):
        promised = getattr(contract, name, None)
        if inspect.isfunction(promised) and (fault := _misfit(getattr(made, name), promised)):
            raise PluginError(f"{whose} cannot be used: its {type(made).__name__}.{name}{fault}.")
    return made


class CheckedPart:
    """A plugin's part that reads an answer. A fault in it raises an error that names the plugin and fails this answer
    only."""

    def __init__(self, part: PartProtocol, whose: str) -> None:
        self._part = part
        self._what = f"{whose} cannot read an answer"
        self._called = False

    def push(self, text: str) -> Iterator[Piece]:
        yield from self._checked(lambda: self._part.push(text))

    def flush(self) -> Iterator[Piece]:
        yield from self._checked(self._part.flush)

    def _checked(self, pieces: Callable[[], Iterator[Piece]]) -> Iterator[Piece]:
        with Named(self._what):
            for piece in pieces():
                if not isinstance(piece, Piece) or piece.kind not in PIECES or type(piece.text) is not str:
                    raise TypeError(f"it gave {_show(piece)}, not a Piece of a known kind with a text")
                self._called |= piece.kind == "call"
                if piece.kind == "arguments" and not self._called:
                    raise ValueError("it gave arguments before a call")
                yield piece


def short_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, which torch reports with a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, OSError))
        and any(words in str(error) for words in ("out of memory", "allocate memory"))
    )


def _has(made: object, name: str, contract: type) -> bool:
    try:
        value = getattr(made, name)
    except Exception:  # a property may raise anything, and then the member is missing
        return False
    return callable(value) or not callable(getattr(contract, name, None))


def _misfit(function: Callable[..., object], promised: Callable[..., object]) -> str:
    """Why a method cannot be called as the contract's is; empty if it can, or if it does not tell its parameters."""
    try:
        own = inspect.signature(function)
    except Exception:  # functions in C may have none, and foreign objects may raise anything
        return ""
    wanted = [*inspect.signature(promised).parameters.values()][1:]
    try:
        _bind(own, [each for each in wanted if each.default is each.empty])
        with suppress(TypeError):  # callers may name what has a default, or not
            _bind(own, wanted, named=True)
            return ""
        _bind(own, wanted)
    except TypeError as error:
        return f"{own} cannot take ({', '.join(each.name for each in wanted)}): {error}"
    return ""


def _bind(own: inspect.Signature, given: Sequence[inspect.Parameter], named: bool = False) -> None:
    """Raise TypeError if a function cannot be called with these parameters of the contract's."""
    names = [
        each.name for each in given if each.kind is each.KEYWORD_ONLY or (named and each.default is not each.empty)
    ]
    own.bind(*range(len(given) - len(names)), **dict.fromkeys(names))


def _show(value: object) -> str:
    """A foreign value as a sentence shows it."""
    if inspect.isroutine(value) or isinstance(value, (type, ModuleType)):
        return f"the {type(value).__name__} {getattr(value, '__name__', '')}".rstrip()
    if type(value) in (type(None), bool, int, float, str, bytes):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"
