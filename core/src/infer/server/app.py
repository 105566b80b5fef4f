"""The HTTP server: routes, life and death."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time

from aiohttp import web

from infer.assemble import Served, start
from infer.engine.loop import AsyncDoor, EngineLoop
from infer.plugins import Plugins
from infer.server.completions import Completions
from infer.server.errors import errors
from infer.server.metrics import Metrics
from infer.settings import ServerSettings, Settings

log = logging.getLogger(__name__)

KEEPALIVE_S = 15.0


def run(settings: Settings, plugins: Plugins) -> None:
    """Load the model, serve until SIGINT or SIGTERM, drain, stop."""
    metrics = Metrics()
    plugins.manager.register(metrics)
    engine_loop, served = start(settings, plugins)
    # What is loaded by now stays; looking through it again and again would hold up a step each time.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve(engine_loop, served, metrics, settings.server))
    finally:
        engine_loop.close()


async def serve(engine_loop: EngineLoop, served: Served, metrics: Metrics, settings: ServerSettings) -> None:
    """Serve until a signal; then let the requests under way finish within ``drain_timeout_s``."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        make_app(engine_loop, served, metrics, settings),
        handler_cancellation=True,  # a client that leaves ends its handler, and so its request
        keepalive_timeout=KEEPALIVE_S,
        access_log=None,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.port)
    try:
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"infer: ready on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        await stop.wait()
        log.info("draining %d requests", engine_loop.num_open)
        await site.stop()
        await asyncio.to_thread(engine_loop.close, settings.drain_timeout_s)
    finally:
        await runner.cleanup()


def make_app(engine_loop: EngineLoop, served: Served, metrics: Metrics, settings: ServerSettings) -> web.Application:
    """The routes. Call it inside the event loop that will serve them."""
    app = web.Application(middlewares=[errors], client_max_size=settings.max_body_bytes)
    completions = Completions(served, AsyncDoor(engine_loop), settings.body_timeout_s, settings.stall_timeout_s)
    created = int(time.time())

    async def models(http: web.Request) -> web.Response:
        entry = {
            "id": served.name,
            "object": "model",
            "created": created,
            "owned_by": "infer",
            "max_model_len": served.max_seq_len,
            "vocab_size": served.vocab_size,
            "exact": served.exact,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def health(http: web.Request) -> web.Response:
        """200 while the engine's thread lives."""
        alive = engine_loop.healthy
        return web.json_response({"status": "ok" if alive else "dead"}, status=200 if alive else 503)

    async def ready(http: web.Request) -> web.Response:
        """200 while new requests are taken."""
        takes = engine_loop.accepting
        return web.json_response({"status": "ready" if takes else "draining"}, status=200 if takes else 503)

    app.router.add_post("/v1/completions", completions.handle)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics.handle)
    return app
