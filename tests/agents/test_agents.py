"""The agents themselves, from npm, offline and without a login, with a model that says what it is told.

Each works through ten turns: nine calls of its own tools, which read and edit files, and a last text. What it sends
goes through a recorder, which has the model say what the turn needs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from tests.agents.test_messages import puppet
from tests.puppet import Puppet, Puppets, say
from tests.ray import behind
from tests.serving import HANG_S, Running, running

from infer.server.http.sockets import bind, listen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="other binaries are needed"),
]
INFER = Path(sys.executable).with_name("infer")
MODULES = Path(sys.prefix) / "agents/node_modules"
CONTEXT = 1 << 17
LAST = "All is done."
COUNTS = {
    "/v1/messages": "/v1/messages/count_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
    "/v1/chat/completions": "/tokenize",
}
"""What counts a prompt's tokens, by what answers it."""
Call = tuple[str, dict[str, Any]]


class Agent(NamedTuple):
    """An agent, and what it is told to do."""

    binary: str
    """In ``node_modules``."""
    arguments: list[str]
    read: Callable[[Path], Call]
    edit: Callable[[Path, str, str], Call]
    """The call that replaces one text by another."""
    environment: dict[str, str] = {}  # noqa: RUF012


def _shell(path: Path, old: str, new: str) -> Call:
    return "exec_command", {"cmd": f"sed -i s/{old}/{new}/ {path}"}


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code-linux-x64/claude",
        ["-p", "Count.", "--dangerously-skip-permissions"],
        lambda path: ("Read", {"file_path": str(path)}),
        lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        {"IS_SANDBOX": "1"},
    ),
    "codex": Agent(
        "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Count."],
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        _shell,
    ),
    "opencode": Agent(
        "opencode-linux-x64/bin/opencode",
        ["run", "Count."],
        lambda path: ("read", {"filePath": str(path)}),
        lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
    ),
    "qwen": Agent(
        ".bin/qwen",
        ["--yolo", "-p", "Count."],
        lambda path: ("read_file", {"file_path": str(path)}),
        lambda path, old, new: ("edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    ),
}


def results(value: Any) -> int:
    """How many results of tools a body has."""
    if isinstance(value, list):
        return sum(map(results, value))
    if not isinstance(value, dict):
        return 0
    if value.get("type") in ("tool_result", "function_call_output") or value.get("role") == "tool":
        return 1
    return sum(results(value.get(key)) for key in ("messages", "input", "content"))


class Turn(NamedTuple):
    """A request of the agent's with tools, and what came back."""

    number: int
    """From 0: the results of tools in it."""
    tokens: int
    """Of its prompt."""
    cached: int


class Recorder:
    """Between an agent and the server: has the model say what each turn needs, and notes what both say."""

    def __init__(self, server: Running, script: list[str]) -> None:
        self.server, self._script = server, script
        self.turns: list[Turn] = []
        self.asked: list[tuple[str, str, int]] = []
        """Methods, paths and statuses."""
        self.began = asyncio.Event()
        """Set when a first part of a turn's answer is here."""

    async def handle(self, http: web.Request) -> web.StreamResponse:
        data, number, count = await http.read(), -1, 0
        if http.method == "POST" and http.path in COUNTS:
            body = json.loads(data)
            number = results(body) if body.get("tools") else -1
            self._last = http.path, f"?{http.query_string}", body
            count = await self._counted(http.path, body)
            thought = "Hm.</think>" if body.get("thinking", {}).get("type", "disabled") != "disabled" else ""
            await say(self.server, count, thought + (self._script[number] if number >= 0 else "A title"))
        headers = {
            name: value for name, value in http.headers.items() if name.lower() not in ("host", "accept-encoding")
        }
        async with self.server.session.request(
            http.method, self.server.url + str(http.rel_url), data=data, headers=headers
        ) as answer:
            self.asked.append((http.method, http.path, answer.status))
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(http)
            read = b""
            with suppress(ConnectionResetError):  # Codex leaves as soon as it has read what it needs
                async for part in answer.content.iter_any():
                    read += part
                    if number >= 0:
                        self.began.set()
                    await response.write(part)
                await response.write_eof()
        if number >= 0:
            self.turns.append(Turn(number, count, cached(read.decode(errors="replace"))))
        return response

    async def plainly(self) -> None:
        """Ask for the last turn's answer once more, in one piece."""
        path, query, body = self._last
        plain = {key: value for key, value in body.items() if key != "stream_options"} | {"stream": False}
        status, answer, _ = await self.server.post(plain, path + query)
        assert status == 200, answer
        assert self._script[results(body)] in json.dumps(answer)

    async def _counted(self, path: str, body: dict[str, Any]) -> int:
        keys = ("messages", "tools", "chat_template_kwargs") if path == "/v1/chat/completions" else tuple(body)
        asked = {key: body[key] for key in keys if key in body and key not in ("max_tokens", "stream", "metadata")}
        status, answer, _ = await self.server.post(asked, COUNTS[path])
        assert status == 200, answer
        return int(answer.get("input_tokens", answer.get("count")))


def cached(answer: str) -> int:
    """The most cached tokens that an answer, an object or events, tells of."""
    found = [0]

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(value[key] for key in ("cache_read_input_tokens", "cached_tokens") if value.get(key))
            for inner in value.values():
                look(inner)

    for line in answer.splitlines():
        if (text := line.removeprefix("data: ")).startswith("{"):
            look(json.loads(text))
    return max(found)


@asynccontextmanager
async def recording(
    tmp_path: Path, script: list[str], serve: Any = running, aliases: Sequence[str] = ()
) -> AsyncIterator[tuple[Recorder, str]]:
    folder = tmp_path / "model"
    folder.mkdir()
    model, config = puppet(folder), folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    Puppet.said.zero_()
    own = {"access_log": False, "max_body_bytes": 1 << 24, "aliases": list(aliases)}
    sections = {"engine": {"max_seq_len": CONTEXT}, "server": own}
    async with serve([Puppets()], model=model, **sections) as server:
        recorder, app = Recorder(server, script), web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", recorder.handle)
        async with listen(app, bind("127.0.0.1", 0)) as url:
            yield recorder, url


@asynccontextmanager
async def started(
    name: str, url: str, tmp_path: Path, own: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The agent, started by ``infer launch`` in a home of its own, or by itself with variables of its ``own``. Nothing
    but loopback addresses can be reached."""
    agent, home, bin = AGENTS[name], tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    bin.mkdir()
    (bin / name).symlink_to(MODULES / agent.binary)
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    homes = {
        "XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".data", "XDG_CACHE_HOME": ".cache", "XDG_STATE_HOME": ".state",
        "CODEX_HOME": ".codex",
    }  # fmt: skip
    (home / ".codex").mkdir()
    kept = {key: value for key, value in os.environ.items() if "PROXY" not in key.upper()}
    environment = kept | nowhere | {key: str(home / value) for key, value in homes.items()} | agent.environment
    if name == "qwen":  # which would ask the proxy for loopback addresses, too
        for key in nowhere:
            del environment[key]
        (home / ".qwen").mkdir()
        quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
        (home / ".qwen/settings.json").write_text(json.dumps(quiet))
    environment |= {"PWD": str(tmp_path / "work"), "HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment["PATH"] = f"{bin}:{os.environ['PATH']}"
    command = [INFER, "launch", name, "--url", url, "--"] if own is None else [bin / name]
    environment |= own or {}
    process = await asyncio.create_subprocess_exec(
        *command, *agent.arguments,
        cwd=tmp_path / "work", env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def calling(call: Call) -> str:
    name, arguments = call
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("name", "serve"), [*((name, running) for name in AGENTS), pytest.param("claude", behind.running, id="claude-ray")]
)
async def test_ten_turns_with_files_read_and_edited(name: str, serve: Any, tmp_path: Path) -> None:
    """``claude-ray``: two servers and an ingress, with the settings that ``infer ray`` gives them."""
    agent, path = AGENTS[name], tmp_path / "work/count.txt"
    path.parent.mkdir()
    path.write_text("number=0\n")
    calls = [agent.read(path)]
    for i in range(4):
        calls += [agent.edit(path, f"number={i}", f"number={i + 1}"), agent.read(path)]
    async with recording(tmp_path, [*map(calling, calls), LAST], serve) as (recorder, url):
        async with started(name, url, tmp_path) as process, asyncio.timeout(HANG_S):
            said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert path.read_text() == "number=4\n", said.decode()
        assert LAST in said.decode()
        assert [turn.number for turn in recorder.turns] == [*range(10)]
        for before, turn in zip(recorder.turns, recorder.turns[1:], strict=False):
            assert turn.cached >= 0.99 * before.tokens
        refused = [ask for ask in recorder.asked if ask[2] >= 400]
        assert all(method == "HEAD" for method, _, _ in refused), refused
        await recorder.plainly()


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_that_is_interrupted_frees_what_its_answer_held(name: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    async with (
        recording(tmp_path, ["and on " * 20_000]) as (recorder, url),
        started(name, url, tmp_path) as process,
        asyncio.timeout(HANG_S),
    ):
        await recorder.began.wait()
        assert recorder.server.engine_loop.num_open
        os.killpg(process.pid, signal.SIGINT)
        await process.communicate()
        await recorder.server.idle()


async def test_claude_code_finds_the_models_that_have_a_name_for_it(tmp_path: Path) -> None:
    """Those whose names begin as its own do: others, as most of the hub's, need an alias."""
    (tmp_path / "work").mkdir()
    aliases = ("claude-local", "anthropic/local", "other")
    async with recording(tmp_path, [LAST], aliases=aliases) as (recorder, url):
        own = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "x",
            "ANTHROPIC_MODEL": "anthropic/local",
            "ANTHROPIC_SMALL_FAST_MODEL": "claude-local",
            "CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1",
        }
        async with started("claude", url, tmp_path, own) as process, asyncio.timeout(HANG_S):
            said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert ("GET", "/v1/models", 200) in recorder.asked
        found = json.loads((tmp_path / "home/.claude/cache/gateway-models.json").read_text())
        assert found["models"] == [{"id": name, "display_name": name} for name in aliases[:2]]
        assert recorder.turns
