"""From a request's body to its schema, and from what pydantic finds wrong to one sentence for the client."""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import from_json, to_json

from infer.errors import Fault, RequestError, capital, faults
from infer_server.http.body import Body, typed

MAX_VALUES = 50_000
"""How many values a body may hold, not counting integers in lists. This bounds the work of the endpoints."""
MAX_COMPLAINTS = 64
"""How many of pydantic's complaints are considered to choose the one that the client gets."""
MAX_VALUE = 80
"""How many characters of a wrong value an error shows."""
CLOSE = 0.82
"""How alike an unknown field's name and a known one have to be for the error to ask whether the latter was meant. The
names of two fields that exist, such as top_k and top_p, are less alike."""
WORDS = {True: "true", False: "false", None: "null"}
"""JSON's words for what Python calls otherwise."""

Unknown = Literal["refuse", "ignore"]
EXTRA: dict[Unknown, Literal["forbid", "ignore"] | None] = {"refuse": None, "ignore": "ignore"}
"""What pydantic calls it; None leaves it to the model."""
T = TypeVar("T", bound=Body)


def parse(body: bytes, model: type[T], unknown: Unknown = "refuse") -> T:
    """Parse and validate a body. A null means that the field is not given, except that ``max_tokens: null`` means no
    limit in completions. Fields that the model does not have are refused, or ignored. Raises a RequestError that names
    the first invalid field."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise RequestError("The body must be a JSON object.")
    _check_size(data)
    model = model.form(data)
    if b"null" in body:
        data = _given(data, (model,))
        body = to_json(data, inf_nan_mode="constants")
    parsed = checked(lambda: model.model_validate_json(body, strict=True, extra=EXTRA[unknown]), model, data)
    _ = parsed.ignored
    for name, field in parsed.DERIVED.items():
        try:
            getattr(parsed, name)
        except ValueError as error:
            raise RequestError(f"{field} cannot be taken: {error}.", param=field) from None
    return parsed


def _check_size(data: object) -> None:
    """Raise RequestError if the body holds more than ``MAX_VALUES`` values."""
    left = MAX_VALUES
    unseen = [data]
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list):
            parts = [part for part in value if type(part) is not int]
        else:
            continue
        left -= len(parts)
        if left < 0:
            raise RequestError(
                f"The body holds more than {MAX_VALUES} values besides token ids; send fewer, or several requests."
            )
        unseen += parts


R = TypeVar("R")
Arms = tuple[Any, ...]
"""The members of a union: a value may have any of these types."""


def checked(make: Callable[[], R], model: type[BaseModel], data: object = None) -> R:
    """Call ``make``, which validates a request's values, and turn its errors into a RequestError. ``data`` is the
    parsed body, if the values come straight from it."""
    try:
        return make()
    except ValidationError as error:
        raise _explain(error, model, data) from None
    except ValueError as error:
        raise _attributed(str(error), model) from None


def _arms(annotation: Any) -> Arms:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _arms(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(arm for each in typing.get_args(annotation) for arm in _arms(each))
    return (annotation,)


@functools.cache
def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _models(arms: Arms) -> list[type[BaseModel]]:
    return [arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)]


def _types(model: type[BaseModel]) -> Arms:
    field = _fields(model).get("type")
    return typing.get_args(field.annotation) if field is not None else ()


def _held(arms: Arms, *kinds: Any) -> list[Any]:
    """The item types of all containers of the given kinds among the arms; of a dict, the type of its values."""
    held = [typing.get_args(arm) for arm in arms if typing.get_origin(arm) in kinds]
    return [types[-1] if dict in kinds else types[0] for types in held if types]


def _under(arms: Arms, step: int | str) -> Arms:
    """The types that a field or item, ``step``, of a value of these types may have."""
    if isinstance(step, int):
        annotations = _held(arms, tuple, list)
    else:
        annotations = [_fields(model)[step].annotation for model in _models(arms) if step in _fields(model)]
        annotations += _held(arms, dict)
    return tuple(each for annotation in annotations for each in _arms(annotation))


def _given(value: Any, arms: Arms) -> Any:
    """The value without fields that are null. Only models' fields are dropped: a null in a JSON schema, for example,
    has a meaning."""
    if isinstance(value, list):
        inner = _under(arms, 0)
        return [_given(each, inner) for each in value] if inner else value
    if isinstance(value, dict):
        models = _models(arms)
        meant = [model for model in models if typed(value) in _types(model)] or models
        fields = {key: field for model in meant for key, field in _fields(model).items()}
        arms = (*meant, *(arm for arm in arms if arm not in models))
        return {
            key: _given(each, _under(arms, key))
            for key, each in value.items()
            if each is not None or not meant or _means_null(fields.get(key))
        }
    return value


def _means_null(field: FieldInfo | None) -> bool:
    return field is not None and field.default is not None and NoneType in _arms(field.annotation)


Path = tuple[int | str, ...]


def _paths(loc: Path, value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All paths in the data that a complaint's location may mean, with the value at each. A location contains steps
    into the data and names of union members that were tried; only the data can tell which is which."""
    if not loc:
        yield path, value
        return
    part, rest = loc[0], loc[1:]
    if isinstance(part, int):
        if isinstance(value, list) and part < len(value):
            yield from _paths(rest, value[part], (*path, part))
    else:
        if isinstance(value, dict) and part in value:
            yield from _paths(rest, value[part], (*path, part))
        yield from _paths(rest, value, path)


