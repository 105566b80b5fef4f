"""``infer serve`` as a process that can be killed and started again, and whose log nobody reads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil
from tests.serving import HANG_S, TEMPLATE

READY = "infer: ready on http://"
SETTINGS = {
    "model.path": "demo",
    "kernels.threads": "1",
    "engine.max_batch_size": "8",
    "engine.max_waiting_requests": "64",
    "engine.max_seq_len": "2048",
    "engine.target_itl_ms": "50",
    "cache.paged.num_blocks": "512",
    "server.body_timeout_s": "3",
    "server.stall_timeout_s": "3",
}
"""Little of everything, so that each limit is reached."""
IDLE_S = 5.0
"""How long a connection may say nothing, headers that never end among it: no setting, and more than a minute else."""
INFER = (
    "import sys; from infer_server.http import sockets; from infer.commands.cli import main; "
    f"sockets.KEEPALIVE_S = {IDLE_S}; sys.exit(main())"
)


class Server:
    """A server of the demo model. It keeps its port and its stored responses from start to start."""

    def __init__(self, folder: Path, **settings: str) -> None:
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        own = {"model.chat_template": str(template), "server.agents.store": str(folder / "responses.db")}
        self._settings = SETTINGS | own | {name.replace("__", "."): value for name, value in settings.items()}
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.host, self.port = free.getsockname()
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._close()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Returns when the server is ready. Raises RuntimeError, with the end of its log, if it ends before."""
        argv = [part for name, value in self._settings.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-c", INFER, "serve", *argv, "--server.port", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self._folder, env=environment
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith(READY):
            raise RuntimeError(f"the server did not start: {self.process.communicate()[1][-2000:]}")

    def kill(self) -> None:
        """End it without a chance to clean up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._close()

    def end(self) -> int:
        """Ask it to end. Returns its exit status. Raises TimeoutExpired if it hangs."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=HANG_S)  # its log is read at last, since it may be long
        return self.process.returncode

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def limit_files(self, nbytes: int | None) -> None:
        """Let its files grow to so many bytes only, as a full disk does; None: without a limit."""
        import resource

        assert self.process is not None
        most = resource.RLIM_INFINITY if nbytes is None else nbytes
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def memory(self) -> int:
        """Bytes that it and its children hold and share with no other process."""
        assert self.process is not None
        main = psutil.Process(self.process.pid)
        found = 0
        for process in (main, *main.children(recursive=True)):
            try:
                found += process.memory_full_info().uss
            except psutil.NoSuchProcess:
                continue
        return found

    def _close(self) -> None:
        assert self.process is not None
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
