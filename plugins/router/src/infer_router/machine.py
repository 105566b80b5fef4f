"""This machine: the processes that serve models, and the arithmetic of what they take."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import aiohttp

from infer.errors import EngineDeadError, InferError, SettingsError
from infer_router.process import FAULT, HOLDS_S, MODULES, MODULES_ASKED, READY, ROOM, SIZES, TAKEN, WARM, ending
from infer_router.spares import Spares

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "infer_router.process")
HEALTH_TIMEOUT_S = 5.0
PIECE_BYTES = 1 << 16
MOST_LINE = 1 << 24
MOST_MODULES = 8192
"""How many modules a process that waits for a model imports at most: those of the latest models."""
WARM_S = 120.0
"""How long such a process may take until it waits: many times what it needs on a machine that is not busy."""
ORDERS_S = 30.0
"""How long one that waits may take to say that it has read what its model is."""


class EngineProcess:
    """A process that serves a model (``infer_router.rules.Engine``)."""

    def __init__(
        self, process: Process, url: str, session: aiohttp.ClientSession, learn: Callable[[Sequence[str]], None]
    ) -> None:
        """``learn`` is told which modules it came to import."""
        self._process, self._session = process, session
        self.url = url
        self._reading = asyncio.create_task(_read(process, learn))  # so that a full pipe never holds it up

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    async def healthy(self) -> bool:
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self._session.get(f"{self.url}/health") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def end(self, drain_s: float) -> None:
        await _end(self._process, drain_s)


class LocalMachine:
    """Starts processes for models, each by its ``settings``. Use it as ``async with``; none of them outlives that."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self.memory: int | None = None
        """What models may take together; ``start`` and ``size`` need it."""
        self._settings = settings
        self._live: set[Process] = set()
        self._spares = Spares(self._prepared)
        self._served = set[str]()
        """The models that a process has served."""
        self._latest = deque[str](maxlen=2)
        """The models that were loaded last. The one before the other is the likeliest to be asked for again."""
        self._tokenizers = dict[str, str | None]()
        """The file of each model's tokenizer, if it is small."""
        self._modules = dict[str, None]()
        """What their processes came to import, the latest first."""
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._spares.may_begin(False)
        if (spare := await self._spares.take()) is not None:
            await _end(spare[0], 0.0)
        live = [process for process in self._live if process.returncode is None]
        await asyncio.gather(*(_end(process, HEALTH_TIMEOUT_S) for process in live))
        await self._session.close()

    @property
    def pids(self) -> list[int]:
        """The processes that have not ended."""
        return [process.pid for process in self._live if process.returncode is None]

    async def free(self) -> int:
        """The memory that is free now where models run. Raises InferError."""
        name = next(iter(self._settings))
        return int((await self._sized(name, None))["bytes"])

    async def size(self, name: str) -> Mapping[str, Any]:
        found = await self._sized(name, self.memory)
        self._tokenizers[name] = found.pop("tokenizer", None)
        return found

    async def _sized(self, name: str, memory: int | None) -> dict[str, Any]:
        settings = {**self._settings[name], "log": {"level": "warning"}}  # what it chooses, the engine says again
        process = await self._started("sizes", json.dumps({"settings": settings, "memory": memory}))
        async with _ended_by_error(process):
            line = await _said(process, SIZES)
            await _end(process, 0.0)
            found: dict[str, Any] = json.loads(line.removeprefix(SIZES))
            return found

    async def start(self, name: str) -> EngineProcess:
        process = await self._ordered(name) or await self._started("engine", self._orders(name, room=True))
        async with _ended_by_error(process):
            line = await _said(process, READY)
            self._served.add(name)
            self._latest.append(name)
            await _tell(process, MODULES_ASKED)
            return EngineProcess(process, line.removeprefix(READY).strip(), self._session, self._learn)

    def _learn(self, modules: Sequence[str]) -> None:
        self._modules = dict.fromkeys(itertools.islice(dict.fromkeys((*modules, *self._modules)), MOST_MODULES))

    def expect(self, name: str) -> None:
        if name in self._served:  # otherwise it might have to be downloaded, which takes memory
            self._spares.tell(name, self._orders(name, room=False))

    def may_spare(self, room: bool) -> None:
        self._spares.may_begin(room)

    def _orders(self, name: str, *, room: bool) -> str:
        again = name in self._served
        return json.dumps({"settings": self._settings[name], "memory": self.memory, "again": again, "room": room})

    async def _ordered(self, name: str) -> Process | None:
        """The spare process, which has read its orders. None if there is none, or it has not read them."""
        try:
            if (spare := await self._spares.take()) is None:
                return None
            process, told = spare
            async with _ended_by_error(process):
                # Half the time, since the process must not end meanwhile.
                if told is not None and (told.name != name or time.monotonic() - told.at > HOLDS_S / 2):
                    raise EngineDeadError("the process that waited was told of another model, or long ago.")
                async with asyncio.timeout(WARM_S):
                    await _said(process, WARM)
                async with asyncio.timeout(ORDERS_S):
                    await _tell(process, self._orders(name, room=True) if told is None else ROOM)
                    await _said(process, TAKEN)
            return process
        except TimeoutError:
            why = "the process that waited for it does not answer."
        except (EngineDeadError, OSError) as error:
            why = str(error)
        log.warning("model %s: %s It gets a process that begins anew.", name, why)
        return None

    async def _prepared(self) -> Process:
        """One that waits for its orders."""
        process = await self._created("spare")
        assert process.stdin is not None
        tokenizer = self._tokenizers.get(self._latest[0]) if self._latest else None
        told = {"modules": sorted(self._modules), "tokenizer": tokenizer, "within_s": WARM_S}
        process.stdin.write(json.dumps(told).encode() + b"\n")  # not drained: it may not have begun to read
        return process

    async def _started(self, kind: str, first: str) -> Process:
        process = await self._created(kind)
        async with _ended_by_error(process):
            await _tell(process, first)
        return process

    async def _created(self, kind: str) -> Process:
        creating = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(*COMMAND, kind),
                stdin=PIPE,
                stdout=PIPE,
                limit=MOST_LINE,
                start_new_session=True,  # Ctrl-C is for this process, which drains
            )
        )
        try:
            process = await asyncio.shield(creating)
        except asyncio.CancelledError:
            await _end(await creating, 0.0)
            raise
        self._live = {each for each in self._live if each.returncode is None} | {process}
        return process


@contextlib.asynccontextmanager
async def _ended_by_error(process: Process) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await _end(process, 0.0)
        raise


async def _tell(process: Process, line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended, and its output says why
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()


async def _said(process: Process, begin: str) -> str:
    """The line of a process's output that begins so. Raises SettingsError with its own sentence, or EngineDeadError if
    it ends without one."""
    assert process.stdout is not None
    try:
        async for data in process.stdout:
            line = data.decode(errors="replace")
            if line.startswith(begin):
                return line
            if line.startswith(FAULT):
                raise SettingsError(line.removeprefix(FAULT).strip())
    except ValueError:
        raise EngineDeadError("its process writes a line without end to stdout.") from None
    raise EngineDeadError(f"its process {ending(await process.wait())} before it served; the log says why.")


async def _read(process: Process, learn: Callable[[Sequence[str]], None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(InferError, ValueError):  # it has ended, which others wait for, or was interrupted
        learn(json.loads((await _said(process, MODULES)).removeprefix(MODULES)))
    while await process.stdout.read(PIECE_BYTES):
        pass


async def _end(process: Process, drain_s: float) -> None:
    """Have a process end, and its children: kill them if it has not ended after some seconds."""
    if process.returncode is None and drain_s > 0:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    await process.wait()
