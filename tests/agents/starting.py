"""The agents from npm, what each is told to do, and how it is started: offline, without a login, in a home of its
own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

INFER = Path(sys.executable).with_name("infer")
MODULES = Path(sys.prefix) / "agents/node_modules"
NEEDED = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="other binaries are needed"),
]
Call = tuple[str, dict[str, Any]]


class Agent(NamedTuple):
    """An agent, and what it is told to do."""

    command: str
    """As ``infer launch`` knows it."""
    binary: str
    """In ``node_modules``."""
    begin: list[str]
    """The arguments of a first task."""
    go_on: list[str]
    """The arguments that go on with the latest session."""
    read: Callable[[Path], Call]
    edit: Callable[[Path, str, str], Call]
    """The call that replaces one line by another."""
    environment: dict[str, str] = {}  # noqa: RUF012
    rules: int = 0
    """How many bytes the project's AGENTS.md has."""


def _shell(path: Path, old: str, new: str) -> Call:
    return "exec_command", {"cmd": f"sed -i s/{old}/{new}/ {path}"}


def _patch(path: Path, old: str, new: str) -> Call:
    lines = ("*** Begin Patch", f"*** Update File: {path.name}", "@@", f"-{old}", f"+{new}", "*** End Patch")
    return "apply_patch", {"input": "\n".join(lines)}


def _codex(edit: Callable[[Path, str, str], Call], *words: str) -> Agent:
    words = (*words, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return Agent(
        "codex",
        "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
        ["exec", *words, "Count."],
        ["exec", "resume", "--last", *words, "Go on."],
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        edit,
        rules=24_000,
    )


GPT = "gpt-5.5"
"""A name by which Codex offers the model its custom tool, and asks for reasoning."""
AGENTS = {
    "claude": Agent(
        "claude",
        "@anthropic-ai/claude-code-linux-x64/claude",
        ["-p", "Count.", "--dangerously-skip-permissions"],
        ["--continue", "-p", "Go on.", "--dangerously-skip-permissions"],
        lambda path: ("Read", {"file_path": str(path)}),
        lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        {"IS_SANDBOX": "1"},
    ),
    "codex": _codex(_shell),
    f"codex-{GPT}": _codex(_patch, "-m", GPT),
    "opencode": Agent(
        "opencode",
        "opencode-linux-x64/bin/opencode",
        ["run", "Count."],
        ["run", "--continue", "Go on."],
        lambda path: ("read", {"filePath": str(path)}),
        lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
    ),
    "qwen": Agent(
        "qwen",
        ".bin/qwen",
        ["--yolo", "-p", "Count."],
        ["--continue", "--yolo", "-p", "Go on."],
        lambda path: ("read_file", {"file_path": str(path)}),
        lambda path, old, new: ("edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    ),
}


def rules(size: int) -> str:
    """A project's AGENTS.md of so many bytes, which nobody has written."""
    lines = (
        f"- Part {i}: its sources are in src/part{i}, and `make check-{i}` has to pass before each commit.\n"
        for i in range(size)
    )
    text = "# Rules\n\n"
    while len(text) < size:
        text += next(lines)
    return text[:size]


@asynccontextmanager
async def started(
    agent: Agent, url: str | None, folder: Path, *words: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The agent, started by ``infer launch``, or by itself if there is no ``url``, with these arguments, in the folder
    ``work`` of the given one and with a home beside it, which it finds again. Nothing but loopback addresses can be
    reached."""
    home, bin, work = (folder / name for name in ("home", "bin", "work"))
    for each in (home / ".codex", home / ".qwen", bin, work):
        each.mkdir(parents=True, exist_ok=True)
    if agent.rules:
        (work / "AGENTS.md").write_text(rules(agent.rules))
    if not (bin / agent.command).is_symlink():
        (bin / agent.command).symlink_to(MODULES / agent.binary)
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    homes = {
        "XDG_CONFIG_HOME": ".config", "XDG_DATA_HOME": ".data", "XDG_CACHE_HOME": ".cache", "XDG_STATE_HOME": ".state",
        "CODEX_HOME": ".codex",
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if "PROXY" not in key.upper()}
    environment = kept | nowhere | {key: str(home / value) for key, value in homes.items()} | agent.environment
    if agent.command == "qwen":  # which would ask the proxy for loopback addresses, too
        for key in nowhere:
            del environment[key]
        quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
        (home / ".qwen/settings.json").write_text(json.dumps(quiet))
    environment |= {"PWD": str(work), "HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment["PATH"] = f"{bin}:{os.environ['PATH']}"
    launch = [bin / agent.command] if url is None else [INFER, "launch", agent.command, "--url", url, "--"]
    process = await asyncio.create_subprocess_exec(
        *launch, *words,
        cwd=work, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
