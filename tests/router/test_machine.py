"""Processes that serve models: how they begin, and that none is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.serving import HANG_S

from infer.errors import SettingsError
from infer_router.machine import LocalMachine
from infer_router.sizes import PROCESS_BYTES

SMALL: dict[str, Any] = {
    "model": {"path": "demo"},
    "kernels": {"threads": 1},
    "engine": {"max_batch_size": 2, "max_seq_len": 256},
    "server": {"port": 0, "access_log": False},
}
MEMORY = 8 << 30


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not reached():
            await asyncio.sleep(0.01)


def machine(**settings: Any) -> LocalMachine:
    made = LocalMachine({"a": SMALL | settings})
    made.memory = MEMORY
    return made


@contextlib.contextmanager
def command(folder: Path, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """``infer serve`` in a folder, which is killed at the end of the block whatever happens in it."""
    words = (sys.executable, "-m", "infer.commands.cli", "serve")
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def peak(pid: int) -> int:
    """The most memory that a process and its children have had, each at its own worst moment, by the kernel's count."""
    most = 0
    for each in (pid, *(child.pid for child in family(pid))):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
        most += 1024 * int(status.get("VmHWM", "0").split()[0])
    return most


@pytest.mark.slow
async def test_a_process_takes_no_more_than_was_reckoned_and_ends_with_the_machine() -> None:
    async with asyncio.timeout(HANG_S), machine() as made:
        about = await made.size("a")
        assert PROCESS_BYTES < about["bytes"] < 2 * PROCESS_BYTES
        assert about["max_model_len"] == 256
        assert "tokenizer" not in about, "a path of this machine, of which clients need not know"
        assert Path(str(made._tokenizers["a"])).name == "tokenizer.json"
        assert not made.pids
        engine = await made.start("a")
        assert 0 < peak(engine.pid) < about["bytes"]
        assert await engine.healthy()
    assert not alive(engine.pid)
    assert not made.pids


@pytest.mark.slow
async def test_a_draft_model_is_reckoned_with_its_cache() -> None:
    engine = SMALL["engine"] | {"speculation": "draft", "draft": {"path": "demo"}}
    async with asyncio.timeout(HANG_S), machine() as plain, machine(engine=engine) as drafting:
        one, two = await plain.size("a"), await drafting.size("a")
        assert two["weights_bytes"] == one["weights_bytes"]
        assert two["bytes"] - PROCESS_BYTES == 2 * (one["bytes"] - PROCESS_BYTES)
    async with asyncio.timeout(HANG_S), machine(engine=engine | {"draft": {"path": "nosuch"}}) as made:
        with pytest.raises(SettingsError, match="'nosuch' is neither a folder or file"):
            await made.size("a")


@pytest.mark.slow
async def test_what_cannot_be_loaded_is_said_in_its_own_words_and_leaves_no_process() -> None:
    async with asyncio.timeout(HANG_S), machine(model={"path": "nosuch"}) as made:
        for work in (made.size, made.start):
            with pytest.raises(SettingsError, match="'nosuch' is neither a folder or file"):
                await work("a")
            assert not made.pids


@pytest.mark.parametrize("moment", ["at once", "while it loads"])
async def test_a_load_that_is_canceled_leaves_no_process(moment: str) -> None:
    async with asyncio.timeout(HANG_S), machine() as made:
        loading = asyncio.create_task(made.start("a"))
        if moment == "while it loads":
            await until(lambda: made.pids)
        else:
            await asyncio.sleep(0)
        pids = made.pids
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not made.pids
        assert not any(map(alive, pids))


async def test_a_load_that_hangs_is_killed_with_its_limit() -> None:
    async with asyncio.timeout(HANG_S), machine() as made:
        loading = asyncio.create_task(asyncio.wait_for(made.start("a"), 1.0))
        await until(lambda: made.pids)
        (pid,) = made.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await loading
        assert not alive(pid)


@pytest.mark.slow
async def test_a_process_that_is_stopped_is_not_healthy_and_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_router.machine.HEALTH_TIMEOUT_S", 0.2)
    async with asyncio.timeout(HANG_S), machine() as made:
        engine = await made.start("a")
        os.kill(engine.pid, signal.SIGSTOP)
        assert not await engine.healthy()
        await engine.end(0.1)
        assert await engine.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["arithmetic", "load"])
async def test_a_signal_during_the_start_ends_the_server_with_all_children(moment: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        f"[server]\nport = 0\n[server.router]\n{'memory_gib = 8' if moment == 'load' else ''}\n"
        "[models.a]\npinned = true\nmodel = {path = 'demo'}\nkernels = {threads = 1}\n"
    )
    kinds = ("engine", "spare") if moment == "load" else ("sizes",)
    with command(tmp_path, stderr=subprocess.PIPE) as server:

        def started() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # one of them has just ended
                return server.poll() is not None or any(
                    {*kinds} & {*each.cmdline()[-1:]} for each in family(server.pid)
                )
            return False

        await until(started)
        there = family(server.pid)
        server.terminate()
        _, said = await asyncio.to_thread(server.communicate, timeout=HANG_S)
    assert server.returncode == 0, said
    assert "Traceback" not in said
    await until(lambda: not any(alive(each.pid) for each in there))


@pytest.mark.slow
async def test_a_server_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        "[server]\nport = 0\n[server.router]\nmemory_gib = 8\n[engine]\nmax_batch_size = 2\nmax_seq_len = 256\n"
        "[kernels]\nthreads = 1\n[models.a]\npinned = true\nmodel = {path = 'demo'}\n"
    )
    with command(tmp_path) as server:
        assert server.stdout is not None
        url = (await asyncio.to_thread(server.stdout.readline)).removeprefix("infer: ready on ").strip()
        async with asyncio.timeout(HANG_S), aiohttp.ClientSession() as session:
            body = {"model": "a", "prompt": "x", "max_tokens": 2}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
        there = family(server.pid)
        assert there
        server.kill()
    await until(lambda: not any(alive(each.pid) for each in there))
