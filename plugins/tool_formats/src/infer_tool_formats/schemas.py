"""What the JSON schema of a function's arguments says of their types."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any
from urllib.parse import unquote

MOST = 256
"""Clients write schemas, large ones and such that refer to themselves. So no more than so many of those that apply to a
value are read, and no longer references."""
JOINED = ("allOf", "anyOf", "oneOf")
NAMES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}
IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""The types that keywords are about."""


class Schema:
    """The JSON schemas that apply to a value: ``given``, and those that they refer to or consist of. References lead
    into ``root``."""

    def __init__(self, root: Any, *given: Any) -> None:
        self._root = root
        found = list(islice(given, MOST))
        for schema in found:  # which grows meanwhile: those that are near come first
            if isinstance(schema, Mapping):
                more = chain(
                    [self._referenced(schema.get("$ref"))],
                    *(_listed(schema.get(key)) for key in JOINED),
                    ({"const": value} for value in _listed(schema.get("enum"))),
                )
                found += islice(more, MOST - len(found))
        self._found = [schema for schema in found if isinstance(schema, Mapping)]
        self._members: dict[str, Schema] = {}

    @functools.cached_property
    def types(self) -> frozenset[str]:
        """The names of the types that they allow; none if they do not say."""
        return frozenset(chain.from_iterable(map(_types, self._found)))

    @functools.cached_property
    def texts(self) -> frozenset[str]:
        """The strings that they name as values."""
        return frozenset(each["const"] for each in self._found if isinstance(each.get("const"), str))

    def member(self, key: str) -> Schema:
        """What applies to a member of an object, or to each ``item`` of a list."""
        if key not in self._members:
            self._members[key] = Schema(self._root, *chain.from_iterable(_members(each, key) for each in self._found))
        return self._members[key]

    def _referenced(self, reference: Any) -> Any:
        """What a reference leads to; None if that is nothing in ``root``."""
        if not isinstance(reference, str) or len(reference) > MOST or not f"{reference}/".startswith("#/"):
            return None
        found = self._root
        for step in unquote(reference).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, Sequence) else found[step]
            except (LookupError, TypeError, ValueError):
                return None
        return found


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    named = schema.get("type")
    if named is not None:
        yield from (name for name in islice(_listed(named, named), len(NAMES)) if isinstance(name, str))
    elif "const" in schema:
        yield from (name for kind, name in NAMES.items() if type(schema["const"]) is kind)
    else:
        yield from (name for keyword, name in IMPLIED.items() if keyword in schema)


def _members(schema: Mapping[str, Any], key: str) -> Iterator[Any]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        yield properties[key]
    else:
        yield schema.get("additionalProperties")
    if key == "item":
        yield schema.get("items")


def _listed(value: Any, *otherwise: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else otherwise
