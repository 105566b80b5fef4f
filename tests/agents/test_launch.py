"""``infer launch``, with executables that say how they were started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving import serving

from infer.server.testing import Serving

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


def launch(*words: str, path: Path | None = None, key: str = KEY) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"INFER_SERVER__API_KEYS": key}
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    return subprocess.run([INFER, "launch", *words], env=environment, capture_output=True, text=True, check=False)


def started(tmp_path: Path, agent: str, *words: str) -> tuple[list[str], dict[str, str]]:
    (tmp_path / agent).write_text(AGENT)
    (tmp_path / agent).chmod(0o755)
    done = launch(agent, *words, path=tmp_path)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


def test_claude_is_told_by_its_environment(server: Serving, tmp_path: Path) -> None:
    arguments, environment = started(tmp_path, "claude", "--url", server.url, "--", "-p", "hello there")
    assert arguments == ["-p", "hello there"]
    assert environment["ANTHROPIC_BASE_URL"] == server.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "demo"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "512"


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
    assert config["provider"][provider]["models"][model]["limit"]["context"] == 512
    arguments, environment = started(tmp_path, "qwen", "--url", server.url)
    assert arguments == ["--auth-type", "openai"]
    assert [environment[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")] == [
        f"{server.url}/v1",
        KEY,
        "demo",
    ]


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
        (["codex", "--url", "{url}", "--name", "other"], "--name 'other' is not served at .*; there is demo"),
        (["codex", "--url", "{url}"], "codex is not installed, or not on PATH; --print"),
    ],
)
def test_what_does_not_start_says_why(server: Serving, words: list[str], message: str) -> None:
    done = launch(*(word.format(url=server.url) for word in words))
    assert done.returncode == 2
    assert re.search(message, done.stderr.replace("\n", " ")), done.stderr
    assert "Traceback" not in done.stderr
    assert KEY not in done.stderr


def test_a_wrong_key_is_said(server: Serving) -> None:
    done = launch("codex", "--url", server.url, key="other")
    assert "answers 401 to /v1/models; set server.api_keys" in done.stderr
    assert done.returncode == 2
