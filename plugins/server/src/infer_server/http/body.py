"""The base of request bodies, and types that their fields share."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from infer.contracts.params import TokenId

Text = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Field(fail_fast=True)]
"""A list of any length. Validation stops at its first invalid item, so that a long list does not make many errors."""
TokenIds = Many[TokenId]
IGNORED = "Ignored"
"""How the description of a field begins that is taken and has no effect."""


class Body(BaseModel):
    """What an endpoint takes, checked. A field that it does not have is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    NAMES: ClassVar[Mapping[str, str]] = {}
    """The engine's and the template's names of fields, and this body's names of them."""
    DERIVED: ClassVar[Mapping[str, str]] = {}
    """Cached properties that take long to compute from a long body, each with the field that nothing else needs.
    ``parse`` computes them. A pickled body has them instead of these fields."""

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        kept = {name: value for name, value in state["__dict__"].items() if name not in self.DERIVED.values()}
        return state | {"__dict__": kept}

    @functools.cached_property
    def ignored(self) -> Mapping[str, str]:
        """The fields that were given and have no effect, at any depth, with their descriptions: ``tools[].strict``.
        ``parse`` computes it."""
        return dict(_ignored(self, ""))

    @classmethod
    def form(cls, data: Mapping[str, Any]) -> type[Self]:
        """The model to validate ``data`` with, for a route that takes several."""
        return cls

    def client_name(self, param: str) -> str:
        """The name of the field in which the client gave what the engine or the template calls ``param``."""
        return self.NAMES.get(re.split(r"[.\[]", param)[0], param)


@functools.cache
def _fields(model: type[Body]) -> list[tuple[str, str, str | None]]:
    """The model's fields: their names, the clients' names of them, and the descriptions of those without an effect."""
    described = ((name, field.alias or name, field.description or "") for name, field in model.model_fields.items())
    return [(name, shown, text if text.startswith(IGNORED) else None) for name, shown, text in described]


def _ignored(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Body):
        for name, shown, why in _fields(type(value)):
            if name in value.model_fields_set:
                if why is not None:
                    yield path + shown, why
                yield from _ignored(getattr(value, name), f"{path}{shown}.")
    elif isinstance(value, tuple) and value and not isinstance(value[0], (int, str)):  # items are of one kind
        for each in value:
            yield from _ignored(each, f"{path[:-1]}[].")


def typed(value: Any) -> Any:
    """The ``type`` of a value, which discriminates models in a union."""
    return value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)


def one_or_many(prompt: str | TokenIds | Many[str | TokenIds]) -> list[str | TokenIds]:
    """A prompt, or several, as a list."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)
