"""The HTTP server: routes, life and death."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from infer.assemble import Served, start
from infer.engine.loop import AsyncDoor, EngineLoop
from infer.errors import SettingsError
from infer.plugins import Plugins
from infer.server import answers
from infer.server.access import access_log, allow_origin, authorize, guard, log_to_stderr, preflight
from infer.server.chat_completions import Chat
from infer.server.completions import Completions
from infer.server.decisions import Decisions
from infer.server.http_errors import NotFoundError, Protocol, errors
from infer.server.metrics import Metrics
from infer.server.openapi import Route, pages
from infer.server.rendering import Renderer
from infer.server.responses import Responses
from infer.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DecisionsRequest,
    DetokenizeRequest,
    ResponsesRequest,
    SystemOneRequest,
    TokenizeRequest,
)
from infer.server.service import Service
from infer.server.tokenization import Tokenization
from infer.settings import Settings

log = logging.getLogger(__name__)

KEEPALIVE_S = 15.0
LEAVE_S = 1.5
"""From the engine's failure to the end of the process, at most."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(settings: Settings, plugins: Plugins) -> None:
    """Load the model, serve until SIGINT or SIGTERM, drain, stop. Raises InferError."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _leave(number))
    sockets = bind(settings.server.host, settings.server.port)
    metrics = Metrics()
    plugins.manager.register(metrics)
    engine_loop, served = start(settings, plugins)
    engine_loop.ended.add_done_callback(_leave_soon)
    try:
        log_to_stderr()
        asyncio.run(serve(engine_loop, served, metrics, settings, sockets))
    finally:
        engine_loop.close()


def _leave(number: int) -> None:
    """End at once, whatever native code is under way: before there is anything to finish, or when told twice."""
    print(f"infer: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


async def serve(
    engine_loop: EngineLoop, served: Served, metrics: Metrics, settings: Settings, sockets: Sequence[socket.socket]
) -> None:
    """Serve until a signal; then let the requests under way finish within ``drain_timeout_s``. A second signal ends the
    process. Raises EngineDeadError once the engine has failed and those under way have had a second to be told."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled(number: int) -> None:
        if stop.is_set():
            _leave(number)
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, signalled, number)
    app = make_app(engine_loop, served, metrics, settings)
    # What is loaded by now stays; looking through it again and again would hold up a step each time.
    gc.collect()
    gc.freeze()
    async with listen(app, sockets) as url:
        ended = asyncio.wrap_future(engine_loop.ended)
        ended.add_done_callback(lambda _: stop.set())
        print(f"infer: ready on {url}", flush=True)
        await stop.wait()
        log.info("draining %d requests", engine_loop.num_open)
        await asyncio.to_thread(engine_loop.close, settings.server.drain_timeout_s)
        await ended


