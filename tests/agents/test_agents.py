"""The agents themselves, from npm, offline and without a login, with a model that says what it is told.

Each works through ten turns: nine calls of its own tools, which read and edit files, and a last text. In the middle it
is interrupted, and goes on in another process. What it sends goes through a recorder, which has the model say what the
turn needs, and checks requests and answers as they come (``Recorder``, ``Turn.follows``)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from tests.agents.recorder import Recorder, results
from tests.agents.starting import AGENTS, GPT, NEEDED, started
from tests.agents.test_messages import puppet
from tests.puppet import Puppet, Puppets
from tests.ray import test_ray
from tests.serving import HANG_S, Body, Running, running

from infer_server.http.sockets import bind, listen

pytestmark = [pytest.mark.slow, *NEEDED]
CONTEXT = 1 << 17
SECTIONS: Body = {
    "engine": {"max_seq_len": CONTEXT},
    "server": {"access_log": False, "max_body_bytes": 1 << 24, "aliases": [GPT]},
}
LAST = "All is done."
INTERRUPTED = 4
"""The turn in which each is interrupted. It would read: some refuse to edit what they have not read since they were
started."""


def model(folder: Path, **config: str) -> Body:
    """The section ``model`` of a server whose model says what it is told, with room for agents' prompts."""
    folder.mkdir()
    made, file = puppet(folder), folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT} | config))
    return made


@asynccontextmanager
async def recording(server: Running, script: list[str]) -> AsyncIterator[tuple[Recorder, str]]:
    Puppet.said.zero_()
    recorder, app = Recorder(server, script, INTERRUPTED), web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    async with listen(app, bind("127.0.0.1", 0)) as url:
        yield recorder, url


def calling(call: tuple[str, Body]) -> str:
    name, arguments = call
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def take_ten_turns(server: Running, name: str, folder: Path) -> None:
    """With files read and edited, cancelled in the fifth, and each asked for once more in one piece."""
    agent, path = AGENTS[name], folder / "work/count.txt"
    path.parent.mkdir(parents=True)
    path.write_text("number=0\n")
    calls = [agent.read(path)]
    for i in range(4):
        calls += [agent.edit(path, f"number={i}", f"number={i + 1}"), agent.read(path)]
    async with recording(server, [*map(calling, calls), LAST]) as (recorder, url), asyncio.timeout(HANG_S):
        async with started(agent, url, folder, *agent.begin) as process:
            await recorder.meanwhile(recorder.began.wait())
            while not await recorder.working():
                pass
            aborted = await recorder.num_aborted()
            os.killpg(process.pid, signal.SIGINT)
            await process.communicate()
        while await recorder.working() or await recorder.num_aborted() == aborted:
            pass
        assert await recorder.num_aborted() == aborted + 1
        assert len(recorder.turns) == INTERRUPTED
        recorder.end()
        async with started(agent, url, folder, *agent.go_on) as process:
            said, _ = await recorder.meanwhile(process.communicate())
        assert process.returncode == 0, said.decode()
        assert path.read_text() == "number=4\n", said.decode()
        assert LAST in said.decode()
        assert [turn.number for turn in recorder.turns] == [*range(10)]
        read = [text for _, text in results(recorder.turns[-1].body)][::2]
        assert all(f"number={i}" in text for i, text in enumerate(read))
        if agent.command in ("claude", "codex"):
            first, second = recorder.turns[:2]
            assert first.tokens >= 20_000
            assert second.cached >= 0.99 * second.tokens
        for turn in recorder.turns:
            await recorder.plainly(turn)


@pytest.mark.parametrize("name", AGENTS)
async def test_ten_turns_with_files_read_and_edited(name: str, tmp_path: Path) -> None:
    async with running([Puppets()], model=model(tmp_path / "model"), **SECTIONS) as server:
        await take_ten_turns(server, name, tmp_path)


def options(sections: Body) -> list[str]:
    """Settings as a command's options."""
    words = []
    for section, settings in sections.items():
        for key, value in settings.items():
            words += [f"--{section}.{key}", ",".join(value) if isinstance(value, list) else str(value)]
    return words


@pytest.mark.long
async def test_ten_turns_through_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines in processes of their own: the model reads there what it is told here, in a file."""
    plugin = tmp_path / "plugin/puppets-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: puppets\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[infer]\npuppets = tests.puppet:PUPPETS\n")
    monkeypatch.setenv("PYTHONPATH", f"{plugin.parent}:{test_ray.ROOT}")
    said = tmp_path / "said"
    shared = torch.from_file(str(said), shared=True, size=len(Puppet.said), dtype=torch.int64)
    monkeypatch.setattr(Puppet, "said", shared)
    given = options({"model": model(tmp_path / "model", said=str(said)), **SECTIONS})
    command = ("infer.commands.cli", "ray", "run", "--port", "0", "--replicas", "2", "--kernels.threads", "1", *given)
    with test_ray.started(command, r"^infer: ready on (\S+)", tmp_path / "log") as cluster:
        async with aiohttp.ClientSession() as session:
            server = Running(session, cluster.url, None)
            for name in AGENTS:
                await take_ten_turns(server, name, tmp_path / name)


async def test_claude_code_finds_the_models_that_have_a_name_for_it(tmp_path: Path) -> None:
    """Those whose names begin as its own do: others, as most of the hub's, need an alias."""
    aliases = ("claude-local", "anthropic/local", "other")
    sections = SECTIONS | {"server": SECTIONS["server"] | {"aliases": [*aliases]}}
    agent = AGENTS["claude"]
    async with (
        running([Puppets()], model=model(tmp_path / "model"), **sections) as server,
        recording(server, [LAST]) as (recorder, url),
        asyncio.timeout(HANG_S),
    ):
        own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "x", "ANTHROPIC_MODEL": "anthropic/local"}
        own |= {"ANTHROPIC_SMALL_FAST_MODEL": "claude-local", "CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1"}
        asks = agent._replace(environment=agent.environment | own)
        async with started(asks, None, tmp_path, *asks.begin) as process:
            said, _ = await recorder.meanwhile(process.communicate())
        assert process.returncode == 0, said.decode()
    found = json.loads((tmp_path / "home/.claude/cache/gateway-models.json").read_text())
    assert found["models"] == [{"id": name, "display_name": name} for name in aliases[:2]]
