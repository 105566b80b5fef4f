"""What ``Route`` promises, tried on a plugin's endpoints by asking a server that has them."""

from __future__ import annotations

import functools
import http.client
import json
import random
import reprlib
import select
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter, ValidationError

from infer.contracts.server import Route
from infer.engine.loop import EngineLoop
from infer.errors import InferError, one_line
from infer.plugins.discovery import Offer, Plugins
from infer_server.http.body import Body
from infer_server.http.parsing import parse
from infer_server.http.wire import OPENAI
from infer_server.openapi import VARIABLE
from infer_server.routing import checked
from infer_server.service import Service
from infer_server.testing import serving
from infer_testing.suite import Suite, Violation

KEY = "the-key-of-the-kit"
HANG_S = 60.0
"""When the kit gives up waiting for what should come at once."""
UNKNOWN = "no_such_field"
NO_BODIES = (b"", b"no JSON", b"\xff", b'{"a": ', b"null", b"[]", b"[" * 10_000)
"""None of them is a JSON object."""


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    content_type: str
    data: bytes
    """All of it; empty for a 200 of a page's own endpoint, which may never end."""


@dataclass
class Routes:
    """Registered routes, and the server that has them."""

    offer: Offer
    routes: Sequence[Route] = ()
    url: str = ""
    engine_loop: EngineLoop | None = None
    reached: Route | None = None
    """Whose handler was called last."""
    raised: Exception | None = None
    """What that has raised."""
    client_left: threading.Event = field(default_factory=threading.Event)
    """The engine's next step is not over before."""
    events: socket.socket | None = None
    """Is told what happens: b, a handler begins; s, a step has been made; e, the handler has ended."""

    def __post_init__(self) -> None:
        self.client_left.set()

    @contextmanager
    def serve(self, plugins: Plugins, **sections: Mapping[str, Any]) -> Iterator[None]:
        """Serve the plugins until the end of the block. Raises InferError."""
        registration = replace(self.offer.registration, factory=self.factory)
        offers = [
            replace(offer, registration=registration) if offer is self.offer else offer
            for offer in plugins.offers["routes"]
        ]
        plugins = replace(plugins, offers=plugins.offers | {"routes": offers})
        with serving("demo", plugins=plugins, **sections) as server:
            self.url, self.engine_loop = server.url, server.engine_loop
            yield

    def factory(self, service: Service, settings: Any) -> Sequence[Route]:
        """The plugin's factory. Handlers and the engine are watched."""
        self.routes = checked(self.offer.registration.factory(service, settings), service)
        service.observe(self)
        return [replace(route, handler=self.watched(route)) for route in self.routes]

    def watched(self, route: Route) -> Handler:
        @functools.wraps(route.handler)
        async def handler(http: web.Request) -> web.StreamResponse:
            self.reached, events = route, self.events
            _tell(events, b"b")
            try:
                return await route.handler(http)
            except Exception as error:
                self.raised = error
                raise
            finally:
                _tell(events, b"e")

        return handler

    def infer_step_finished(self, record: object) -> None:
        if not self.client_left.is_set():
            _tell(self.events, b"s")
            self.client_left.wait(HANG_S)

    def ask(self, route: Route, body: object = None, *, key: str | None = KEY) -> Answer:
        """Send a request. Raises Violation if the server is at fault or another route answers."""
        client = self.client()
        self.reached = self.raised = None
        try:
            client.request(*_request(route, body, key))
            response = client.getresponse()
            endless = response.status == 200 and route.answer is None
            data = b"" if endless else response.read()
        except TimeoutError:
            raise Violation(f"{_named(route)} has not answered {_shown(body)} within {HANG_S:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Violation(f"{_named(route)} breaks off its answer to {_shown(body)}: {one_line(error)}") from None
        finally:
            client.close()
        answer = Answer(response.status, response.getheader("Content-Type", "").partition(";")[0], data)
        if answer.status >= 500:
            why = one_line(self.raised) if self.raised is not None else data.decode(errors="replace")
            raise Violation(f"{_named(route)} answers {_shown(body)} with {answer.status}: {why}")
        if key == KEY and self.reached is not route:
            whose = "no handler" if self.reached is None else f"that of {_named(self.reached)}"
            raise Violation(f"{_named(route)} is not what answers there: of the plugin's handlers, {whose} was called")
        return answer

    def client(self) -> http.client.HTTPConnection:
        at = urlsplit(self.url)
        assert at.hostname is not None
        return http.client.HTTPConnection(at.hostname, at.port, timeout=HANG_S)

    def asked(self) -> Iterator[tuple[Route, object]]:
        """Each route, and the bodies that it should take. One is left out if its schema does not tell of any."""
        for route in self.routes:
            yield from ((route, body) for body in bodies(route))


def _tell(events: socket.socket | None, what: bytes) -> None:
    if events is not None:
        with suppress(OSError):  # nobody asks any more
            events.send(what)


SUITE: Suite[Routes] = Suite("check_routes")
check = SUITE.check


def check_routes(
    plugin: object,
    name: str,
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
    **sections: Mapping[str, Any],
) -> None:
    """Try the routes that a plugin's module registers as ``name``, on a server of the demo model in a thread.
    ``sections`` are settings, as for ``infer.LLM``; ``model`` may name another model. Each route is asked with a small
    body that the schema of its declared one tells, or that is an example there; without one, only what has to be
    refused is tried. It has to be reached by its path, answer with a status below 500 what it declares, refuse other
    bodies in one sentence, ask for a key unless it is open, be in /openapi.json, and end if its client leaves. What an
    answer says is not tried. Raises ConformanceError, and InferError if the module has no such routes or the server
    cannot start with them, as where core has one of their paths."""
    plugins = Plugins.discover([plugin])
    routes = Routes(plugins.get("routes", name, "The routes to check"))
    sections["engine"] = {"max_seq_len": 256} | dict(sections.get("engine", {}))
    sections["server"] = {"aliases": ["*"]} | dict(sections.get("server", {})) | {"api_keys": [KEY]}
    with routes.serve(plugins, **sections):
        SUITE.enforce(routes, only=only, seed=seed, case=case)


@check("Each route is reached by its path, and answers a body of its declared type with what it declares, below 500")
def answers(c: Routes, draw: random.Random) -> None:
    for route, body in c.asked():
        answer, wire = c.ask(route, body), route.wire_format or OPENAI
        if answer.status != 200 or route.answer is None:
            continue
        if route.chunk is not None and answer.content_type == wire.CONTENT_TYPE:
            if not answer.data.endswith(wire.DONE):
                raise Violation(f"{_named(route)} does not end its stream with {wire.DONE!r}: {answer.data[-200:]!r}")
            before, behind = wire.AROUND
            for frame in answer.data.removesuffix(wire.DONE).split(behind):
                if frame and frame + behind != wire.IDLE:
                    _matches(route, body, route.chunk, frame.partition(before)[2] if before else frame)
            continue
        declared = route.answer if isinstance(route.answer, str) else "application/json"
        if answer.content_type != declared:
            raise Violation(f"{_named(route)} answers with {answer.content_type!r}, but declares {declared}")
        if not isinstance(route.answer, str):
            _matches(route, body, route.answer, answer.data)


@check("What is no JSON object is refused with a status of 4xx in one sentence, and so is an unknown field, by name")
def refuses(c: Routes, draw: random.Random) -> None:
    for route in c.routes:
        if route.body is None:
            continue
        strict = route.body.model_config.get("extra") == "forbid"
        for body in (*NO_BODIES, *(made | {UNKNOWN: 1} for made in bodies(route) if strict)):
            answer = c.ask(route, body)
            said = answer.data.decode(errors="replace")
            if answer.status < 400:
                raise Violation(f"{_named(route)} takes {_shown(body)}, with {answer.status}: {said[:200]}")
            try:
                error = TypeAdapter((route.wire_format or OPENAI).ERROR).validate_json(answer.data)
            except ValidationError:
                raise Violation(f"{_named(route)} refuses {_shown(body)} with what is no error: {said!r}") from None
            if not any(text.isprintable() and text.endswith((".", "?")) for text in _texts(error)):
                raise Violation(f"{_named(route)} refuses {_shown(body)} with what is no sentence: {said}")
            if isinstance(body, dict) and answer.status == 400 and UNKNOWN not in said:
                raise Violation(f"{_named(route)} refuses {_shown(body)} without the field's name: {said}")


@check("A route that is not open refuses who shows no key or a wrong one")
def keys(c: Routes, draw: random.Random) -> None:
    for route in c.routes:
        for key in (None, "wrong"):
            answer = c.ask(route, key=key)
            if answer.status != 401 and not route.open:
                raise Violation(f"{_named(route)} is not open, but answers {answer.status} to {key or 'no'} key")


@check("/openapi.json has each route that declares an answer, with the variables of its path")
def described(c: Routes, draw: random.Random) -> None:
    client = c.client()
    client.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    paths = json.load(client.getresponse())["paths"]
    client.close()
    for route in c.routes:
        if route.answer is None:
            continue
        operation = paths.get(VARIABLE.sub(r"{\1}", route.path), {}).get(route.method.lower())
        if operation is None:
            raise Violation(f"{_named(route)} is not in /openapi.json")
        parameters = operation.get("parameters", [])
        told, named = [each["name"] for each in parameters if each["in"] == "path"], VARIABLE.findall(route.path)
        if told != named:
            raise Violation(f"{_named(route)} has the variables {named}, but /openapi.json tells of {told}")


@check("A client that leaves in the middle ends its handler, and no request stays open")
def leaves(c: Routes, draw: random.Random) -> None:
    engine_loop, still = c.engine_loop, list[int]()
    assert engine_loop is not None
    for route, body in c.asked():
        seen, until = b"", b"b" if route.body is None else b"se"
        happened, c.events = socket.socketpair()
        client = c.client()
        with happened, c.events, closing(client):
            c.client_left.clear()
            try:
                client.request(*_request(route, body, KEY))
                while not {*seen} & {*until}:
                    if happened not in select.select([happened, client.sock], [], [], HANG_S)[0]:
                        break  # the answer has begun, or nothing comes
                    seen += happened.recv(1)
                client.close()
                while seen and b"e" not in seen:
                    if not select.select([happened], [], [], HANG_S)[0]:
                        raise Violation(f"{_named(route)} goes on after the client has left that sent {_shown(body)}")
                    seen += happened.recv(1)
                counted = engine_loop.between_steps(lambda: still.append(engine_loop.num_open))
            finally:
                c.client_left.set()
            counted.result(HANG_S)
        if still[-1]:
            raise Violation(
                f"{_named(route)} keeps {still[-1]} requests open after the client has left that sent {_shown(body)}"
            )


def bodies(route: Route) -> list[Any]:
    """Those that a route should take: the examples of its model's schema, or a small one that the schema tells, with
    and without ``stream`` if it has that; with one more field if they are not valid otherwise. None where the route
    takes no body, and none at all if the schema does not tell enough."""
    if route.body is None:
        return [None]
    schema = route.body.model_json_schema()
    defs, known = schema.get("$defs", {}), schema.get("properties", {})
    made = schema.get("examples") or [example(schema, defs)]
    if known.get("stream", {}).get("type") == "boolean":
        made = [each | {"stream": stream} for each in made for stream in (False, True)]
    more = (each | {name: example(known[name], defs)} for name in known for each in made if name not in each)
    model = cast(type[Body], route.body)
    return [each for each in made if _valid(each, model)] or [each for each in more if _valid(each, model)][: len(made)]


def _valid(body: object, model: type[Body]) -> bool:
    try:
        parse(json.dumps(body).encode(), model)
    except InferError:
        return False
    return True


def example(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Any:
    """A small value that a schema of pydantic's allows, as far as it tells."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]] | schema
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    if "const" in schema:
        return schema["const"]
    for arm in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        return example(arm, defs)
    size = schema.get("minLength", schema.get("minItems", 1))
    match schema.get("type"):
        case "object":
            fields = {name: example(schema["properties"][name], defs) for name in schema.get("required", ())}
            return fields or {
                f"{i}": example(schema["additionalProperties"], defs) for i in range(schema.get("minProperties", 0))
            }
        case "array":
            return [example(schema.get("items", {}), defs)] * size
        case "integer" | "number":
            return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        case "boolean":
            return False
        case "null":
            return None
    return "a" * size


def _request(route: Route, body: object, key: str | None) -> tuple[str, str, bytes | None, dict[str, str]]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if route.header is not None:
        headers[route.header] = "1"
    return route.method, VARIABLE.sub("1", route.path), data, headers | {"Content-Type": "application/json"}


def _matches(route: Route, body: object, kind: Any, data: bytes) -> None:
    try:
        TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        at, what = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise Violation(
            f"{_named(route)} answers {_shown(body)} with {data.decode(errors='replace')[:200]!r}, which is not the "
            f"{getattr(kind, '__name__', kind)} that it declares: {at or 'it'}: {what}"
        ) from None


def _texts(value: object) -> Iterator[str]:
    """The strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)


def _named(route: Route) -> str:
    return f"{route.method} {route.path}"


def _shown(body: object) -> str:
    if body is None:
        return "no body"
    return reprlib.repr(body) if isinstance(body, bytes) else json.dumps(body)[:300]
