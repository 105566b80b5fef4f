"""One client's request, and the replicas that are asked for its answer.

If a replica is lost before its answer has begun, another is asked. If it is lost in the middle of a stream, another
gives the same answer again, and the client gets what it does not have yet (``resume``)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from infer.contracts.sections import ServerSettings
from infer.errors import EngineDeadError, InferError
from infer_router.fleet import Fleet
from infer_router.outline import Outgoing
from infer_router.resume import ClientStream, DivergedError, complaint
from infer_server.http.errors import REQUEST_ID, error_body
from infer_server.http.streams import hang_up, write
from infer_server.http.wire import OPENAI, SHUTTING_DOWN, Ollama, wire_format

log = logging.getLogger(__name__)

STREAMS = {each.CONTENT_TYPE: each for each in (OPENAI, Ollama())}
"""How streams are written, by media type, as far as an ingress looks into them."""
RESUME_S = 60.0
"""How long a stream that has begun waits for another replica, and so does whoever is patient while one is suspected, at
least (``Asker.patience_s``)."""
MOST_LOST = 3
"""How many replicas may be lost in a row while they answer a request that gets nowhere: it may be what ends them."""
MOST_REFUSED = 3
"""How many replicas that are full are asked. The least loaded ones come first, so that others are full as well."""
WHOLE_BYTES = 4 << 20
"""Answers up to this size are sent on when they are complete; until then another replica can be asked."""
FRAME_BYTES = 64 << 20
HOPS = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding")
)
"""Headers that are about one connection."""
NOT_PASSED = HOPS | {"content-length", "date", "server"}


class LostError(Exception):
    """The replica has gone, or will not go on."""


class EndingError(LostError):
    """The replica finishes what it can and takes no more."""


class LeftError(Exception):
    """The client has gone."""


NOT_REACHED = (EndingError, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


Another = Callable[[], Awaitable[None]]
"""Have another replica begun, and wait until it is there. Raises InferError if there cannot be one."""


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


class Asker(Protocol):
    """What an exchange needs of the ingress that it is a part of."""

    @property
    def fleet(self) -> Fleet: ...
    @property
    def counts(self) -> Counts: ...
    @property
    def server(self) -> ServerSettings: ...
    @property
    def session(self) -> aiohttp.ClientSession: ...
    @property
    def patience_s(self) -> float:
        """After how many seconds a replica that does not answer has been replaced at the latest."""
        ...

    def asking(self, name: str) -> AbstractAsyncContextManager[None]:
        """While a replica is asked. Raises LostError if it leaves, or no longer gets on, or what ``check`` raises."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError once answers are not to go on."""
        ...


class Exchange:
    """One client's request, and the replicas that are asked for its answer."""

    def __init__(
        self,
        ingress: Asker,
        http: web.Request,
        outgoing: Outgoing,
        headers: CIMultiDict[str],
        another: Another | None = None,
    ) -> None:
        """One that can ask for ``another`` replica waits for it even before the client has got anything."""
        self._ingress = ingress
        self._another = another
        self._http = http
        self._outgoing = outgoing
        self._headers = headers
        self._response: web.StreamResponse | None = None
        """What the client gets, once its headers are sent."""
        self._client_stream = ClientStream()
        self._lost = 0
        """How many replicas were lost since there was anything new to tell the client."""
        self._stall_s = ingress.server.stall_timeout_s

    async def run(self) -> web.StreamResponse:
        """The whole answer. What goes wrong before it begins is raised; later it is the answer's last event."""
        try:
            return await self._answered()
        except LeftError:
            raise ConnectionResetError("the client has left") from None
        except Exception as error:
            if self._response is None or not self._response.prepared:
                raise
            if isinstance(error, InferError):
                return await self._fail(str(error))
            log.exception("a stream failed")  # its status is sent, so that it cannot become an error's
            return await self._fail("The ingress failed in the middle of the answer; its log says how.")

    async def _answered(self) -> web.StreamResponse:
        ingress, fleet = self._ingress, self._ingress.fleet
        without: set[str] = set()
        refused: _Refused | None = None
        deadline = 0.0
        while True:
            choice = fleet.router.choose(self._outgoing.chain, without) if len(without) < MOST_REFUSED else None
            if choice is None:
                if refused is not None and self._response is None:
                    return web.Response(status=refused.status, headers=refused.headers, body=refused.body)
                deadline = deadline or time.monotonic() + max(RESUME_S, ingress.patience_s)
                await self._later(deadline)
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
                    raise EngineDeadError(message) from None
                if self._response is None:
                    ingress.counts.retried += 1
                elif self._outgoing.seeded and self._streamed and self._client_stream.known:
                    ingress.counts.resumed += 1
                else:
                    message = "The replica that answered was lost in the middle of its answer; try again."
                    raise EngineDeadError(message) from None
                continue
            except DivergedError:
                raise EngineDeadError(
                    "The replica that answered was lost, and another gives another answer to the same request; do they "
                    "run on different hardware or settings?"
                ) from None
            finally:
                fleet.router.end(begun)
            if not isinstance(done, _Refused):
                return done
            refused = done
            without.add(name)

    @property
    def _streamed(self) -> bool:
        return self._response is not None and self._response.content_type in STREAMS

    async def _later(self, deadline: float) -> None:
        """Wait until something about the replicas changes. Raises InferError if there is nothing to wait for, or the
        time is over."""
        fleet = self._ingress.fleet
        self._ingress.check()
        if self._another is not None and not fleet.urls:
            return await self._another()
        if self._response is None and self._another is None:
            raise EngineDeadError("No replica can take requests at the moment; try again.")
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await fleet.changed()
        except TimeoutError:
            message = "The replica that answered was lost, and no other can take over; try again."
            raise EngineDeadError(message) from None

    async def _ask(self, name: str) -> web.StreamResponse | _Refused:
        """Send the request to a replica and its answer to the client. Raises LostError, DivergedError or what aiohttp
        raises if the connection fails."""
        http = self._http
        # Of what the client wrote, the path alone: before it may stand a host, to which the key is not to go.
        url = URL(self._ingress.fleet.urls[name] + http.rel_url.raw_path_qs, encoded=True)
        async with (
            self._ingress.asking(name),
            self._ingress.session.request(
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
        body = written.numbered(written.failure(error_body(message, "server_error")), self._client_stream.count())
        before, behind = written.AROUND
        data = written.head(body) + before + json.dumps(body).encode() + behind + written.DONE
        await self._write(response, data)
        await self._write(response)
        return response
