"""``infer serve`` with several models: the server, and the task that loads them."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from infer.contracts.command import CommandContext
from infer.contracts.sections import ServerSettings
from infer.errors import EngineDeadError
from infer_router.gateway import Gateway
from infer_router.loader import Loader
from infer_router.machine import LocalMachine
from infer_router.plan import Plan, several
from infer_router.rules import Machine, Rules
from infer_router.sizes import PROCESS_BYTES
from infer_server.http.access import announce, log_to_stderr
from infer_server.http.sockets import bind, listen

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(context: CommandContext, words: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM, then drain and stop. Raises InferError."""
    plan = several(context, words)
    asyncio.run(serve(plan, context.settings.server))
    return 0


async def serve(plan: Plan, server: ServerSettings) -> None:
    """Serve until a signal, then let running requests finish within ``drain_timeout_s``. A second signal does not wait
    for them. Raises EngineDeadError if the task that owns the models has failed."""
    signaled = [asyncio.Event(), asyncio.Event()]
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        next((event for event in signaled if not event.is_set()), signaled[-1]).set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(_serve(plan, server, signaled[0]))
    hurry = asyncio.create_task(signaled[1].wait())
    try:
        await asyncio.wait((serving, hurry), return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurry.cancel()
        serving.cancel()  # if it is still there: whatever it has begun ends with it
        with suppress(asyncio.CancelledError):
            await serving


async def _serve(plan: Plan, server: ServerSettings, stop: asyncio.Event) -> None:
    log_to_stderr()
    sockets = bind(server.host, server.port)
    async with LocalMachine(plan.engines) as machine:
        gib = plan.router.memory_gib
        memory = await _unless(stop, machine.free()) if gib is None else int(gib * 2**30)
        if memory is None:
            return
        machine.memory = memory
        log.info("%d models, which may take %.2f GiB together", len(plan.engines), memory / 2**30)
        async with gateway(plan, server, machine, memory, sockets) as (made, url, owning):
            announce(f"infer: ready on {url}")
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((owning, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            draining = asyncio.create_task(made.drain())
            try:
                await asyncio.wait(
                    (owning, draining), timeout=server.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                draining.cancel()


@asynccontextmanager
async def gateway(
    plan: Plan, server: ServerSettings, machine: Machine, memory: int, sockets: Sequence[socket.socket]
) -> AsyncIterator[tuple[Gateway, str, asyncio.Task[None]]]:
    """Serve models that a machine loads into so much memory, until the end of the block. Yields the gateway, its URL
    and the task that owns the models, which runs as long as nothing is wrong. Raises EngineDeadError at the end if it
    has failed."""
    rules = Rules(
        memory=memory,
        keep_alive_s=plan.keep_alive_s,
        pinned=plan.pinned,
        max_waiting=plan.router.max_waiting,
        load_timeout_s=plan.router.load_timeout_s,
        stuck_timeout_s=plan.router.stuck_timeout_s,
        spare_bytes=PROCESS_BYTES if plan.router.spare else math.inf,
        sizing_bytes=PROCESS_BYTES,
    )
    loader = Loader(machine, rules, lambda name, url: made.changed(name, url), lambda name: made.working(name))
    made = Gateway(plan, server, loader)
    async with made, listen(made.app(), sockets, server.stall_timeout_s) as url:
        owning = asyncio.create_task(loader.run())
        try:
            yield made, url, owning
        finally:
            owning.cancel()
            await asyncio.wait((owning,))
            made.end()
    if not owning.cancelled() and (error := owning.exception()) is not None:
        log.error("the task that owns the models has failed", exc_info=error)
        raise EngineDeadError(
            f"The task that loads models has failed ({type(error).__name__}: {error}); the server ends, and its log "
            "says more. Start it again."
        )


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, int]) -> int | None:
    """What the work returns, or None if the server is to stop before that."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait((working, stopping))
