"""The server in front of the replicas. It speaks their HTTP API, and passes bytes on.

An ingress reads of a body what it needs to choose a replica (``outline``), asks the ``Router``, and sends the request
to that replica's own HTTP server. If the replica is lost before the answer has begun, another is asked; if it is lost
in the middle of a stream, another gives the same answer again, and the client gets what it does not have yet
(``resume``). It imports no Ray: somebody tells its ``Fleet`` which replicas there are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from infer.contracts.sections import ServerSettings
from infer.errors import EngineDeadError
from infer_router.exchange import HOPS, Another, Counts, Exchange, LostError
from infer_router.fleet import Fleet
from infer_router.held import with_blocks
from infer_router.outline import Outgoing, Outline, outlined
from infer_server.http.access import CALLER, access_log, allow_origin, authorize, guard, preflight
from infer_server.http.bodies import BodyBudget, Reader, arrived
from infer_server.http.errors import errors, expected
from infer_server.http.keys import OWNER, Keys
from infer_server.http.listing import VERSION
from infer_server.http.sockets import listen
from infer_server.http.wire import OPENAI, SHUTTING_DOWN, WIRE_FORMATS, Anthropic, NumberedEvents, Ollama

SAMPLING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""The endpoints whose answers are drawn, and may be streamed and gone on with elsewhere."""
FORMATS = {
    "/v1/responses": NumberedEvents(),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), Anthropic()),
    **dict.fromkeys((f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show", "pull")), Ollama()),
}
"""How errors and streams are written, by path, if not as OpenAI's chats are."""
STATE = "/ray/state"
"""The route of a replica that tells what it is doing."""
MODELS = "/v1/models"
HIDDEN = ("/console", "/ray")
"""Routes of single replicas, which would mean nothing here."""
CONNECT_S = 5.0
MOST_BODIES = 128
"""Bodies of requests that are not answered yet may take as many bytes together as this many of the largest size."""
SAID_S = 5.0
MOST_SILENT = 3
"""Polls in a row that a replica may leave unanswered before its answers go on elsewhere."""
MOST_POLLS = 200
"""How many replicas are asked per second how they are."""
KEPT_BACK = HOPS | {"host", "authorization", "content-length", "cookie", "expect", "origin", "upgrade", OWNER.lower()}


class Ingress:
    """Handles all requests. Use it in one event loop, as ``async with``."""

    def __init__(self, fleet: Fleet, server: ServerSettings, *, poll_s: float = 1.0, patience_s: float = 0.0) -> None:
        self.fleet = fleet
        self.patience_s = patience_s
        self.counts = Counts()
        self.open = 0
        """How many requests are being answered."""
        self.closing = False
        """Whether connections end with the answer that is under way on them."""
        self._over = False
        self.server = server
        self.keys = Keys(server.api_keys)
        self._poll_s = poll_s
        self.reader = Reader()
        self.reader.expect(Outline)
        self.budget = BodyBudget(MOST_BODIES * server.max_body_bytes)
        self.session: aiohttp.ClientSession
        self._asking: dict[str, set[asyncio.Timeout]] = {}
        """What ends the requests that a replica has, if it leaves: a machine that is gone closes no connection."""
        self._polling: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, Any] = {}
        self._keeper: asyncio.Task[None]

    async def __aenter__(self) -> Ingress:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in (self._keeper, *self._polling.values()):
            task.cancel()
        await asyncio.gather(self._keeper, *self._polling.values(), return_exceptions=True)
        await self.session.close()
        await self.reader.close()

    def app(self) -> web.Application:
        app, opened = application(self.server, self._end_connection, self.keys)
        opened.add(app.router.add_get("/health", self._health))
        opened.add(app.router.add_get("/ready", self._ready))
        app.router.add_get("/metrics", self._metrics)
        for path in HIDDEN:
            app.router.add_route("*", path + "{rest:(/.*)?}", self._hidden)
        app.router.add_route("*", "/{path:.*}", self._handle, expect_handler=expected)
        return app

    # What is said of the whole

    async def _health(self, http: web.Request) -> web.Response:
        alive = len(self.fleet.urls)
        return web.json_response({"status": "ok" if alive else "dead"}, status=200 if alive else 503)

    async def _ready(self, http: web.Request) -> web.Response:
        takes = not self.closing and self.fleet.router.choose(()) is not None
        return web.json_response({"status": "ready" if takes else "draining"}, status=200 if takes else 503)

    async def _end_connection(self, http: web.Request, response: web.StreamResponse) -> None:
        if self.closing:
            response.force_close()
            response.headers["Connection"] = "close"

    async def _hidden(self, http: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def _metrics(self, http: web.Request) -> web.Response:
        merged = await asyncio.to_thread(merge_metrics, await self.said("/metrics"))
        return web.Response(text=self._own_metrics() + merged, content_type="text/plain", charset="utf-8")

    async def said(self, path: str) -> list[tuple[str, str]]:
        """What each replica answers to a GET, by its name; nothing of one that does not."""

        async def one(name: str, url: str) -> tuple[str, str]:
            try:
                async with asyncio.timeout(SAID_S), self.session.get(url + path, headers=self.fleet.headers) as r:
                    return name, await r.text() if r.status == 200 else ""
            except (aiohttp.ClientError, TimeoutError):
                return name, ""

        return await asyncio.gather(*(one(name, url) for name, url in self.fleet.urls.items()))

    def _own_metrics(self) -> str:
        names = self.server.metrics_names
        prefix = "vllm:ingress_" if names == "vllm" else "infer_ingress_"
        router = self.fleet.router
        taking = sum(1 for name in router if router.taking(name))
        values = (
            ("requests_total", "counter", "Requests that were sent to a replica.", self.counts.requests),
            ("retried_total", "counter", "Requests that another replica was asked for.", self.counts.retried),
            ("resumed_total", "counter", "Streams that another replica went on with.", self.counts.resumed),
            ("lost_total", "counter", "Streams that ended in an error, their replica being lost.", self.counts.lost),
            ("asked_blocks_total", "counter", "Blocks of the prompts that were routed.", self.counts.asked_blocks),
            (
                "known_blocks_total",
                "counter",
                "Those that the chosen replica was known to hold.",
                self.counts.known_blocks,
            ),
            ("blocks", "gauge", "Blocks that the router remembers.", router.blocks),
            ("replicas", "gauge", "Replicas that are known.", len(router)),
            ("replicas_taking", "gauge", "Replicas that get new requests.", taking),
        )
        return "".join(
            f"# HELP {prefix}{name} {text}\n# TYPE {prefix}{name} {kind}\n{prefix}{name} {value}\n"
            for name, kind, text, value in values
        )

    # One request

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        if not http.rel_url.raw_path.startswith("/"):
            raise web.HTTPNotFound
        outgoing = Outgoing(seeded=True)
        self.open += 1
        try:
            with self.budget.body() as grow:
                if http.can_read_body:
                    body = await arrived(http, self.server.max_body_bytes, grow, self.server.body_timeout_s)
                    outgoing = Outgoing(body)
                    if http.method == "POST" and "Content-Encoding" not in http.headers:
                        outgoing = await outlined(body, self.reader, samples=http.path in SAMPLING)
                return await self.passed(http, outgoing)
        finally:
            self.open -= 1

    async def passed(
        self,
        http: web.Request,
        outgoing: Outgoing,
        without: frozenset[str] = frozenset(),
        *,
        another: Another | None = None,
    ) -> web.StreamResponse:
        """The answer of a replica, which gets the client's headers but for those ``without``. If none is there, it asks
        for ``another``."""
        http[CALLER].user = outgoing.user
        kept_back = KEPT_BACK | without
        headers = CIMultiDict((name, v) for name, v in http.headers.items() if name.lower() not in kept_back)
        headers.update(self.fleet.headers)
        headers[OWNER] = self.keys.owner(http)
        # The blocks, so that the replica can tell every ingress what it holds.
        if baggage := with_blocks(",".join(headers.popall("baggage", ())), outgoing.chain):
            headers["baggage"] = baggage
        self.counts.requests += 1
        return await Exchange(self, http, outgoing, headers, another).run()

    @asynccontextmanager
    async def asking(self, name: str) -> AsyncIterator[None]:
        """While a replica is asked. Raises LostError if it leaves, or no longer gets on, or what ``check`` raises."""
        try:
            async with asyncio.timeout(None) as asking:
                self._asking.setdefault(name, set()).add(asking)
                try:
                    yield
                finally:
                    self._asking.get(name, set()).discard(asking)
        except TimeoutError:
            if not asking.expired():
                raise
            self.check()
            raise LostError("it has left, or it is stuck") from None

    def check(self) -> None:
        """Raises EngineDeadError once answers are not to go on."""
        if self._over:
            raise EngineDeadError(SHUTTING_DOWN)

    def end(self) -> None:
        """Have the answers that are under way end with an error each."""
        self._over = True
        self.fleet.update({})

    # How replicas are

    async def _keep(self) -> None:
        """Have a task that polls for every replica."""
        while True:
            for name in [*self._polling]:
                if name not in self.fleet.urls or self._polling[name].done():
                    self._polling.pop(name).cancel()
                    self._versions.pop(name, None)
            for name in self.fleet.urls:
                if name not in self._polling:
                    self._polling[name] = asyncio.create_task(self._poll(name))
            for name in [name for name in self._asking if name not in self.fleet.urls]:
                self._give_up(name)
            await self.fleet.changed()

    def _give_up(self, name: str) -> None:
        """Have everybody who is answered by a replica ask another."""
        for asking in self._asking.pop(name, ()):
            asking.reschedule(0.0)

    async def _poll(self, name: str) -> None:
        silent = 0
        while (url := self.fleet.urls.get(name)) is not None:
            try:
                async with (
                    asyncio.timeout(max(CONNECT_S, self._poll_s)),
                    self.session.get(
                        url + STATE, params={"since": self._versions.get(name, "")}, headers=self.fleet.headers
                    ) as response,
                ):
                    silent = 0
                    if response.status == 200:
                        state = json.loads(await response.read())
                        if state.get("stuck"):
                            self._give_up(name)
                        self._versions[name] = state["version"]
                        self.fleet.report(name, state)
                    else:
                        self.fleet.suspect(name)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.fleet.suspect(name)
                silent += isinstance(error, TimeoutError)
                if silent >= MOST_SILENT:
                    self._give_up(name)
            await asyncio.sleep(max(self._poll_s, len(self.fleet.urls) / MOST_POLLS))


def application(
    server: ServerSettings, prepare: Callable[[web.Request, web.StreamResponse], Awaitable[None]], keys: Keys
) -> tuple[web.Application, set[web.AbstractRoute]]:
    """A server's application without routes, and the set of those that need no key. ``prepare`` sees every answer."""
    opened = set[web.AbstractRoute]()
    app = web.Application(
        middlewares=[
            access_log(server.access_log),
            errors,
            *((preflight(server.cors_origins),) if server.cors_origins else ()),
            authorize(keys, opened) if keys else guard(server.host),
        ],
        client_max_size=server.max_body_bytes,
    )
    app[WIRE_FORMATS] = lambda http: FORMATS.get(
        http.path, Anthropic() if VERSION in http.headers and http.path.startswith(MODELS) else OPENAI
    )
    if server.cors_origins:
        app.on_response_prepare.append(allow_origin(server.cors_origins))
    app.on_response_prepare.append(prepare)
    return app, opened


def merge_metrics(texts: Sequence[tuple[str, str]]) -> str:
    """One text of several replicas' metrics: each sample gets the label ``replica``, each family is described once."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, family, *_ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(each.startswith(f"# {kind} ") for each in known):
                    known.append(line)
            elif line:
                name, brace, labels = line.partition("{")
                if brace:
                    line = f'{name}{{replica="{replica}",{labels}'
                else:
                    name, _, value = line.partition(" ")
                    line = f'{name}{{replica="{replica}"}} {value}'
                samples.setdefault(family, []).append(line)
    return "".join("\n".join([*heads[family], *samples.get(family, ())]) + "\n" for family in heads)


@asynccontextmanager
async def serving(ingress: Ingress, sockets: Sequence[Any]) -> AsyncIterator[str]:
    """Serve until the end of the block. Yields the URL."""
    async with ingress, listen(ingress.app(), sockets, ingress.server.stall_timeout_s) as url:
        yield url
