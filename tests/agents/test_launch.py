"""``infer launch``, with executables that say how they were started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.serving import serving

from infer.commands.cli import main
from infer.server.testing import Serving
from infer_agents.launch import AGENTS, Server

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


def launch(*words: str, path: Path | None = None, key: str = KEY, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"INFER_SERVER__API_KEYS": key} | variables
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    return subprocess.run([INFER, "launch", *words], env=environment, capture_output=True, text=True, check=False)


def started(tmp_path: Path, agent: str, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    (tmp_path / agent).write_text(AGENT)
    (tmp_path / agent).chmod(0o755)
    done = launch(agent, *words, path=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> Refused:
    """What the command says that has started nothing, here in this process: nothing is on PATH."""

    def refuse(*words: str, key: str = KEY) -> str:
        monkeypatch.setenv("INFER_SERVER__API_KEYS", key)
        monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
        try:
            code: object = main(["launch", *words])
        except SystemExit as error:  # argparse's
            code = error.code
        assert code == 2
        return capfd.readouterr().err

    return refuse


def test_claude_is_told_by_its_environment(server: Serving, tmp_path: Path) -> None:
    arguments, environment = started(tmp_path, "claude", "--url", server.url, "--", "-p", "hello there")
    assert arguments == ["-p", "hello there"]
    assert environment["ANTHROPIC_BASE_URL"] == server.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "demo"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "512"


def test_claude_uses_no_other_server(server: Serving, tmp_path: Path) -> None:
    others = dict.fromkeys(("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"), "1")
    _, environment = started(tmp_path, "claude", "--url", server.url, **others)
    assert not others.keys() & environment.keys()
    printed = launch("claude", "--url", server.url, "--print", path=tmp_path).stdout
    shell = os.environ | others | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(printed, shell=True, env=shell, capture_output=True, text=True, check=True)
    again = json.loads(done.stdout)[1]
    assert not others.keys() & again.keys()
    assert again["ANTHROPIC_AUTH_TOKEN"] == KEY


def test_codex_is_told_by_its_command_line(server: Serving, tmp_path: Path) -> None:
    arguments, environment = started(tmp_path, "codex", "--url", f"{server.url}/v1/", "--", "exec")
    assert arguments[::2] == [*["-c"] * (len(arguments) // 2), "exec"]
    told: dict[str, Any] = tomllib.loads("\n".join(arguments[1::2]))
    assert (told["model"], told["model_context_window"], told["model_provider"]) == ("demo", 512, "infer")
    provider = told["model_providers"]["infer"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{server.url}/v1", "responses")
    assert environment[provider["env_key"]] == KEY


def test_opencode_and_qwen_are_told_of_chats(server: Serving, tmp_path: Path) -> None:
    _, environment = started(tmp_path, "opencode", "--url", server.url)
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"] == {"baseURL": f"{server.url}/v1", "apiKey": KEY}
    assert config["provider"][provider]["models"][model]["limit"] == {"context": 512, "output": 128}
    arguments, environment = started(tmp_path, "qwen", "--url", server.url)
    assert arguments == ["--auth-type", "openai"]
    assert [environment[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")] == [
        f"{server.url}/v1",
        KEY,
        "demo",
    ]


def test_opencode_leaves_most_of_a_long_context_to_the_prompt() -> None:
    told = AGENTS["opencode"](Server("http://127.0.0.1:8000", "demo", 262_144, None)).environment
    model = json.loads(told["OPENCODE_CONFIG_CONTENT"])["provider"]["infer"]["models"]["demo"]
    assert model["limit"] == {"context": 262_144, "output": 32_000}


def test_what_is_printed_starts_the_same_in_a_shell(server: Serving, tmp_path: Path) -> None:
    arguments, environment = started(tmp_path, "codex", "--url", server.url, "--", "a b", "$c")
    printed = launch("codex", "--url", server.url, "--print", "--", "a b", "$c")
    assert shlex.split(printed.stdout)[0] == "env"
    shell = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(printed.stdout, shell=True, env=shell, capture_output=True, text=True, check=True)
    again, found = json.loads(done.stdout)
    assert again == arguments
    assert found["INFER_API_KEY"] == environment["INFER_API_KEY"]


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
def test_what_does_not_start_says_why(refused: Refused, server: Serving, words: list[str], message: str) -> None:
    said = refused(*(word.format(url=server.url) for word in words))
    assert re.search(message, said.replace("\n", " ")), said
    assert KEY not in said


def test_a_wrong_key_is_said(refused: Refused, server: Serving) -> None:
    said = refused("codex", "--url", server.url, key="other")
    assert "answers 401 to /v1/models; set server.api_keys" in said


@contextmanager
def answering(status: int, location: str = "") -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers every GET so, and the paths and keys that it gets."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}", got
        finally:
            made.shutdown()
            thread.join()


def test_a_redirect_does_not_get_the_key() -> None:
    with answering(404) as (other, got), answering(302, f"{other}/v1/models") as (url, _):
        done = launch("codex", "--url", url)
    assert got == []
    assert f"redirects /v1/models to {other}/v1/models" in " ".join(done.stderr.split())
    assert done.returncode == 2


def test_a_loopback_address_is_asked_without_a_proxy(server: Serving) -> None:
    with answering(404) as (proxy, got):
        done = launch("codex", "--url", server.url, "--print", http_proxy=proxy, no_proxy="")
    assert got == []
    assert done.returncode == 0, done.stderr
