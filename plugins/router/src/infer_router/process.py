"""Engines and ingresses as processes of their own, which end with whoever started them.

``python -m infer_router.process engine|spare|ingress|sizes`` is such a process. Its first line of input is a JSON
object: the ``settings`` (nested; nothing else is read, neither files nor variables), for an ingress, what its fleet
takes, and for an engine of several, the ``memory`` that all have, whether it serves ``again`` what another one has
served, and whether there is ``room`` for it: if not, it reads what takes little, and waits for the line ``room``. It
says ``infer: ready on URL`` when it serves, or why it cannot. A ``spare`` becomes an engine: it has a line before that
one, with the ``modules`` that engines came to import and the file of a ``tokenizer`` that may be asked for. It
imports the ones, reads the other, waits for the next line, and says when it has read that. With ``sizes``, it says how
much memory the model would take, or without ``memory``, how much is free. It ends when its input does, which is when
its parent has ended in whatever way, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from infer_router.sizes import PROCESS_BYTES, free, reckon

log = logging.getLogger(__name__)

WARM, TAKEN = "infer: warm", "infer: orders taken"
ROOM = "room"
MODULES_ASKED, MODULES = "modules", "infer: modules "
READY = "infer: ready on "
SIZES = "infer: sizes "
FAULT = "infer: it cannot serve: "
"""Before the sentence that says why, in what a process says and in what its parent raises."""
HOLDS_S = 30.0
"""How long what is read without room holds, since files may change: a process that waits longer ends."""
KNOWN_S = 10.0
"""How long to wait for the first engine, so that an ingress in the place of another refuses nobody."""
BIND_S = 20.0
"""How long to wait for a port that another ingress has: the one in whose place this one comes."""


def ending(code: int) -> str:
    """How a process with this exit code has ended."""
    if code >= 0:
        return f"ended with code {code}"
    why: dict[int, str] = {
        signal.SIGKILL: ", as when memory runs out",
        signal.SIGALRM: ", since it was not ready in time",
    }
    return f"was ended by signal {-code}{why.get(-code, '')}"


class Process:
    """The parent's side."""

    def __init__(self, kind: str, first: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "infer_router.process", kind),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which drains
        )
        self.send(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def ready(self) -> str:
        """Wait until it serves. Returns the URL. Raises RuntimeError if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY):
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return line.removeprefix(READY).strip()
            if line.startswith(FAULT):
                raise RuntimeError(line.strip())
        raise RuntimeError(f"the process {ending(self._process.wait())} before it served; its log says why")

    def send(self, value: Mapping[str, Any]) -> None:
        """Raises OSError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def end(self, drain_s: float) -> None:
        """Let it finish what it has, for some seconds."""
        if self.code is None:
            self._process.terminate()
            try:
                self._process.wait(drain_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def main() -> None:
    from infer.errors import InferError

    kind, source = sys.argv[1], sys.stdin
    plugins = _prepared(source) if kind == "spare" else None
    if not (line := source.readline()):
        return  # its parent has ended before it had something to do
    if plugins is not None:
        print(TAKEN, flush=True)
    first, engine = json.loads(line), functools.partial(_engine, plugins=plugins)
    kinds: Mapping[str, Callable[[Mapping[str, Any], IO[str]], None]]
    kinds = {"engine": engine, "spare": engine, "ingress": _ingress, "sizes": _sizes}
    try:
        kinds[kind](first, source)
    except InferError as error:
        print(f"{FAULT}{' '.join(str(error).split())}", flush=True)
        print(f"infer: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    # All is closed. Taking the interpreter, torch and the weights apart takes longer, and the next model waits for it.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _prepared(source: IO[str]) -> Any:
    """The plugins, once everything that engines need is imported. Nothing is set, and of models no more than a
    tokenizer is read."""
    if not (line := source.readline()):
        return None
    told = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, told["within_s"])  # whatever an import holds, the system ends the process
    from infer.plugins.discovery import Plugins
    from infer_server import app  # noqa: F401

    plugins = Plugins.discover()
    for name in told["modules"]:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # an engine that needs it says so
            log.debug("module %s cannot be imported beforehand: %r", name, error)
    if (tokenizer := told["tokenizer"]) is not None:
        _read_beforehand(Path(tokenizer), plugins)
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.collect()
    gc.freeze()  # what is there stays, and no collection of a start needs to look through it
    print(WARM, flush=True)
    return plugins


def _read_beforehand(tokenizer: Path, plugins: Any) -> None:
    from infer.assemble.blueprint import read_beforehand
    from infer.settings import load_settings

    try:
        read_beforehand(tokenizer, load_settings(plugins, env={}, read_file=False).settings, plugins)
    except Exception as error:  # an engine that needs it says so
        log.debug("%s cannot be read beforehand: %r", tokenizer, error)


def _engine(first: Mapping[str, Any], source: IO[str], plugins: Any = None) -> None:
    from infer.plugins.discovery import Plugins
    from infer_server import app

    plugins = plugins or Plugins.discover()
    before, room = {*sys.modules}, threading.Event()

    def hear(line: str) -> None:
        if line.strip() == ROOM:
            room.set()
        if line.strip() == MODULES_ASKED:
            print(f"{MODULES}{json.dumps(sorted({*sys.modules} - before))}", flush=True)

    _listen(source, hear)
    settings = _settings(first, plugins)
    if (memory := first.get("memory")) is not None:
        from infer.assemble.blueprint import bound_memory

        bound_memory(0, max(0, memory - PROCESS_BYTES))  # no larger a cache than by the arithmetic

    def await_memory() -> None:
        if not room.wait(HOLDS_S):
            os._exit(0)  # whatever was to be loaded is not; the next process that waits knows nothing of it

    wait = None if first.get("room", True) else await_memory
    app.run(settings, plugins, await_memory=wait, described=first.get("again", False))


def _sizes(first: Mapping[str, Any], source: IO[str]) -> None:
    from infer.plugins.discovery import Plugins

    _listen(source, lambda line: None)
    plugins = Plugins.discover()
    settings, memory = _settings(first, plugins), first["memory"]
    found = {"bytes": free(settings)} if memory is None else reckon(settings, plugins, memory)
    print(f"{SIZES}{json.dumps(found)}", flush=True)


def _ingress(first: Mapping[str, Any], source: IO[str]) -> None:
    from infer.plugins.discovery import Plugins

    asyncio.run(_serve(first, source, _settings(first, Plugins.discover())))


async def _serve(first: Mapping[str, Any], source: IO[str], settings: Any) -> None:
    from infer_router.fleet import Fleet
    from infer_router.ingress import Ingress, serving
    from infer_router.router import Router
    from infer_server.http.access import log_to_stderr
    from infer_server.http.sockets import bind

    log_to_stderr()
    router = Router(**first["router"])
    fleet = Fleet(router, first["key"])
    ingress = Ingress(fleet, settings.server)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    _listen(source, lambda line: loop.call_soon_threadsafe(fleet.update, json.loads(line)["replicas"]))
    with contextlib.suppress(TimeoutError):  # with no engine, it serves all the same, and says so
        async with asyncio.timeout(KNOWN_S):
            while not fleet.urls:
                await fleet.changed()
    sockets = await asyncio.to_thread(
        _patiently, functools.partial(bind, settings.server.host, settings.server.port), BIND_S
    )
    async with serving(ingress, sockets) as url:
        print(f"{READY}{url}", flush=True)
        await stop.wait()
        ingress.closing = True
        for listening in sockets:  # who comes now is for the next ingress, which may have the port; who is in stays
            loop.remove_reader(listening)
            listening.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + settings.server.drain_timeout_s
        while ingress.open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        ingress.end()


def _settings(first: Mapping[str, Any], plugins: Any) -> Any:
    from infer.settings import load_settings

    settings = load_settings(plugins, env={}, overrides=first["settings"], read_file=False).settings
    settings.log.begin()
    return settings


def _patiently(bind: Callable[[], Any], seconds: float) -> Any:
    from infer.errors import SettingsError

    deadline = time.monotonic() + seconds
    while True:
        try:
            return bind()
        except SettingsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _listen(source: IO[str], hear: Callable[[str], object]) -> None:
    def run() -> None:
        try:
            for line in source:
                hear(line)
        finally:
            os._exit(1)  # whoever could say how this process is to end has gone

    threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    main()