def _path(complaint: Fault, data: object) -> Path:
    """The path of the field that a complaint is about."""
    loc, missing = complaint.path, complaint.kind == "missing"
    if data is None:
        return loc[:1]
    candidates = list(_paths(loc[:-1] if missing else loc, data)) or [((), None)]
    path = next((path for path, value in candidates if value == complaint.value), candidates[0][0])
    if complaint.kind.startswith("union_tag") and isinstance(complaint.value, dict):
        return (*path, named if (named := complaint.context["discriminator"].strip("'")).isidentifier() else "type")
    return (*path, loc[-1]) if missing else path


def _shown(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = MAX_VALUE


def _explain(error: ValidationError, model: type[BaseModel], data: object) -> RequestError:
    complaints = faults(error)
    first, path = complaints[0], _path(complaints[0], data)
    if len(path) < len(first.path):
        # Of the union members that were tried, the client probably meant the one that matched furthest.
        tried = [(each, _path(each, data)) for each in complaints[:MAX_COMPLAINTS]]
        same = [(each, its) for each, its in tried if its[: len(path)] == path]
        first, path = max(same, key=lambda one: (len(one[1]), not one[0].kind.endswith("_type")))
    field = _shown(path) or None
    value = WORDS[first.value] if first.value is None or type(first.value) is bool else _brief.repr(first.value)
    value = value if len(value) <= MAX_VALUE else value[: MAX_VALUE - 3] + "..."
    what = first.text
    match first.kind:
        case "missing" | "union_tag_not_found":
            if isinstance(first.value, dict):
                return RequestError(f"The field {field!r} is missing.", param=field)
            what = "Input should be an object"
        case "extra_forbidden":
            arms: Arms = (model,)
            for step in path[:-1]:
                arms = _under(arms, step)
            known = [name for each in _models(arms) for name in _fields(each)]
            close = difflib.get_close_matches(str(path[-1]).lower()[:100], known, n=1, cutoff=CLOSE) if path else []
            hint = f" Did you mean {close[0]!r}?" if close else ""
            return RequestError(f"The field {field!r} is not known.{hint}", param=field)
        case "literal_error":
            allowed = re.sub("True|False", lambda found: found[0].lower(), what.removeprefix("Input should be "))
            return RequestError(f"{field} = {value} is not supported; {allowed} is.", param=field)
        case "none_required" | "too_long" if not first.context.get("max_length"):
            return RequestError(f"{field} = {value} is not supported; leave it out.", param=field)
        case "union_tag_invalid":
            context = first.context
            return RequestError(
                f"{field} = {_brief.repr(context['tag'])} is not supported; one of {context['expected_tags']} is.",
                param=field,
            )
    if path[:1] == ("prompt",):
        return RequestError("prompt must be a text or a list of token ids, or a list of these.", param="prompt")
    if field is None:
        return _attributed(what, model)
    return RequestError(f"{field} = {value}{_duty(what)}.", param=field)


def _duty(what: str) -> str:
    """What pydantic says of a value, as the rest of a sentence that begins with the value."""
    found = re.match(r"(?:Input|String|Array|Dictionary|Data) should (.*)", what, re.DOTALL)
    if found is None:
        return f": {what}"
    duty = re.sub(r", unable to parse .*", "", found[1])
    return f" must {duty.replace('a valid dictionary', 'an object')}"


def _attributed(what: str, model: type[BaseModel]) -> RequestError:
    """An error about several fields, attributed to the first field that its sentence names."""
    words = re.findall(r"\w+", what)
    named = next((word for word in words if word in model.model_fields), None)
    text = what if words[0] in model.model_fields else capital(what)
    return RequestError(f"{text}.", param=named)
