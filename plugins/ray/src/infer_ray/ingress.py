"""The server in front of the replicas. It speaks their HTTP API, and passes bytes on.

An ingress reads of a body what it needs to choose a replica (``outline``), asks the ``Router``, and sends the request
to that replica's own HTTP server. If the replica is lost before the answer has begun, another is asked; if it is lost
in the middle of a stream, another gives the same answer again, and the client gets what it does not have yet
(``resume``). It imports no Ray: somebody tells its ``Fleet`` which replicas there are."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from infer.contracts.sections import ServerSettings
from infer.errors import EngineDeadError
from infer.server.http.access import CALLER, access_log, allow_origin, authorize, guard, preflight
from infer.server.http.bodies import BodyBudget, Reader, arrived
from infer.server.http.errors import REQUEST_ID, error_body, errors, expected
from infer.server.http.keys import OWNER, Keys
from infer.server.http.sockets import listen
from infer.server.http.streams import hang_up, write
from infer.server.http.wire import OPENAI, SHUTTING_DOWN, WIRE_FORMATS, Anthropic, NamedEvents, Ollama, wire_format
from infer_ray.held import with_blocks
from infer_ray.outline import Outgoing, Outline, outlined
from infer_ray.resume import ClientStream, DivergedError, complaint
from infer_ray.router import Router

log = logging.getLogger(__name__)

SAMPLING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""The endpoints whose answers are drawn, and may be streamed and gone on with elsewhere."""
FORMATS = {
    "/v1/responses": NamedEvents(),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), Anthropic()),
    **dict.fromkeys((f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show", "pull")), Ollama()),
}
"""How errors and streams are written, by path, if not as OpenAI's chats are."""
STREAMS = {each.CONTENT_TYPE: each for each in (OPENAI, Ollama())}
"""How streams are written, by media type, as far as an ingress looks into them."""
STATE = "/ray/state"
"""The route of a replica that tells what it is doing."""
HIDDEN = ("/console", "/ray")
"""Routes of single replicas, which would mean nothing here."""
CONNECT_S = 5.0
RESUME_S = 60.0
"""How long a stream that has begun waits for another replica."""
MOST_LOST = 3
"""How many replicas may be lost in a row while they answer a request that gets nowhere: it may be what ends them."""
MOST_REFUSED = 3
"""How many replicas that are full are asked. The least loaded ones come first, so that others are full as well."""
MOST_BODIES = 128
"""Bodies of requests that are not answered yet may take as many bytes together as this many of the largest size."""
METRICS_S = 5.0
MOST_SILENT = 3
"""Polls in a row that a replica may leave unanswered before its answers go on elsewhere."""
MOST_POLLS = 200
"""How many replicas are asked per second how they are."""
PIECE_BYTES = 1 << 18
WHOLE_BYTES = 4 << 20
"""Answers up to this size are sent on when they are complete; until then another replica can be asked."""
FRAME_BYTES = 64 << 20
HOPS = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding")
)
"""Headers that are about one connection."""
KEPT_BACK = HOPS | {"host", "authorization", "content-length", "cookie", "expect", "origin", "upgrade", OWNER.lower()}
NOT_PASSED = HOPS | {"content-length", "date", "server"}


class LostError(Exception):
    """The replica has gone, or will not go on."""


class EndingError(LostError):
    """The replica finishes what it can and takes no more."""


class LeftError(Exception):
    """The client has gone."""


