"""What a replica tells ingresses of itself: GET /ray/state."""

from __future__ import annotations

import secrets
from collections import deque

from aiohttp import web

from infer.contracts.records import RequestRecord
from infer.contracts.server import Route
from infer_router.held import HeldBlocks, from_baggage
from infer_server.http.access import INSIDE
from infer_server.service import Service

MOST_ENDED = 4096
"""How many ended requests may wait to be accounted for; older ones are not."""


class State:
    """The handler of GET /ray/state, and an observer of requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._held = HeldBlocks(service.served.cache_tokens, secrets.token_hex(6))
        self._ended: deque[RequestRecord] = deque(maxlen=MOST_ENDED)
        """Written by the engine's thread."""
        self._observed = False

    def infer_request_finished(self, record: RequestRecord) -> None:
        if "baggage" in record.trace and record.num_generated:
            self._ended.append(record)

    async def handle(self, http: web.Request) -> web.Response:
        if not self._observed:  # a server that no ingress asks has nothing to do
            self._service.observe(self)
            self._observed = True
        while self._ended:
            record = self._ended.popleft()
            self._held.used(from_baggage(record.trace["baggage"]), record.num_prompt + record.num_generated)
        version, held, forgotten = self._held.since(http.query.get("since", ""))
        loop = self._service.engine_loop
        return web.json_response(
            {
                "version": version,
                "taking": loop.accepting,
                "stuck": loop.stuck,
                "open": max(loop.num_open, http.app[INSIDE].count),  # those that wait for the engine among them
                "held": held,
                "forgotten": forgotten,
            }
        )


def routes(service: Service) -> list[Route]:
    state = State(service)
    return [Route("GET", "/ray/state", state.handle, "What ingresses need to know.", None)]