def _leave_soon(ended: Future[None]) -> None:
    """A process whose engine has failed ends soon, whatever a thread or a client may hold up."""
    if ended.exception() is not None:
        timer = threading.Timer(LEAVE_S, os._exit, [1])
        timer.daemon = True
        timer.start()


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for every address of the host. Raises SettingsError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"server.host = {host!r} is no address of this machine: {error}.") from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(bound := socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # With port 0, all addresses share the one that the first got.
            bound.bind((address[0], sockets[0].getsockname()[1] or port, *address[2:]))
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise _taken(host, port, error) from None
    return sockets


def _taken(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"server.port = {port} cannot be listened on at {host}: {error.strerror}; stop what uses it, or give another "
        "port (0 for any free one)."
    )


@asynccontextmanager
async def listen(app: web.Application, sockets: Sequence[socket.socket]) -> AsyncIterator[str]:
    """Serve the app, to the end of the block. Gives the address."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its handler, and so its request
        shutdown_timeout=1.0,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    try:
        assert runner.server is not None
        how: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_S, "access_log": None, "auto_decompress": False}
        protocol = functools.partial(Protocol, runner.server, loop=loop, **how)
        try:
            listening = [await loop.create_server(protocol, sock=bound) for bound in sockets]
        except OSError as error:  # another has bound it as well, and was faster
            host, port = sockets[0].getsockname()[:2]
            raise _taken(host, port, error) from None
        try:
            address, port = sockets[0].getsockname()[:2]
            yield f"http://{f'[{address}]' if ':' in address else address}:{port}"
        finally:
            for server in listening:
                server.close()  # not waited for: it would wait for clients that keep their connection
    finally:
        await runner.cleanup()


def make_app(engine_loop: EngineLoop, served: Served, metrics: Metrics, settings: Settings) -> web.Application:
    """The routes. Call it inside the event loop that will serve them."""
    server = settings.server
    renderer = None if served.template is None else Renderer(served.template)
    service = Service(served, AsyncDoor(engine_loop), renderer, server)
    chat = Chat(service, settings.model)
    tokenization = Tokenization(service, chat)
    decisions = Decisions(service)
    metrics.watch(engine_loop, served, server.metrics_names, settings.engine.max_tokens_per_step)
    entry: answers.Model = {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "infer",
        "max_model_len": served.max_seq_len,
        "vocab_size": served.vocab_size,
        "exact": served.exact,
        "default_sampling_params": dict(served.sampling),
    }

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [entry]})

    async def model(http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if name != served.name:
            raise NotFoundError(
                f"The model {name!r} is not served here; this server has {served.name!r}.", code="model_not_found"
            )
        return web.json_response(entry)

    async def health(http: web.Request) -> web.Response:
        alive = engine_loop.healthy
        return web.json_response({"status": "ok" if alive else "dead"}, status=200 if alive else 503)

    async def ready(http: web.Request) -> web.Response:
        takes = engine_loop.accepting
        return web.json_response({"status": "ready" if takes else "draining"}, status=200 if takes else 503)

    routes = [
        Route(
            "POST",
            "/v1/chat/completions",
            chat.handle,
            "Go on with a conversation.",
            answers.ChatCompletion,
            ChatRequest,
            answers.ChatChunk,
        ),
        Route(
            "POST",
            "/v1/completions",
            Completions(service).handle,
            "Continue texts.",
            answers.Completion,
            CompletionRequest,
            answers.Completion,
        ),
        Route(
            "POST",
            "/v1/responses",
            Responses(service, chat).handle,
            "OpenAI's responses: reasoning and text, and nothing is stored.",
            answers.Response,
            ResponsesRequest,
            answers.ResponseEvent,
        ),
        Route(
            "POST",
            "/v1/decisions",
            decisions.handle,
            "Answer typed questions on an input, as OpenAI asks them.",
            answers.Decision,
            DecisionsRequest,
        ),
        Route(
            "POST",
            "/v1/systemone",
            functools.partial(decisions.handle, model=SystemOneRequest),
            "Answer typed questions on a state, as TypeSafe's System One asks them.",
            answers.SystemOne,
            SystemOneRequest,
        ),
        Route("POST", "/tokenize", tokenization.tokenize, "Text to token ids.", answers.Tokenized, TokenizeRequest),
        Route(
            "POST", "/detokenize", tokenization.detokenize, "Token ids to text.", answers.Detokenized, DetokenizeRequest
        ),
        Route("GET", "/tokenizer_info", tokenization.info, "What the tokenizer is.", answers.TokenizerInfo),
        Route("GET", "/v1/models", models, "The model that is served.", answers.Models),
        Route("GET", "/v1/models/{model:.+}", model, "The model of this name.", answers.Model),
        Route("GET", "/health", health, "200 while the engine lives.", answers.Status),
        Route("GET", "/ready", ready, "200 while new requests are taken.", answers.Status),
        Route("GET", "/metrics", metrics.handle, "Figures for Prometheus.", "text/plain"),
    ]
    # The outermost comes first: whatever goes wrong inside has a status by the time it is logged.
    keys = [key.get_secret_value() for key in server.api_keys]
    app = web.Application(
        middlewares=[
            access_log(server.access_log),
            errors,
            *((preflight(server.cors_origins),) if server.cors_origins else ()),
            authorize(keys) if keys else guard(server.host),
        ],
        client_max_size=server.max_body_bytes,
    )
    if server.cors_origins:
        app.on_response_prepare.append(allow_origin(server.cors_origins))
    for route in routes:
        app.router.add_route(route.method, route.path, route.handler)
    openapi, docs = pages(routes, served.name)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", docs)
    app.on_cleanup.append(lambda app: service.close())
    app.on_startup.append(lambda app: chat.prepare())
    return app
