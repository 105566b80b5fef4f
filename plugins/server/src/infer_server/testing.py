"""A server in a thread of this process, for tests of endpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from infer.assemble.assembly import start
from infer.engine.loop import EngineLoop
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_server.app import make_app
from infer_server.http.sockets import bind, listen


class Serving(NamedTuple):
    """A running server."""

    url: str
    engine_loop: EngineLoop


@contextmanager
def serving(path: str, *, plugins: Sequence[object] | Plugins = (), **sections: Mapping[str, Any]) -> Iterator[Serving]:
    """Serve a model on a free port until the end of the block. The arguments are those of ``infer.LLM``; ``plugins``
    may be all that there are, too, as they were discovered. Raises InferError if the server cannot start."""
    model, server = {"path": path, **sections.pop("model", {})}, {"access_log": False, **sections.pop("server", {})}
    found = plugins if isinstance(plugins, Plugins) else Plugins.discover(plugins)
    overrides = {"model": model, "server": server, **sections}
    settings = load_settings(found, env={}, overrides=overrides, read_file=False).settings
    engine_loop, served = start(settings, found)
    loop, stop, began = asyncio.new_event_loop(), asyncio.Event(), Future[str]()

    async def serve() -> None:
        try:
            app = make_app(engine_loop, served, found, settings)
            async with listen(app, bind("127.0.0.1", 0), settings.server.stall_timeout_s) as url:
                began.set_result(url)
                await stop.wait()
        except BaseException as error:
            if began.done():
                raise
            began.set_exception(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield Serving(began.result(60), engine_loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        engine_loop.close()  # which may have events for the event loop until then
        loop.close()
