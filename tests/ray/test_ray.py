"""A real Ray on this machine: two engines of the demo model behind an ingress, as ``infer ray run`` starts them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.ray.test_ingress import frames, said
from tests.serving import serving

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


class Cluster:
    """``infer ray run``, and all processes that it has started."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self) -> list[psutil.Process]:
        return [each for each in self.processes() if each.cmdline()[-2:] == ["infer_ray.process", "engine"]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("ray") / "log"
    words = ("ray", "run", "demo", "--replicas", "2", "--port", "0", "--kernels.threads", "1")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            (sys.executable, "-m", "infer.commands.cli", *words),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    found: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if ready := re.search(r"^infer: ready on (\S+)", line):
                break
        else:
            pytest.fail(log.read_text()[-4000:])
        yield Cluster(process, ready[1])
        found = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(90) == 0
    finally:
        process.kill()
        _, alive = psutil.wait_procs(found, 20)
        for each in alive:
            each.kill()
    assert not alive, [each.cmdline() for each in alive]


def body(i: int, **more: Any) -> Json:
    return {"prompt": f"def f{i % 40}(x):\n", "seed": i, "max_tokens": 60, "ignore_eos": True} | more


async def streamed(session: aiohttp.ClientSession, url: str, asked: Json, begun: asyncio.Event) -> Any:
    async with session.post(url + "/v1/completions", json=asked | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readany()
        begun.set()
        return said(frames((first + await response.content.read()).decode()))


async def all_streamed(url: str, bodies: list[Json], begun: list[asyncio.Event] | None = None) -> list[Any]:
    """The answers; each request's event is set when its answer has begun."""
    events = begun or [asyncio.Event() for _ in bodies]
    timeout, connector = aiohttp.ClientTimeout(300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(streamed(session, url, *each) for each in zip(bodies, events, strict=True)))


def test_nothing_listens_beyond_loopback(cluster: Cluster) -> None:
    for process in cluster.processes():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), (process.cmdline(), connection)


async def test_two_hundred_streams_are_those_of_a_single_engine(cluster: Cluster) -> None:
    bodies = [body(i) for i in range(200)]
    with serving() as single:
        expected = await all_streamed(single.url, bodies)
    assert await all_streamed(cluster.url, bodies) == expected


async def test_streams_survive_the_death_of_an_engine(cluster: Cluster) -> None:
    bodies = [body(i, max_tokens=300) for i in range(20)]
    expected = await all_streamed(cluster.url, bodies)
    begun = [asyncio.Event() for _ in bodies]
    again = asyncio.create_task(all_streamed(cluster.url, bodies, begun))
    await asyncio.gather(*(event.wait() for event in begun))
    victim = cluster.engines()[0]
    os.kill(victim.pid, signal.SIGKILL)
    assert await again == expected
    async with aiohttp.ClientSession() as session, session.get(cluster.url + "/metrics") as response:
        counts = dict(line.split(" ") for line in (await response.text()).splitlines() if line.startswith("infer_ing"))
    assert int(counts["infer_ingress_resumed_total"]) > 0
    assert int(counts["infer_ingress_lost_total"]) == 0
    deadline = time.monotonic() + 120
    while len([each for each in cluster.engines() if each.pid != victim.pid]) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