NOT_REACHED = (EndingError, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True)
class _Refused:
    """What a replica answered that takes no more at the moment."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


@dataclass
class Counts:
    """What happened since the start."""

    requests: int = 0
    retried: int = 0
    resumed: int = 0
    lost: int = 0
    known_blocks: int = 0
    asked_blocks: int = 0


@dataclass
class Fleet:
    """The replicas, by name, and the router that chooses among them. Somebody calls ``update`` when they change, and
    ``poll`` asks them how they are."""

    router: Router = field(default_factory=Router)
    key: str | None = None
    """What replicas want to be shown."""
    urls: dict[str, str] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def update(self, table: Mapping[str, Mapping[str, Any]]) -> None:
        """``table`` has every replica's ``url`` and whether it is ``draining``."""
        for name in [*self.router]:
            if name not in table:
                self.router.leave(name)
                self.urls.pop(name)
        for name, entry in table.items():
            new = name not in self.router
            self.urls[name] = str(entry["url"])
            self.router.join(name)
            if entry.get("draining"):
                self.draining.add(name)
                self.router.take(name, False)
            elif new:
                self.router.take(name, True)
        self.draining &= table.keys()
        self._wake()

    def suspect(self, name: str) -> None:
        """Send it nothing until it has answered."""
        if name in self.router:
            self.router.take(name, False)

    def report(self, name: str, state: Mapping[str, Any]) -> None:
        """What a replica says of itself."""
        if name not in self.router:
            return
        self.router.report(name, int(state["open"]))
        self.router.holds(name, state.get("held", ()))
        self.router.forgets(name, state.get("forgotten", ()))
        taking = bool(state["taking"]) and name not in self.draining
        if taking != self.router.taking(name):
            self.router.take(name, taking)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait until something changes."""
        await self._changed.wait()


class Ingress:
    """Handles all requests. Use it in one event loop, as ``async with``."""

    def __init__(self, fleet: Fleet, server: ServerSettings, *, poll_s: float = 1.0) -> None:
        self.fleet = fleet
        self.counts = Counts()
        self.open = 0
        """How many requests are being answered."""
        self.closing = False
        """Whether connections end with the answer that is under way on them."""
        self._server = server
        self._keys = Keys(server.api_keys)
        self._poll_s = poll_s
        self._reader = Reader()
        self._reader.expect(Outline)
        self._budget = BodyBudget(MOST_BODIES * server.max_body_bytes)
        self._session: aiohttp.ClientSession
        self._asking: dict[str, set[asyncio.Timeout]] = {}
        """What ends the requests that a replica has, if it leaves: a machine that is gone closes no connection."""
        self._polling: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, Any] = {}
        self._keeper: asyncio.Task[None]

    async def __aenter__(self) -> Ingress:
        self._session = aiohttp.ClientSession(
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
        await self._session.close()
        await self._reader.close()

    def app(self) -> web.Application:
        server, keys = self._server, self._keys
        opened: set[web.AbstractRoute] = set()
        app = web.Application(
            middlewares=[
                access_log(server.access_log),
                errors,
                *((preflight(server.cors_origins),) if server.cors_origins else ()),
                authorize(keys, opened) if keys else guard(server.host),
            ],
            client_max_size=server.max_body_bytes,
        )
        app[WIRE_FORMATS] = lambda http: FORMATS.get(http.path, OPENAI)
        if server.cors_origins:
            app.on_response_prepare.append(allow_origin(server.cors_origins))
        app.on_response_prepare.append(self._end_connection)
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
        """The metrics of all replicas, each with the label ``replica``, and the ingress's own."""

        async def one(name: str, url: str) -> tuple[str, str]:
            try:
                async with (
                    asyncio.timeout(METRICS_S),
                    self._session.get(f"{url}/metrics", headers=self.fleet.headers) as r,
                ):
                    return name, await r.text() if r.status == 200 else ""
            except (aiohttp.ClientError, TimeoutError):
                return name, ""

        texts = await asyncio.gather(*(one(name, url) for name, url in self.fleet.urls.items()))
        merged = await asyncio.to_thread(merge_metrics, texts)
        return web.Response(text=self._own_metrics() + merged, content_type="text/plain", charset="utf-8")

    def _own_metrics(self) -> str:
        names = self._server.metrics_names
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
            with self._budget.body() as grow:
                if http.can_read_body:
                    body = await arrived(http, self._server.max_body_bytes, grow, self._server.body_timeout_s)
                    outgoing = Outgoing(body)
                    if http.method == "POST" and "Content-Encoding" not in http.headers:
                        outgoing = await outlined(body, self._reader, samples=http.path in SAMPLING)
                http[CALLER].user = outgoing.user
                headers = CIMultiDict((name, v) for name, v in http.headers.items() if name.lower() not in KEPT_BACK)
                headers.update(self.fleet.headers)
                headers[OWNER] = self._keys.owner(http)
                # The blocks, so that the replica can tell every ingress what it holds.
                if baggage := with_blocks(",".join(headers.popall("baggage", ())), outgoing.chain):
                    headers["baggage"] = baggage
                self.counts.requests += 1
                return await _Exchange(self, http, outgoing, headers).run()
        finally:
            self.open -= 1

    @asynccontextmanager
    async def asking(self, name: str) -> AsyncIterator[None]:
        """While a replica is asked. Raises LostError if it leaves, or no longer gets on."""
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
            raise LostError("it has left, or it is stuck") from None

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
                    self._session.get(
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


class _Exchange:
    """One client's request, and the replicas that are asked for its answer."""

    def __init__(self, ingress: Ingress, http: web.Request, outgoing: Outgoing, headers: CIMultiDict[str]) -> None:
        self._ingress = ingress
        self._http = http
        self._outgoing = outgoing
        self._headers = headers
        self._response: web.StreamResponse | None = None
        """What the client gets, once its headers are sent."""
        self._client_stream = ClientStream()
        self._lost = 0
        """How many replicas were lost since there was anything new to tell the client."""
        self._stall_s = ingress._server.stall_timeout_s

    async def run(self) -> web.StreamResponse:
        ingress, fleet = self._ingress, self._ingress.fleet
        without: set[str] = set()
        refused: _Refused | None = None
        deadline = 0.0
        while True:
            choice = fleet.router.choose(self._outgoing.chain, without) if len(without) < MOST_REFUSED else None
            if choice is None:
                if refused is not None and self._response is None:
                    return web.Response(status=refused.status, headers=refused.headers, body=refused.body)
                if self._response is None:
                    raise EngineDeadError("No replica can take requests at the moment; try again.")
                deadline = deadline or time.monotonic() + RESUME_S
                if not await self._later(deadline):
                    return await self._fail(
                        "The replica that answered was lost, and no other can take over; try again."
                    )
                without.clear()
                continue
            name, deadline = choice.replica, 0.0
            ingress.counts.asked_blocks += len(self._outgoing.chain)
            ingress.counts.known_blocks += choice.known
            begun = fleet.router.begin(name, self._outgoing.chain)
            try:
                done = await self._ask(name)
            except (LostError, aiohttp.ClientError) as error:
                log.warning("replica %s was lost while it answered %s: %r", name, self._http.path, error)
                fleet.suspect(name)
                if self._response is not None and not self._response.prepared:  # the replica had sent its headers alone
                    self._response, self._client_stream = None, ClientStream()
                # Who ends in good order, or was not there, was not ended by this request.
                self._lost += not isinstance(error, NOT_REACHED)
                if self._lost >= MOST_LOST:
                    message = f"{MOST_LOST} replicas were lost while they answered this; no other is asked."
                    if self._response is None:
                        raise EngineDeadError(message) from None
                    return await self._fail(message)
                if self._response is None:
                    ingress.counts.retried += 1
                elif self._outgoing.seeded and self._streamed and self._client_stream.known:
                    ingress.counts.resumed += 1
                else:
                    return await self._fail(
                        "The replica that answered was lost in the middle of its answer; try again."
                    )
                continue
            except LeftError:
                raise ConnectionResetError("the client has left") from None
            except DivergedError:
                return await self._fail(
                    "The replica that answered was lost, and another gives another answer to the same request; do they "
                    "run on different hardware or settings?"
                )
            except Exception:
                if self._response is None or not self._response.prepared:
                    raise
                log.exception("a stream failed")  # its status is sent, so that it cannot become an error's
                return await self._fail("The ingress failed in the middle of the answer; its log says how.")
            finally:
                fleet.router.end(begun)
            if not isinstance(done, _Refused):
                return done
            refused = done
            without.add(name)

    @property
    def _streamed(self) -> bool:
        return self._response is not None and self._response.content_type in STREAMS

    async def _later(self, deadline: float) -> bool:
        """Wait until something about the replicas changes. Returns False if the time is over."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._ingress.fleet.changed()
        except TimeoutError:
            return False
        return True

    async def _ask(self, name: str) -> web.StreamResponse | _Refused:
        """Send the request to a replica and its answer to the client. Raises LostError, DivergedError or what aiohttp
        raises if the connection fails."""
        http = self._http
        # Of what the client wrote, the path alone: before it may stand a host, to which the key is not to go.
        url = URL(self._ingress.fleet.urls[name] + http.rel_url.raw_path_qs, encoded=True)
        async with (
            self._ingress.asking(name),
            self._ingress._session.request(
                http.method, url, headers=self._headers, data=self._outgoing.body, allow_redirects=False
            ) as upstream,
        ):
            headers = CIMultiDict((k, v) for k, v in upstream.headers.items() if k.lower() not in NOT_PASSED)
            if upstream.status == 503:
                refused = _Refused(503, headers, await upstream.read())
                if SHUTTING_DOWN.encode() in refused.body:
                    raise EndingError("it is shutting down")
                return refused
            id = upstream.headers.get("X-Request-Id", "")
            if self._response is None:
                http[REQUEST_ID] = id or http[REQUEST_ID]
            if upstream.content_type in STREAMS and upstream.status == 200:
                return await self._stream(upstream, headers, id)
            if self._response is not None:
                raise DivergedError
            return await self._whole(upstream, headers)

    async def _whole(self, upstream: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> web.StreamResponse:
        body = bytearray()
        async for chunk in upstream.content.iter_any():
            body += chunk
            if len(body) > WHOLE_BYTES:
                break
        else:
            return web.Response(status=upstream.status, headers=headers, body=bytes(body))
        response = self._response = web.StreamResponse(status=upstream.status, headers=headers)
        response.content_length = upstream.content_length
        await self._write(response, bytes(body))
        async for chunk in upstream.content.iter_any():
            await self._write(response, chunk)
        await self._write(response)
        return response

    async def _stream(self, upstream: aiohttp.ClientResponse, headers: CIMultiDict[str], id: str) -> web.StreamResponse:
        if (response := self._response) is None:
            response = self._response = web.StreamResponse(status=200, headers=headers)
        told, written = self._client_stream, STREAMS[upstream.content_type]
        behind = written.AROUND[1]
        told.known &= written is OPENAI
        told.begin(id)
        rest = bytearray()
        async for chunk in upstream.content.iter_any():
            # Whole events only, so that another replica can go on after the last one.
            if not rest and chunk.endswith(behind):
                events = chunk
            else:
                searched = max(0, len(rest) - 1)
                rest += chunk
                at = rest.rfind(behind, searched)
                end = at + len(behind) if at >= 0 else 0
                while rest.startswith(written.IDLE, end):  # it need not be a whole event
                    end += len(written.IDLE)
                if not end:
                    if len(rest) > FRAME_BYTES:
                        raise LostError("an event does not end")
                    continue
                events = bytes(rest[:end])
                del rest[:end]
            if b'"error"' in events and complaint(events) == SHUTTING_DOWN:
                raise EndingError("it is shutting down")
            if new := told.relay(events):
                self._lost = 0
                await self._write(response, new)
        if rest:
            raise LostError("the answer ends within an event")
        await self._write(response)
        return response

    async def _write(self, response: web.StreamResponse, data: bytes = b"") -> None:
        """Send data to the client, after the headers if these are not sent yet; nothing stands for the end. Raises
        LeftError."""
        try:
            if not response.prepared:
                await response.prepare(self._http)
            if data:
                await write(self._http, response, data, self._stall_s)
            else:
                await response.write_eof()
        except ConnectionError:  # aiohttp's own for this is a ClientError, too, as if the replica had gone
            raise LeftError from None

    async def _fail(self, message: str) -> web.StreamResponse:
        """End an answer that has begun with an error."""
        self._ingress.counts.lost += 1
        response = self._response
        assert response is not None
        if not self._streamed:
            hang_up(self._http)  # what has a length cannot end in any other way
        written = wire_format(self._http)
        body = written.failure(error_body(message, "server_error"))
        before, behind = written.AROUND
        data = written.head(body) + before + json.dumps(body).encode() + behind + written.DONE
        await self._write(response, data)
        await self._write(response)
        return response


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
    async with ingress, listen(ingress.app(), sockets, ingress._server.stall_timeout_s) as url:
        yield url
