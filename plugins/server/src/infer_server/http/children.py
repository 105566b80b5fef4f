"""Child processes for work whose time or memory nothing else bounds: a process that exceeds its limits ends, and
nothing else does.

Run as a file, this module is such a process: ``python child.py MODULE SECONDS BYTES`` imports MODULE and answers every
message by the module's ``worker``. Messages go through pipes, each preceded by its length.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import importlib.util
import os
import resource
import signal
import struct
import sys
import types
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
OUT_OF_MEMORY = 3
"""The exit status after a MemoryError. Native code that runs out of memory aborts the process."""
PATIENCE = 10.0
"""How many times its seconds of computing a message may take by the clock: the process may wait for other processes."""
KEPT = frozenset(("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"))
"""What children get of the environment, besides locales, Python's variables and the number of threads."""
KEPT_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")


class ChildError(Exception):
    """The work was stopped because it took too long or too much memory."""


class KilledError(ChildError):
    """Something outside has ended the process, for which the work need not be to blame."""


def environment() -> dict[str, str]:
    """The environment for a child process, without secrets: a stranger's template or grammar that breaks out of its
    sandbox must find neither the server's keys nor the tokens of those who started it."""
    return {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}


async def kill(process: Process) -> None:
    """Kill a process that has not ended, and wait until it has."""
    if process.returncode is None:
        process.kill()
    await process.wait()


class Child:
    """Answers one message after the other, each within ``seconds`` of computing, in a process that may take ``memory``
    bytes more than it had when it was ready.

    ``module`` has a function ``worker``, which is called once, with the message ``first``, and returns the function
    that answers messages. The process is started when there is work, and started again after it has ended for any
    reason. Use a Child in one event loop."""

    def __init__(self, module: str, first: Callable[[], bytes], *, seconds: float, memory: int) -> None:
        self._argv = (sys.executable, "-P", __file__, module, str(seconds), str(memory))
        self._first = first
        self._timeout_s = PATIENCE * seconds
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def ask(self, message: bytes) -> bytes:
        """The answer to a message. Raises ChildError. Canceling the caller ends the process. If something outside may
        have ended it, the message is sent once more."""
        async with self._lock:
            try:
                try:
                    return await self._ask(message)
                except KilledError:
                    await self._kill()
                    return await self._ask(message)
            except BaseException:  # what is under way cannot be told from the next answer
                await self._kill()
                raise

    async def begin(self) -> None:
        """Start the process if there is none, so that the first message need not wait for that."""
        async with self._lock:
            if self._process is None:
                await self._start()

    async def close(self) -> None:
        """End the process, whatever it is doing."""
        await self._kill()

    async def _ask(self, message: bytes) -> bytes:
        if self._process is not None and self._process.returncode is not None:
            await self._kill()  # something outside has ended it
        process = self._process
        try:
            async with asyncio.timeout(self._timeout_s):
                if process is None:
                    process = await self._start()
                await _write(process, message)
                assert process.stdout is not None
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                return await process.stdout.readexactly(length)
        except TimeoutError:
            raise ChildError("it takes too long") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            assert process is not None
            status = await process.wait()
            if status == -signal.SIGPROF:
                raise ChildError("it takes too long") from None
            if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV):
                raise ChildError("it takes too much memory") from None
            if status in (-signal.SIGKILL, -signal.SIGTERM):  # the system may be short of memory
                raise KilledError("its process was killed") from None
            raise RuntimeError(f"{self._argv[3]} ended with status {status}") from None

    async def _start(self) -> Process:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=PIPE,
            stdout=PIPE,
            limit=1 << 24,
            env=environment(),
            start_new_session=True,  # Ctrl-C must reach only the server, which ends its processes itself
        )
        await _write(process, self._first())
        return process

    async def _kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await kill(process)


async def _write(process: Process, message: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(LENGTH.pack(len(message)))
    process.stdin.write(message)
    await process.stdin.drain()


def give_back() -> None:
    """Return what malloc keeps of freed memory to the system. glibc keeps small blocks, however many, for as long as
    one of a later time lies behind them."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def main() -> None:
    _, module, seconds, memory = sys.argv
    # Importing the real package takes a while, and only plugins' modules need it.
    spec = importlib.util.find_spec("infer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = types.ModuleType("infer")
    package.__path__ = [*spec.submodule_search_locations]
    package.__getattr__ = functools.partial(_whole, package)  # type: ignore[method-assign]
    sys.modules["infer"] = package
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    answer = importlib.import_module(module).worker(_read(source))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int(memory)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    gc.freeze()
    gc.disable()  # collect only between messages: with a million objects, collections take most of a message's time
    while True:
        _answer_one(answer, source, sink, float(seconds))
        gc.collect()
        give_back()


def _answer_one(answer: Callable[[bytes], bytes], source: BinaryIO, sink: BinaryIO, seconds: float) -> None:
    message = _read(source)
    # SIGPROF ends the process, even within native code. Computing counts, and not how busy the machine is.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        result = answer(message)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    signal.setitimer(signal.ITIMER_PROF, 0)
    sink.write(LENGTH.pack(len(result)))
    sink.write(result)
    sink.flush()


def _whole(package: types.ModuleType, name: str) -> object:
    """An attribute of the package, which is now executed."""
    if name.startswith("__"):
        raise AttributeError(name)
    file = Path(package.__path__[0]) / "__init__.py"
    exec(compile(file.read_text(), file, "exec"), vars(package))
    return getattr(package, name)


def _read(source: BinaryIO) -> bytes:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        sys.exit(0)  # the server has ended
    return source.read(LENGTH.unpack(head)[0])


if __name__ == "__main__":
    main()
