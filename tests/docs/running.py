"""Does what a page of the documentation shows: writes its files, makes its changes and runs its commands, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.pages import ROOT, Page, commands
from tests.forking import Forks, Running
from tests.serving import TEMPLATE

from infer_testing import tiny_checkpoint

BIN = Path(sys.executable).parent
SERVES = re.compile(r"(make|infer) serve\b")
PLAIN = re.compile(r"(infer|pytest) [^|&;<>$`*\\\n]*")
"""A command that asks nothing of a shell."""
FAILS = re.compile(r"[1-9]\d* failed|infer: (?!ready).*|It would not be served\.")
"""A line of output that comes with a status other than 0."""
SUFFIXES = {"python": ".py", "toml": ".toml", "json": ".json", "jinja": ".jinja"}
HUB = {
    "Qwen/Qwen3-0.6B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-4B": "Qwen3ForCausalLM",
    "Qwen/Qwen3-Embedding-0.6B": "Qwen3Model",
    "Qwen/Qwen3-Reranker-0.6B": "Qwen3ForCausalLM",
}
"""The hub's checkpoints that pages name, each with the architecture of the tiny one that stands for it."""


def hub(folder: Path) -> Path:
    """A cache of the hub's, with tiny checkpoints under the names of ``HUB``."""
    for name, architecture in HUB.items():
        place = folder / "hub" / f"models--{name.replace('/', '--')}"
        made = tiny_checkpoint(
            architecture, place / "snapshots" / "0", tie_word_embeddings=True, max_position_embeddings=40960
        )
        (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        (place / "refs").mkdir()
        (place / "refs/main").write_text("0")
    return folder


def changed(text: str, change: str) -> str:
    """The text with a change made: lines with a minus go, those with a plus come."""
    lines = change.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in "- ")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in "+ ")
    assert text.count(old) == 1, old
    return text.replace(old, new)


class Shell:
    """Runs a page's commands in a folder. Port 8000 is ``port`` there. A server runs until the next one is started.
    Commands of `infer` and `pytest` come from ``forks`` if it is given."""

    def __init__(self, folder: Path, variables: Mapping[str, str], port: int, forks: Forks | None = None) -> None:
        self.folder, self.variables, self.port = folder, dict(variables), port
        self._forks = forks
        self._server: subprocess.Popen[str] | Running | None = None

    def here(self, text: str) -> str:
        """A text of the page with this shell's port."""
        return re.sub(r"\b8000\b", str(self.port), text)

    def run(self, command: str, shown: list[str]) -> None:
        """Run a command. Its output has to have the lines that are shown, and its status has to be as they say."""
        text = self.here(command).replace("\\\n", "")
        lines = [self.here(line).rstrip() for line in shown if line.strip() not in ("", "…")]
        if SERVES.match(text):
            said = self._serve(text)
        else:
            if self._forks and PLAIN.fullmatch(text):
                done = self._forks.run(shlex.split(text, comments=True), self.folder, self.variables)
            else:
                done = subprocess.run(
                    ["bash", "-c", text],
                    cwd=self.folder,
                    env=self.variables,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=900,
                )
            said = done.stdout + done.stderr
            fails = any(FAILS.fullmatch(line) for line in lines)
            assert (done.returncode != 0) == fails, f"{command}\n{said}"
        assert not [line for line in lines if line not in said], f"{command}\n{said}"

    def _serve(self, command: str) -> str:
        self.stop()
        where = self.folder
        if command.startswith("make"):  # what make would run, without what it would install
            lines = subprocess.check_output(
                ["make", "--no-print-directory", "-n", "serve", f"PORT={self.port}"], cwd=ROOT, text=True
            ).splitlines()
            command, where = lines[-1].replace(".venv/bin/", f"{BIN}/"), ROOT
        variables = self.variables | {"INFER_SERVER__PORT": str(self.port)}
        if self._forks and PLAIN.fullmatch(command):
            self._server = self._forks.start(shlex.split(command, comments=True), where, variables)
        else:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=where,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        assert self._server.stdout is not None
        overdue = threading.Timer(120, self._server.kill)
        overdue.start()
        said = ""
        for line in self._server.stdout:
            said += line
            if "ready on" in line:
                break
        overdue.cancel()
        assert "ready on" in said, f"{command}\n{said}"
        threading.Thread(target=self._server.stdout.read, daemon=True).start()  # so that its pipe does not fill
        return said

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            assert self._server.wait(60) == 0
            self._server = None


def follow(page: Page, shell: Shell, runs: Callable[[str], bool] = lambda command: True, python: bool = False) -> int:
    """Do what a page says, except for the commands that ``runs`` leaves out. A block whose first line is a comment with
    a name (`# settings.toml`) is that file; others in Python are run if ``python``. Returns how many commands ran."""
    ran = 0
    try:
        for block in page.blocks:
            first, _, rest = block.text.partition("\n")
            name = re.fullmatch(r"(?:#|//|\{#) ([\w./-]+\.\w+)(?: #\})?", first)
            if block.language == "console":
                for command, shown in commands(block.text):
                    if runs(command):
                        shell.run(command, shown)
                        ran += 1
            elif block.language == "diff":
                file = shell.folder / first.removeprefix("--- ")
                file.write_text(changed(file.read_text(), rest))
            elif name and block.language in SUFFIXES:
                assert name[1].endswith(SUFFIXES[block.language]), name[1]
                file = shell.folder / name[1]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(shell.here(rest))
            elif block.language == "python" and python:
                shell.run(f"python - <<'END'\n{block.text}END", [])
    finally:
        shell.stop()
    return ran


def environment() -> dict[str, str]:
    """This one, without what configures infer, Python and pytest, and with the commands of its virtual environment."""
    plain = {
        key: value for key, value in os.environ.items() if not key.startswith(("INFER_", "PYTHON", "PYTEST", "HF_"))
    }
    return plain | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
