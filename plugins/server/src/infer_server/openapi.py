"""GET /openapi.json and GET /docs, made from the models that validate requests."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from infer.contracts.server import Route
from infer_server.http.wire import OPENAI

Place = Sequence[Route]
"""The routes of one method and path. All but the first have a header."""
PAGES = ("/openapi.json", "/docs")
VARIABLE = re.compile(r"{(\w+)[^{}]*(?:{[^{}]*}[^{}]*)*}")
"""In a path, as aiohttp has it: a name, perhaps with a pattern."""
REF = "#/components/schemas/{model}"
ERRORS = {
    400: "Something in the request is wrong; the message names it.",
    401: "No valid API key.",
    404: "What the request names is not here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "A quota of the API key is used up; see Retry-After.",
    503: "No place is free, or the server is shutting down; see Retry-After.",
    504: "The answer has not ended in time.",
    500: "The answer failed.",
}


def document(places: Iterable[Place], server_name: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes that have an ``answer``."""
    routes = [route for place in places for route in place if route.answer is not None]
    bodies = [(route.body, "validation") for route in routes if route.body is not None]
    asked, schemas = models_json_schema(bodies, ref_template=REF)  # type: ignore[arg-type]
    components: dict[str, Any] = dict(schemas.get("$defs", {}))
    wires = [route.wire_format or OPENAI for route in routes]
    answers = [kind for route in routes for kind in (route.answer, route.chunk) if _is_shape(kind)]
    kinds: list[Any] = []
    for kind in (OPENAI.ERROR, *(wire.ERROR for wire in wires), *answers):
        if kind not in kinds:  # kinds may have no hash
            kinds.append(kind)
    shapes, schemas = TypeAdapter.json_schemas(
        [(str(i), "validation", TypeAdapter(kind)) for i, kind in enumerate(kinds)],
        ref_template=REF.replace("{model}", "Answer.{model}"),
    )
    components |= {f"Answer.{name}": definition for name, definition in schemas.get("$defs", {}).items()}

    def shape(kind: Any) -> Any:
        return shapes[str(kinds.index(kind)), "validation"]

    paths: dict[str, Any] = {}
    for route, wire in zip(routes, wires, strict=True):
        error = {"application/json": {"schema": shape(wire.ERROR)}}
        if isinstance(route.answer, str):
            content: dict[str, Any] = {route.answer: {"schema": {"type": "string"}}}
        else:
            content = {"application/json": {"schema": shape(route.answer)}}
        if route.chunk is not None:
            name = getattr(route.chunk, "__name__", str(route.chunk))
            data = {"type": "string", "description": f"[DONE], an error, or {name} as JSON."}
            event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
            line = {"type": "string", "description": f"Lines, each of which is {name} as JSON, or an error."}
            content[wire.CONTENT_TYPE] = {"schema": event if wire.CONTENT_TYPE == OPENAI.CONTENT_TYPE else line}
        codes = ERRORS if route.body is not None else {code: ERRORS[code] for code in (401, 404, 500, 503)}
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
            "responses": {"200": {"description": "The answer.", "content": content}}
            | {str(code): {"description": text, "content": error} for code, text in codes.items()},
        }
        if route.open:
            operation["security"] = []
        if route.path in ("/health", "/ready"):
            operation["responses"]["503"]["content"] = content
        if route.body is not None:
            schema = asked[route.body, "validation"]
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if names := VARIABLE.findall(route.path):
            told = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name} | told for name in names]
        if route.header is not None:
            header = {"name": route.header, "in": "header", "schema": {"type": "string"}}
            operation["parameters"] = [*operation.get("parameters", ()), header]
        there = paths.setdefault(VARIABLE.sub(r"{\1}", route.path), {})
        there[route.method.lower()] = _either(there.get(route.method.lower()), operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"infer: {server_name}", "version": version("infer-core")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _either(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """One operation that stands for both, where a header decides which it is."""
    if one is None:
        return other
    responses = {
        code: told | {"content": _contents(told["content"], other["responses"][code]["content"])}
        for code, told in one["responses"].items()
    }
    parameters = [*one.get("parameters", ()), *(each for each in other["parameters"] if each["in"] == "header")]
    return one | {"responses": responses, "parameters": parameters}


def _contents(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What has either content, by media type."""
    both = {}
    for kind in one.keys() & other.keys():
        schema = one[kind]["schema"]
        both[kind] = {"schema": {"anyOf": [*schema.get("anyOf", [schema]), other[kind]["schema"]]}}
    return one | other | both


def _is_shape(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def pages(places: Iterable[Place], server_name: str) -> tuple[Handler, Handler]:
    """The handlers of /openapi.json and /docs. Both are made at the first request, to keep the start short, and in a
    thread, since that takes a while."""

    made: tuple[bytes, bytes] | None = None
    one = asyncio.Lock()

    def make() -> tuple[bytes, bytes]:
        described = document(places, server_name)
        return json.dumps(described).encode(), _page(described).encode()

    async def both() -> tuple[bytes, bytes]:
        nonlocal made
        async with one:  # hands over once per turn of the loop, so hundreds who waited do not answer in one turn
            if made is None:
                made = await asyncio.to_thread(make)
            return made

    async def openapi(http: web.Request) -> web.Response:
        return web.Response(body=(await both())[0], content_type="application/json", charset="utf-8")

    async def docs(http: web.Request) -> web.Response:
        return web.Response(body=(await both())[1], content_type="text/html", charset="utf-8")

    return openapi, docs


def _page(made: dict[str, Any]) -> str:
    """The HTML page of /docs, which loads nothing from elsewhere."""
    schemas = made["components"]["schemas"]
    rows = []
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            rows.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}</p>"
            )
            if "requestBody" in operation:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                rows.append(_fields(schemas[name]))
    title = html.escape(made["info"]["title"])
    style = (
        "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.2rem 1rem .2rem 0;vertical-align:top}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1><p>The same for programs: <a href=openapi.json>openapi.json</a></p>{''.join(rows)}</html>"
    )


def _fields(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        needed = "required" if name in schema.get("required", ()) else json.dumps(field.get("default"))
        rows.append(
            f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(field.get('description', ''))}"
            f"<td><code>{html.escape(needed)}</code>"
        )
    return f"<table>{''.join(rows)}</table>"
