"""``infer serve`` as a process: how it starts and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.serving import HANG_S

from infer.errors import SettingsError
from infer_server.http import access
from infer_server.http.sockets import bind

INFER = Path(sys.executable).with_name("infer")
EXPONENTIAL = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(40)]}


@contextmanager
def process(folder: Path, *argv: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    command = [str(INFER), "serve", "--model.path", "demo", "--kernels.threads", "1", "--server.port", "0", *argv]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    with subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def ready(started: subprocess.Popen[str]) -> tuple[str, int]:
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line.startswith("infer: ready on http://"), line
    host, _, port = line.strip().removeprefix("infer: ready on http://").rpartition(":")
    return host, int(port)


def post(address: tuple[str, int], body: object) -> socket.socket:
    """Send a request; the answer is for who wants it."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    client = socket.create_connection(address, timeout=HANG_S)
    client.sendall(head.encode() + data)
    return client


@pytest.mark.slow
def test_a_signal_ends_the_process_whatever_is_compiled(tmp_path: Path) -> None:
    with process(tmp_path, "--server.drain_timeout_s", "1000") as started:
        address = ready(started)
        body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": EXPONENTIAL}}
        clients = [post(address, body) for _ in range(8)]
        url = f"http://{address[0]}:{address[1]}/health"
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            assert answer.status == 200
        started.send_signal(signal.SIGTERM)
        assert started.wait(HANG_S) == 0
        for client in clients:
            client.close()


def children(pid: int) -> list[str]:
    """The commands of the processes that this one has started. One that ends meanwhile has none."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return found


@pytest.mark.slow
def test_the_process_that_checks_large_bodies_is_there_before_the_first(tmp_path: Path) -> None:
    """It begins by itself soon after the start."""
    with process(tmp_path) as started:
        ready(started)
        begun = time.monotonic()
        while not any("infer_server.http.bodies" in child for child in children(started.pid)):
            assert time.monotonic() < begun + HANG_S
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        assert started.wait(HANG_S) == 0


@pytest.mark.slow
def test_requests_finish_after_a_signal_and_a_second_one_ends_them(tmp_path: Path) -> None:
    body = {"prompt": "def ", "max_tokens": 300, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with process(tmp_path, "--server.drain_timeout_s", "1000") as started:
        with post(ready(started), body) as client:
            data = client.recv(1 << 16)
            started.send_signal(signal.SIGTERM)
            while part := client.recv(1 << 16):
                data += part
                if b"[DONE]" in data:
                    break
            assert b'"completion_tokens": 300' in data
        assert started.wait(HANG_S) == 0
    with process(tmp_path, "--server.drain_timeout_s", "1000") as started:
        body["max_tokens"] = 1900
        with post(ready(started), body | {"n": 16}) as client:
            client.recv(100)
            started.send_signal(signal.SIGTERM)
            assert started.stderr is not None
            while "draining" not in (line := started.stderr.readline()):
                assert line
            started.send_signal(signal.SIGINT)
            assert started.wait(HANG_S) == 128 + signal.SIGINT
        assert "stopped by SIGINT" in started.stderr.read()


def test_a_request_whose_body_is_still_arriving_is_finished_after_a_signal(tmp_path: Path) -> None:
    with process(tmp_path, "--server.drain_timeout_s", "1000") as started:
        address = ready(started)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(address, timeout=HANG_S) as client:
            client.sendall(f"{head}Expect: 100-continue\r\nContent-Length: 29\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 100"), "it is inside"
            started.send_signal(signal.SIGTERM)
            assert started.stderr is not None
            while "draining" not in (line := started.stderr.readline()):
                assert line
            assert "draining 1 requests" in line
            with post(address, {"prompt": "a"}) as late:
                assert late.recv(100).startswith(b"HTTP/1.1 503")
            client.sendall(b'{"prompt":"a","max_tokens":1}')
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert started.wait(HANG_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_is_no_traceback(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import infer_server.app as app, sys, time\n"
        "from infer.commands.cli import main\n"
        "def start(*given):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(1000)\n"
        "app.start = start\n"
        "sys.exit(main(['serve', '--model.path', 'demo', '--server.port', '0']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        assert started.stdout.readline() == "loading\n"
        started.send_signal(number)
        assert started.wait(HANG_S) == 128 + number
        assert started.stderr.read() == f"infer: stopped by {number.name}\n"


@pytest.mark.slow
def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (taken,) = bind("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        with process(tmp_path, "--server.port", str(port), "--model.path", "/nowhere") as started:
            assert started.wait(HANG_S) == 2
            assert started.stderr is not None
            said = started.stderr.read()
        assert said.startswith(
            f"infer: server.port = {port} cannot be listened on at 127.0.0.1: Address already in use"
        )
        assert "Traceback" not in said
    with pytest.raises(SettingsError, match=r"server.host = 'no\.such\.host\.invalid' is no address"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(SettingsError, match=r"server.host = '192\.0\.2\.1' is no address .*; use 127\.0\.0\.1 for"):
        bind("192.0.2.1", 0)


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_no_request_and_no_signal(tmp_path: Path) -> None:
    with process(tmp_path) as started:
        address = ready(started)
        assert started.stderr is not None
        fcntl.fcntl(started.stderr, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(60):
            with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/health", timeout=HANG_S) as answer:
                assert answer.status == 200
        started.send_signal(signal.SIGTERM)
        assert started.wait(HANG_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False])
def test_a_stdout_that_cannot_be_written_to_is_no_reason_to_end(full: bool, tmp_path: Path) -> None:
    """Its disk is full, or its reader has gone."""
    if full and not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    if full:
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, stdout = os.pipe()
        os.close(reads)
    with process(tmp_path, stdout=stdout) as started:
        os.close(stdout)
        assert started.stderr is not None
        while "infer: ready on " not in (line := started.stderr.readline()):
            assert line
        url = line.partition("infer: ready on ")[2].split()[0]
        with urllib.request.urlopen(f"{url}/health", timeout=HANG_S) as answer:
            assert answer.status == 200
        started.send_signal(signal.SIGTERM)
        assert started.wait(HANG_S) == 0
        assert "Traceback" not in started.stderr.read()


def test_what_is_missing_in_a_log_is_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_LINES", 3)
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    lines = access.Lines(writer)
    written = [f"{i} {'x' * 8000}\n" for i in range(9)]
    lines.write(written[0])
    while lines._lines.qsize():  # until the thread has taken it, and waits for the reader
        pass
    for line in written[1:]:
        lines.write(line)
    read = b""
    while not read.endswith(b"\n") or b"\n3 x" not in read:
        read += os.read(reader, 1 << 16)
    missing = "5 lines of the log are missing here: nobody read them in time\n"
    assert read.decode() == written[0] + missing + "".join(written[1:4])
    os.close(reader)
