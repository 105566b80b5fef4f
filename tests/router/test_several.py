"""Several models, memory for two, and requests at random: processes as they are served."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.router.test_machine import peak
from tests.serving import HANG_S, serving

from infer.contracts.command import CommandContext
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_router import machine as machines
from infer_router.machine import LocalMachine
from infer_router.plan import several
from infer_router.serve import gateway
from infer_router.sizes import PROCESS_BYTES
from infer_server.http.sockets import bind

REQUESTS, WAVE = int(os.environ.get("REQUESTS", "48")), 24
"""More of them, and of the models, are for an hour that is quiet: REQUESTS=300 MODELS=4. With CGROUP, see ``limit``."""
EVERY: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"dtype": "float32"},
    "c": {"quantization": "int8"},
    "d": {"quantization": "int4"},
}
KINDS = dict([*EVERY.items()][: int(os.environ.get("MODELS", "3"))])


class Machine(LocalMachine):
    """Notes how much there is by the arithmetic whenever a process begins that waits for a model or loads one."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.sizes: dict[str, int] = {}
        self.held: dict[int, str] = {}
        self.starting: list[str] = []
        self.most = 0
        self.loads = 0

    async def size(self, name: str) -> Any:
        about = await super().size(name)
        self.sizes[name] = about["bytes"]
        return about

    async def start(self, name: str) -> Any:
        self.loads += 1
        assert name not in self.there, "two processes of one model"
        self.starting.append(name)
        self._note()
        try:
            engine = await super().start(name)
            self.held[engine.pid] = name
            return engine
        finally:
            self.starting.remove(name)

    async def _created(self, kind: str) -> Any:
        if kind == "spare":
            self._note(PROCESS_BYTES)
        return await super()._created(kind)

    @property
    def there(self) -> list[str]:
        return [*self.starting, *(each for pid, each in self.held.items() if pid in self.pids)]

    def _note(self, besides: int = 0) -> None:
        self.most = max(self.most, sum(self.sizes[each] for each in self.there) + besides)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By process, what it had taken when it was to end."""
    found = dict[int, int]()

    async def end(process: Any, drain_s: float) -> None:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            if taken := peak(process.pid):  # otherwise it has ended by itself
                found[process.pid] = taken
        await ending(process, drain_s)

    ending = machines._end
    monkeypatch.setattr(machines, "_end", end)
    return found


@asynccontextmanager
async def limit(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Has the kernel limit what the processes of all models take together, by a control group in the folder ``CGROUP``
    of /sys/fs/cgroup, if that is set: it kills none of them."""
    if (parent := os.environ.get("CGROUP")) is None:
        yield
        return
    group = Path(parent) / f"infer-test-{os.getpid()}"
    group.mkdir()
    try:
        old = (group / "memory.limit_in_bytes").exists()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(nbytes))
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        monkeypatch.setattr(machines, "COMMAND", ("sh", "-c", join, str(group), *machines.COMMAND))
        yield
        kills = (group / ("memory.oom_control" if old else "memory.events")).read_text()
        most = int((group / ("memory.max_usage_in_bytes" if old else "memory.peak")).read_text())
        print(f"at most {most / 2**20:.0f} MiB of {nbytes / 2**20:.0f}, the files' pages among them")
        assert "oom_kill 0" in kills.splitlines()
        assert 0 < most <= nbytes
    finally:
        group.rmdir()


