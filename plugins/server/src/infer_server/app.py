"""The HTTP server: its routes, start and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

from aiohttp import web

from infer.assemble.assembly import start
from infer.assemble.served import Served
from infer.contracts.sections import Settings
from infer.engine.loop import EngineLoop
from infer.plugins.discovery import Plugins
from infer_server.http.access import (
    INSIDE,
    Inside,
    access_log,
    allow_origin,
    announce,
    authorize,
    guard,
    log_to_stderr,
    preflight,
)
from infer_server.http.errors import errors, expected
from infer_server.http.quotas import refund
from infer_server.http.sockets import bind, listen
from infer_server.http.wire import OPENAI, WIRE_FORMATS, WireFormat
from infer_server.openapi import PAGES, Place, pages
from infer_server.routing import chosen, dispatched, gather
from infer_server.service import Service

log = logging.getLogger(__name__)

LEAVE_S = 1.5
"""The process ends at most this many seconds after the engine has failed."""
SWITCH_S = 0.0005
"""How long a thread computes in Python before another one's turn comes. A step releases the GIL in each native call.
Where a third thread computes meanwhile, each call waits so long to have it back: Python's own 5 ms make a step many
times as long. The event loop and the engine, which alternate, gain too."""
BEGIN_S = 2.0
"""How long after the start the child process of large bodies begins, so that the first answer has the processor to
itself. A large body that comes before starts it."""
SERVICE = web.AppKey("service", Service)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    settings: Settings,
    plugins: Plugins,
    *,
    await_memory: Callable[[], object] | None = None,
    described: bool = False,
) -> None:
    """Load the model, serve until SIGINT or SIGTERM, then drain and stop. ``await_memory`` is that of ``start``. Routes
    need not be tried if another server of these plugins and settings has ``described`` them. Raises InferError."""
    sys.setswitchinterval(SWITCH_S)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _leave(number))
    sockets = bind(settings.server.host, settings.server.port)
    engine_loop, served = start(settings, plugins, await_memory)
    engine_loop.ended.add_done_callback(_leave_soon)
    try:
        log_to_stderr()
        asyncio.run(serve(engine_loop, served, plugins, settings, sockets, described=described))
    finally:
        engine_loop.close()


def _leave(number: int) -> None:
    """End the process at once, even while native code runs. This is for signals during the start, when there is no
    request to finish, and for a second signal."""
    if sys.stderr is not None and select.select([], [sys.stderr], [], 0)[1]:  # a pipe that nobody reads may be full
        print(f"infer: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


async def serve(
    engine_loop: EngineLoop,
    served: Served,
    plugins: Plugins,
    settings: Settings,
    sockets: Sequence[socket.socket],
    *,
    described: bool = False,
) -> None:
    """Serve until a signal, then let running requests finish within ``drain_timeout_s``. A second signal ends the
    process. If the engine fails, running requests have a second to send their errors, and EngineDeadError is raised."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signaled(number: int) -> None:
        if stop.is_set():
            _leave(number)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, signaled, number)
    app = make_app(engine_loop, served, plugins, settings, described=described)
    # What is loaded by now stays, and each collection that looks through it again would hold up a step.
    gc.collect()
    gc.freeze()
    async with listen(app, sockets, settings.server.stall_timeout_s) as url:
        ended = asyncio.wrap_future(engine_loop.ended)
        ended.add_done_callback(lambda _: stop.set())
        beginning = asyncio.create_task(_begin(app[SERVICE]))
        announce(f"infer: ready on {url}")
        await stop.wait()
        beginning.cancel()
        inside = app[INSIDE]
        log.info("draining %d requests", inside.count)
        engine_loop.drain()
        left = asyncio.create_task(inside.leave())  # some may not be in the engine yet: their bodies are being read
        await asyncio.wait((left, ended), timeout=settings.server.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        await asyncio.to_thread(engine_loop.close)
        await ended


async def _begin(service: Service) -> None:
    await asyncio.sleep(BEGIN_S)
    await service.begin()


def _leave_soon(ended: Future[None]) -> None:
    """End the process within ``LEAVE_S`` of the engine's failure, whatever a thread or a client may hold up."""
    if ended.exception() is not None:
        timer = threading.Timer(LEAVE_S, os._exit, [1])
        timer.daemon = True
        timer.start()


def make_app(
    engine_loop: EngineLoop, served: Served, plugins: Plugins, settings: Settings, *, described: bool = False
) -> web.Application:
    """The application: all endpoints, and the middlewares that every request passes. Call it inside the event loop that
    will serve them. Raises PluginError."""
    server = settings.server
    service = Service(engine_loop, served, plugins, settings)
    places = gather(service, plugins, described=described)
    # The outermost middleware comes first: any error inside has become a status by the time it is logged.
    opened: set[web.AbstractRoute] = set()
    spoken: dict[web.AbstractRoute, Place] = {}
    inside = Inside()
    app = web.Application(
        middlewares=[
            access_log(server.access_log),
            errors,
            inside.middleware,
            *((preflight(server.cors_origins),) if server.cors_origins else ()),
            authorize(service.keys, opened) if service.keys else guard(server.host),
            refund(service.quotas),
        ],
        client_max_size=server.max_body_bytes,
    )
    if server.cors_origins:
        app.on_response_prepare.append(allow_origin(server.cors_origins))
    for place in places:
        route = place[0]
        # Only what answers in one piece has headers alone; such a route is open, or says what it answers.
        whole = route.method == "GET" and (route.open or route.answer is not None)
        for method in (route.method, *(("HEAD",) if whole else ())):
            added = app.router.add_route(method, route.path, dispatched(place), expect_handler=expected)
            if route.open:
                opened.add(added)
            spoken[added] = place
    for path, page in zip(PAGES, pages(places, served.name), strict=True):
        app.router.add_get(path, page, expect_handler=expected)
    app[SERVICE], app[INSIDE] = service, inside

    def written(http: web.Request) -> WireFormat:
        place = spoken.get(http.match_info.route)
        return cast(WireFormat, (place and chosen(http, place).wire_format) or OPENAI)

    app[WIRE_FORMATS] = written
    app.on_startup.append(lambda app: service.conversation.prepare())
    app.on_cleanup.append(lambda app: service.close())
    return app
