"""Runs many commands for the price of one: a process that has imported what all of them need forks for each.

``python forking.py FD MODULE...`` is that process. What it gets from the socket is a command, which has to be a script
in Python, with its folder and variables, and the files that are to be its streams.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class Running:
    """A command that runs."""

    def __init__(self, status: int, stdout: IO[str]) -> None:
        self.stdout = stdout
        self._status = os.fdopen(status)
        self._pid = int(self._status.readline())

    def send_signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def kill(self) -> None:
        """Ends it, and what it has started, at once."""
        import psutil  # which this file lacks where it is run as a script

        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            for each in (*process.children(recursive=True), process):
                each.kill()

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it took longer, and was killed."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        overdue = threading.Timer(seconds, end)
        overdue.start()
        status = int(self._status.readline())
        overdue.cancel()
        self._status.close()
        return None if late.is_set() else status


class Forks:
    """The process that forks, with an environment's Python. It imports the modules; if there is `infer` among them, all
    plugins, too. None of them may depend on variables that commands get besides these."""

    def __init__(self, python: Path, variables: Mapping[str, str], *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P: modules beside this file are not the commands'.
            command = [str(python), "-P", __file__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command, cwd="/", env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def start(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Running:
        """Begins a command. What it writes on both streams can be read from ``stdout``."""
        output, written = os.pipe()
        running = self._ask(words, folder, variables, os.fdopen(output), written, written)
        os.close(written)
        return running

    def run(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str], seconds: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end. If it takes longer than some seconds, it is killed: TimeoutExpired."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            running = self._ask(words, folder, variables, output, output.fileno(), errors.fileno())
            if (status := running.wait(seconds)) is None:
                raise subprocess.TimeoutExpired(words, seconds)
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(words, status, output.read(), errors.read())

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(60) == 0

    def _ask(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str], stdout: IO[str], *streams: int
    ) -> Running:
        status, told = os.pipe()
        asked = json.dumps([[*words], str(folder), {**variables}])
        socket.send_fds(self._socket, [asked.encode()], [*streams, told])
        os.close(told)
        return Running(status, stdout)


def fork(asking: socket.socket) -> None:
    """Forks for each command that is asked for, until nobody asks. What comes back is a child, ready to run one."""
    while True:
        message, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        if not message:
            sys.exit()
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, told = files
    asking.close()
    if child := os.fork():  # nobody but its parent hears how it ends
        for stream in streams:
            os.close(stream)
        os.write(told, f"{child}\n".encode())
        os.write(told, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
        os._exit(0)
    os.close(told)
    words, folder, variables = json.loads(message)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    script = shutil.which(words[0])
    assert script is not None, words[0]
    sys.argv = [script, *words[1:]]


def main() -> None:
    asking = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "infer" in sys.argv:
        from infer.plugins.discovery import Plugins

        Plugins.discover()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    fork(asking)
    site.main()  # what has been installed meanwhile
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
