"""The models as Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from infer.errors import RequestError
from infer_server.http.queries import limit, query

VERSION = "anthropic-version"
"""The header by which requests of Anthropic's clients are told from others."""
FEW, MOST = 20, 1000
"""How many models a page has, and at most."""


class ListedModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None


class ListedModels(TypedDict):
    data: list[ListedModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def listed(name: str, context: int | None) -> ListedModel:
    """A model of this name. ``context`` is how many tokens a prompt and its answer may have together; None if that is
    unknown."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",  # as the API has it where nobody knows when a model was released
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": None,
    }


def page(http: web.Request, models: Sequence[ListedModel]) -> ListedModels:
    """The page of the models that a request asks for. Raises RequestError."""
    asked = query(http, limit=None, before_id=None, after_id=None, beta=("true",), lifecycle=None)
    most = limit(asked, FEW, MOST)
    stages = [value for name, value in http.query.items() if name.removesuffix("[]") == "lifecycle"]
    if stages and "active" not in stages:
        models = ()
    ids = [model["id"] for model in models]
    for name in ("before_id", "after_id"):
        if name in asked and asked[name] not in ids:
            raise RequestError(f"{name} = {asked[name][:100]!r} is no model that is listed here.", param=name)
    begin = ids.index(asked["after_id"]) + 1 if "after_id" in asked else 0
    end = ids.index(asked["before_id"]) if "before_id" in asked else len(ids)
    rest = models[begin:end]
    shown = rest[-most:] if "before_id" in asked else rest[:most]
    return {
        "data": list(shown),
        "has_more": len(shown) < len(rest),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