def asked(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice("".join(KINDS))
    body = {"prompt": rng.choice(("def ", "class ", "import ")), "max_tokens": 6, "seed": rng.randrange(3)}
    return name, body | {"logprobs": 2, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.long
async def test_requests_at_random_lose_nothing_and_change_no_bit(
    tmp_path: Path, peaks: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is there ever more in memory than there may be: each process has taken no more than the arithmetic says, by
    the kernel's own count, and those that were there at a time had no more than the limit by the arithmetic."""
    sections = ("[kernels]", "threads = 1", "[engine]", "max_batch_size = 4", "max_seq_len = 128", "[server.router]")
    lines = [*sections, "max_waiting = 400"]
    for name, more in KINDS.items():
        lines += [f"[models.{name}.model]", *(f"{key} = '{value}'" for key, value in (more | {"path": "demo"}).items())]
    (tmp_path / "settings.toml").write_text("\n".join(lines))
    plugins = Plugins.discover()
    loaded = load_settings(plugins, file=str(tmp_path / "settings.toml"), env={})
    plan = several(CommandContext(loaded.settings, loaded.sources, plugins, ()))
    requests = [asked(random.Random(seed)) for seed in range(REQUESTS)]
    expected: dict[str, Any] = {}
    for name, more in KINDS.items():
        with serving(model={"path": "demo"} | more, kernels={"threads": 1}, engine={"max_batch_size": 4}) as alone:
            async with aiohttp.ClientSession() as session:
                for body in {json.dumps(body): body for each, body in requests if each == name}.values():
                    async with session.post(alone.url + "/v1/completions", json=body) as response:
                        expected[name + json.dumps(body)] = (await response.json())["choices"]

    machine = Machine(plan.engines)
    memory = machine.memory = int(2.2 * (1 << 29))
    waves = 0
    async with (
        limit(memory, monkeypatch),
        machine,
        aiohttp.ClientSession() as session,
        gateway(plan, loaded.settings.server, machine, memory, bind("127.0.0.1", 0)) as (_, url, _),
    ):

        async def ask(name: str, body: dict[str, Any]) -> None:
            async with session.post(f"{url}/v1/completions", json=body | {"model": name}) as response:
                assert response.status == 200, await response.text()
                assert (await response.json())["choices"] == expected[name + json.dumps(body)]

        left = [*requests]
        while left:
            now, left = left[:WAVE], left[WAVE:]
            async with asyncio.timeout(HANG_S):
                await asyncio.gather(*(ask(*each) for each in now))
            waves += 1
    assert 0 < machine.most <= memory
    assert machine.held.keys() <= peaks.keys()
    for pid, most in peaks.items():
        assert 0 < most <= (machine.sizes[machine.held[pid]] if pid in machine.held else PROCESS_BYTES)
    print(f"{machine.loads} loads, at most {max(peaks.values()) / 2**20:.0f} MiB each")
    assert machine.loads <= len(KINDS) * waves, "each wave wakes a model once at most"
    assert not machine.pids


@pytest.mark.slow
async def test_a_conversation_keeps_its_keys_and_values_over_a_swap(tmp_path: Path) -> None:
    """Both models are told one folder."""
    (tmp_path / "settings.toml").write_text(
        "[kernels]\nthreads = 1\n[engine]\nmax_batch_size = 4\nmax_seq_len = 512\n"
        f"[cache.paged]\ndisk = '{tmp_path / 'kept'}'\n"
        "[models.a.model]\npath = 'demo'\n[models.b.model]\npath = 'demo'\ndtype = 'float32'\n"
    )
    plugins = Plugins.discover()
    loaded = load_settings(plugins, file=str(tmp_path / "settings.toml"), env={})
    plan = several(CommandContext(loaded.settings, loaded.sources, plugins, ()))
    machine = Machine(plan.engines)
    memory = machine.memory = int(1.2 * (1 << 29))
    async with (
        machine,
        aiohttp.ClientSession() as session,
        gateway(plan, loaded.settings.server, machine, memory, bind("127.0.0.1", 0)) as (_, url, _),
        asyncio.timeout(HANG_S),
    ):

        async def ask(name: str) -> tuple[Any, int]:
            body = {"model": name, "prompt": [3 + i % 400 for i in range(320)], "max_tokens": 8, "logprobs": 2}
            async with session.post(f"{url}/v1/completions", json=body | {"temperature": 0}) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = [await ask(name) for name in "ab"]
        again = [await ask(name) for name in "ab"]
    assert machine.loads == 4
    assert [cached for _, cached in first] == [0, 0]
    assert [choices for choices, _ in again] == [choices for choices, _ in first]
    assert all(cached >= 0.95 * 320 - 16 for _, cached in again)


@pytest.mark.slow
async def test_a_stream_goes_on_when_its_process_is_killed_and_other_models_do_not_notice(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        "[kernels]\nthreads = 1\n[engine]\nmax_batch_size = 4\nmax_seq_len = 512\n"
        "[models.a.model]\npath = 'demo'\n[models.b.model]\npath = 'demo'\n"
    )
    plugins = Plugins.discover()
    loaded = load_settings(plugins, file=str(tmp_path / "settings.toml"), env={})
    plan = several(CommandContext(loaded.settings, loaded.sources, plugins, ()))
    machine = Machine(plan.engines)
    memory = machine.memory = 4 << 30
    body = {"prompt": "def parse(text):", "seed": 5, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with (
        machine,
        aiohttp.ClientSession() as session,
        gateway(plan, loaded.settings.server, machine, memory, bind("127.0.0.1", 0)) as (_, url, _),
        asyncio.timeout(HANG_S),
    ):

        async def stream(name: str, after: int | None = None) -> str:
            """The answer's text; after so many events, the model's process is killed."""
            text = ""
            async with session.post(f"{url}/v1/completions", json=body | {"model": name}) as response:
                number = 0
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        text += event["choices"][0]["text"] if event.get("choices") else ""
                        assert "error" not in event
                        number += 1
                        if number == after:
                            pid = next(pid for pid in machine.pids if machine.held.get(pid) == name)
                            os.kill(pid, signal.SIGKILL)
            return text

        expected = await stream("a")
        assert [*await asyncio.gather(stream("a", 5), stream("b"))] == [expected, expected]
    assert [machine.loads, *map([*machine.held.values()].count, "ab")] == [3, 2, 1]
