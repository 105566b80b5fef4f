"""A real Ray on this machine: two engines of the demo model behind an ingress, as ``infer ray run`` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.router.test_ingress import frames, said
from tests.serving import HANG_S, serving

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as in infer_ray.command: nothing listens beyond loopback
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
Json = dict[str, Any]


class Cluster:
    """A command that has started Ray, and all processes that it has started."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self) -> list[psutil.Process]:
        found = []
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.cmdline()[-2:] == ["infer_router.process", "engine"]:
                    found.append(each)
        return found


@contextmanager
def started(words: Sequence[str], ready: str, log: Path, code: int | None = 0) -> Iterator[Cluster]:
    """A command that serves until SIGTERM, once a line of its output has matched ``ready``. It has to end with this
    exit code (None: any), and none of the processes that it started may be left."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            (sys.executable, "-m", *words),
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    found: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(ready, line):
                break
        else:
            pytest.fail(log.read_text()[-4000:])
        cluster = Cluster(process, match[1] if match.groups() else "", log)
        yield cluster
        if process.poll() is None:
            found = cluster.processes()
            process.terminate()
        assert code in (None, process.wait(HANG_S)), log.read_text()[-4000:]
    finally:
        process.kill()
        _, alive = psutil.wait_procs(found, HANG_S)
        for each in alive:
            each.kill()
    assert not alive, [each.cmdline() for each in alive]


def ray_run(log: Path, *words: str, **how: Any) -> AbstractContextManager[Cluster]:
    command = ("infer.commands.cli", "ray", "run", "demo", "--port", "0", "--kernels.threads", "1", *words)
    return started(command, r"^infer: ready on (\S+)", log, **how)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_run(tmp_path_factory.mktemp("ray") / "log", "--replicas", "2") as made:
        yield made


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
    timeout, connector = aiohttp.ClientTimeout(HANG_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(streamed(session, url, *each) for each in zip(bodies, events, strict=True)))


async def ingress_counts(url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    prefix = "infer_ingress_"
    found = (line.removeprefix(prefix).split(" ") for line in lines if line.startswith(prefix))
    return {name: int(number) for name, number in found}


async def asked_until(reached: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so. Ray tells nobody when it starts or ends a process. Raises TimeoutError."""
    async with asyncio.timeout(HANG_S):
        while not await reached():
            await asyncio.sleep(0.1)


def test_nothing_listens_beyond_loopback(cluster: Cluster) -> None:
    for process in cluster.processes():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), (process.cmdline(), connection)


async def test_streams_are_those_of_a_single_engine(cluster: Cluster) -> None:
    bodies = [body(i) for i in range(64)]
    with serving() as single:
        expected = await all_streamed(single.url, bodies)
    assert await all_streamed(cluster.url, bodies) == expected


async def test_streams_survive_the_death_of_an_engine(cluster: Cluster) -> None:
    bodies = [body(i, max_tokens=1500) for i in range(20)]
    expected = await all_streamed(cluster.url, bodies)

    async def some_resumed() -> bool:
        """Whether a stream outlived its engine: all may have ended before the signal came."""
        victim = cluster.engines()[0]  # a busy machine takes its time to list Ray's processes
        begun = [asyncio.Event() for _ in bodies]
        again = asyncio.create_task(all_streamed(cluster.url, bodies, begun))
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(victim.pid, signal.SIGKILL)
        assert await again == expected
        counts = await ingress_counts(cluster.url)
        assert counts["lost_total"] == 0

        async def replaced() -> bool:
            return len([each for each in cluster.engines() if each.pid != victim.pid]) == 2

        await asked_until(replaced)
        return counts["resumed_total"] > 0

    while not await some_resumed():
        pass


async def test_a_cluster_that_is_there_serves_what_is_sent_to_it(cluster: Cluster, tmp_path: Path) -> None:
    """What it serves already goes on."""
    bodies = [body(i) for i in range(20)]
    expected = await all_streamed(cluster.url, bodies)
    (raylet,) = [each for each in cluster.processes() if each.name() == "raylet"]
    (address,) = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address=")]
    own = ("--address", address, "--ray.name", "other")
    before = {each.pid for each in cluster.engines()}

    def others() -> list[psutil.Process]:
        return [each for each in cluster.engines() if each.pid not in before]

    more = ("--port", "0", "--kernels.threads", "1", "--replicas", "2", "--ray.cpus", "0")
    with started(
        ("infer.commands.cli", "ray", "deploy", "demo", *own, *more), r"is served on (\S+)", tmp_path / "d"
    ) as sent:
        sent.process.wait(HANG_S)
    assert len(others()) == 2
    assert await all_streamed(sent.url, bodies) == expected
    command = ("infer.commands.cli", "ray", "delete", *own)
    with started(command, "is served no more", tmp_path / "e") as deleted:
        deleted.process.wait(HANG_S)
    assert not others()
    with pytest.raises(aiohttp.ClientConnectorError):
        await all_streamed(sent.url, bodies[:1])
    refusals = {
        ("delete", *own): "ray.name = 'other' is no application of this cluster; it has infer.",
        ("deploy", "nosuch", *own, "--ray.cpus", "0"): "'nosuch' is neither a folder",
    }
    for words, why in refusals.items():
        refused = subprocess.run(
            (sys.executable, "-m", "infer.commands.cli", "ray", *words),
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert refused.returncode == 2
        assert f"infer: {why}" in refused.stderr
    assert await all_streamed(cluster.url, bodies) == expected


async def test_engines_come_and_go_with_load_and_no_request_notices_until_ray_ends(tmp_path: Path) -> None:
    bodies = [body(i, max_tokens=800) for i in range(3)]
    with serving() as single:
        expected = await all_streamed(single.url, bodies)
    limits = ("--replicas", "1", "--ray.max_replicas", "2", "--ray.target_requests", "4")
    delays = ("--ray.upscale_delay_s", "1", "--ray.downscale_delay_s", "2")
    few, many = 2, 6  # Serve goes by the mean of 11 s: the fewer are many, the sooner it falls
    with ray_run(tmp_path / "log", *limits, *delays, code=1) as cluster:
        assert len(cluster.engines()) == 1
        wanted, draining = many, False

        async def client(number: int) -> None:
            for i in itertools.count(number):
                if number >= wanted:
                    return
                (answer,) = await all_streamed(cluster.url, [bodies[i % len(bodies)]])
                assert answer == expected[i % len(bodies)]

        async def there_are(number: int) -> bool:
            nonlocal draining
            counts = await ingress_counts(cluster.url)
            draining |= counts["replicas_taking"] < counts["replicas"]
            return len(cluster.engines()) == counts["replicas"] == number

        async with asyncio.TaskGroup() as clients:
            for number in range(few):
                clients.create_task(client(number))
            for _ in range(5):  # until somebody looked while it drained
                wanted = many
                for number in range(few, many):
                    clients.create_task(client(number))
                await asked_until(lambda: there_are(2))
                draining, wanted = False, few
                await asked_until(lambda: there_are(1))
                if draining:
                    break
            assert draining
            wanted = 0
        counts = await ingress_counts(cluster.url)
        assert counts["lost_total"] == counts["resumed_total"] == 0

        found = cluster.processes()
        (raylet,) = [each for each in found if each.name() == "raylet"]
        raylet.kill()
        cluster.process.wait(HANG_S)
        _, alive = psutil.wait_procs(found, HANG_S)
        assert not alive
    assert "infer: Ray's raylet has ended" in cluster.log.read_text()
