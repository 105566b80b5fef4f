"""``infer launch``, with executables that say how they were started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from tests.server.test_fetching import answering
from tests.serving import serving

from infer.commands.cli import main
from infer_agents.launch import AGENTS, Server
from infer_server.testing import Serving

INFER = Path(sys.executable).with_name("infer")
KEY = "sesame"
AGENT = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(server={"api_keys": KEY, "access_log": False}, engine={"max_seq_len": 512}) as made:
        yield made


class Started(NamedTuple):
    """What a command has done in this process, where nothing takes its place."""

    code: object
    stdout: str
    stderr: str
    arguments: list[str]
    """Those of the agent that would have been started, without its name."""
    environment: dict[str, str]


Launch = Callable[..., Started]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Launch:
    """``infer launch``, with one folder on PATH, in which are these agents."""

    def launched(*words: str, key: str = KEY, agents: Iterable[str] = (), **variables: str) -> Started:
        for agent in agents:
            (tmp_path / agent).write_text(AGENT)
            (tmp_path / agent).chmod(0o755)
        found: list[tuple[list[str], dict[str, str]]] = []

        def execute(name: str, words: list[str], environment: Mapping[str, str]) -> NoReturn:
            assert words[0] == name
            found.append((words[1:], dict(environment)))
            raise SystemExit(0)

        variables = {"PATH": str(tmp_path), "INFER_SERVER__API_KEYS": key} | variables
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "execvpe", execute)
            for name, value in variables.items():
                patch.setenv(name, value)
            try:
                code: object = main(["launch", *words])
            except SystemExit as error:  # argparse's, or that of ``execute``
                code = error.code
        return Started(code, *capfd.readouterr(), *(found or [([], {})])[0])

    return launched


def test_claude_is_told_by_its_environment(server: Serving, launch: Launch) -> None:
    done = launch("claude", "--url", server.url, "--", "-p", "hello there", agents=["claude"])
    assert done.arguments == ["-p", "hello there"]
    environment = done.environment
    assert environment["ANTHROPIC_BASE_URL"] == server.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "demo"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "512"


def test_claude_uses_no_other_server(server: Serving, launch: Launch, tmp_path: Path) -> None:
    others = dict.fromkeys(("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"), "1")
    done = launch("claude", "--url", server.url, agents=["claude"], **others)
    assert not others.keys() & done.environment.keys()
    printed = launch("claude", "--url", server.url, "--print").stdout
    _, again = in_a_shell(printed, tmp_path, **others)
    assert not others.keys() & again.keys()
    assert again["ANTHROPIC_AUTH_TOKEN"] == KEY


def test_codex_is_told_by_its_command_line(server: Serving, launch: Launch) -> None:
    done = launch("codex", "--url", f"{server.url}/v1/", "--", "exec", agents=["codex"])
    arguments = done.arguments
    assert arguments[::2] == [*["-c"] * (len(arguments) // 2), "exec"]
    told: dict[str, Any] = tomllib.loads("\n".join(arguments[1::2]))
    assert (told["model"], told["model_context_window"], told["model_provider"]) == ("demo", 512, "infer")
    provider = told["model_providers"]["infer"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{server.url}/v1", "responses")
    assert provider["stream_idle_timeout_ms"] > 300_000, "what Codex waits of itself"
    assert done.environment[provider["env_key"]] == KEY


def test_opencode_and_qwen_are_told_of_chats(server: Serving, launch: Launch) -> None:
    done = launch("opencode", "--url", server.url, agents=["opencode"])
    config = json.loads(done.environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"] == {"baseURL": f"{server.url}/v1", "apiKey": KEY}
    assert config["provider"][provider]["models"][model]["limit"] == {"context": 512, "output": 128}
    done = launch("qwen", "--url", server.url, agents=["qwen"])
    assert done.arguments == ["--auth-type", "openai"]
    assert [done.environment[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")] == [
        f"{server.url}/v1",
        KEY,
        "demo",
    ]


def test_opencode_leaves_most_of_a_long_context_to_the_prompt() -> None:
    told = AGENTS["opencode"](Server("http://127.0.0.1:8000", "demo", 262_144, None)).environment
    model = json.loads(told["OPENCODE_CONFIG_CONTENT"])["provider"]["infer"]["models"]["demo"]
    assert model["limit"] == {"context": 262_144, "output": 32_000}


def in_a_shell(printed: str, folder: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment of the agent that is started so, and is in this folder."""
    shell = os.environ | variables | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(printed, shell=True, env=shell, capture_output=True, text=True, check=True)
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


def test_what_is_printed_starts_the_same_in_a_shell(server: Serving, launch: Launch, tmp_path: Path) -> None:
    done = launch("codex", "--url", server.url, "--", "a b", "$c", agents=["codex"])
    printed = launch("codex", "--url", server.url, "--print", "--", "a b", "$c").stdout
    assert shlex.split(printed)[0] == "env"
    arguments, environment = in_a_shell(printed, tmp_path)
    assert arguments == done.arguments
    assert environment["INFER_API_KEY"] == done.environment["INFER_API_KEY"]


@pytest.mark.slow
def test_the_command_becomes_the_agent(server: Serving, launch: Launch, tmp_path: Path) -> None:
    done = launch("codex", "--url", server.url, "--", "a b", agents=["codex"])
    environment = os.environ | {"INFER_SERVER__API_KEYS": KEY, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [str(INFER), "launch", "codex", "--url", server.url, "--", "a b"]
    told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    arguments, _ = json.loads(told.stdout)
    assert arguments == done.arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "invalid choice: 'nobody'"),
        (["codex", "--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9 .*infer serve"),
        (["codex", "--url", "localhost"], "--url 'localhost' is no address such as"),
        (["codex", "--url", "http://127.0.0.1:80x"], "--url 'http://127.0.0.1:80x' is no address such as"),
        (["codex", "--url", "http://[::1"], r"--url 'http://\[::1' is no address such as"),
        (["codex", "--url", "http://a b"], "--url 'http://a b' is no address such as"),
        (["codex", "--url", "http://"], "--url 'http:/*' is no address such as"),
        (["codex", "--url", "{url}", "--name", "other"], "--name 'other' is not served at .*; there is demo"),
        (["codex", "--url", "{url}"], "codex is not installed, or not on PATH; --print"),
    ],
)
def test_what_does_not_start_says_why(launch: Launch, server: Serving, words: list[str], message: str) -> None:
    done = launch(*(word.format(url=server.url) for word in words))
    assert done.code == 2
    assert re.search(message, done.stderr.replace("\n", " ")), done.stderr
    assert KEY not in done.stderr


def test_a_wrong_key_is_said(launch: Launch, server: Serving) -> None:
    done = launch("codex", "--url", server.url, key="other")
    assert "answers 401 to /v1/models; set server.api_keys" in done.stderr
    assert done.code == 2


def test_a_redirect_does_not_get_the_key(launch: Launch) -> None:
    with answering("404 Not Found") as (other, got), answering(f"302 Found\r\nLocation: {other}/v1/models") as (url, _):
        done = launch("codex", "--url", url)
    assert got == []
    assert f"redirects /v1/models to {other}/v1/models" in " ".join(done.stderr.split())
    assert done.code == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_no_proxy_gets_the_key(host: str, launch: Launch, server: Serving) -> None:
    url = server.url.replace("127.0.0.1", host)
    with answering("404 Not Found") as (proxy, got):
        done = launch("codex", "--url", url, "--print", http_proxy=proxy, no_proxy="")
    assert got == []
    assert done.code == 0, done.stderr
