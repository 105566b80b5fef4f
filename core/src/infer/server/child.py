"""Processes that do what may run away: one that takes too long or too much memory ends, and takes nothing with it.

Run as a file, this is such a process: ``python child.py MODULE SECONDS BYTES`` imports the module and answers every
message with what its ``worker`` makes of it. Messages go through pipes, each behind its length.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import resource
import signal
import struct
import sys
import types
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LENGTH = struct.Struct("<Q")
OUT_OF_MEMORY = 3
"""The exit status of a process whose Python ran out of memory; native code aborts it."""


class ChildError(Exception):
    """The work was stopped: it took longer than it may, or more memory."""


class Child:
    """Answers one message after the other, each within ``seconds`` and ``memory`` bytes more than it began with.

    ``module`` has a function ``worker``, which is called once, with ``first``, and gives the function from a message to
    an answer. The process is started when there is work, and anew after it has ended for whatever reason. Use it in one
    event loop.
    """

    def __init__(self, module: str, first: Callable[[], bytes], *, seconds: float, memory: int) -> None:
        self._argv = (sys.executable, "-P", __file__, module, str(seconds), str(memory))
        self._first = first
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def ask(self, message: bytes) -> bytes:
        """Raises ChildError. A caller that is cancelled ends the work."""
        async with self._lock:
            try:
                return await self._ask(message)
            except BaseException:  # what is under way cannot be told from the next answer
                await self._kill()
                raise

    async def close(self) -> None:
        """End whatever is under way."""
        await self._kill()

    async def _ask(self, message: bytes) -> bytes:
        if self._process is not None and self._process.returncode is not None:
            await self._kill()  # it was ended from outside
        process = self._process
        try:
            if process is None:
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=1 << 24,
                    start_new_session=True,  # Ctrl-C is for the server, which ends its processes itself
                )
                await _write(process, self._first())
            await _write(process, message)
            assert process.stdout is not None
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            return await process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            assert process is not None
            status = await process.wait()
            if status == -signal.SIGALRM:
                raise ChildError("it takes too long") from None
            if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
                raise ChildError("it takes too much memory") from None
            raise RuntimeError(f"{self._argv[3]} ended with status {status}") from None

    async def _kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _write(process: Process, message: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(LENGTH.pack(len(message)))
    process.stdin.write(message)
    await process.stdin.drain()


def main() -> None:
    _, module, seconds, memory = sys.argv
    # The package itself brings torch along, which is neither needed here nor light.
    package = types.ModuleType("infer")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["infer"] = package
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    answer = importlib.import_module(module).worker(_read(source))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int(memory)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    gc.freeze()
    gc.disable()  # while work is under way: looking through a million parts again and again takes most of the time
    while True:
        message = _read(source)
        signal.setitimer(signal.ITIMER_REAL, float(seconds))  # its default is the end, in native code as well
        try:
            found = answer(message)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(LENGTH.pack(len(found)))
        sink.write(found)
        sink.flush()
        gc.collect()


def _read(source: BinaryIO) -> bytes:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        sys.exit(0)  # the server has ended
    return source.read(LENGTH.unpack(head)[0])


if __name__ == "__main__":
    main()
