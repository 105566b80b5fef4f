"""The engine's view as one file: an observer that keeps what the engine has done, and at the end writes a page of it.

The page has the console's own scripts and styles in it, opens from the disk without a server, and asks nobody for
anything: its policy names the only script and the only style by their hashes. What has been recorded is in elements of
type ``application/json``, one for each run, which no browser runs.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_core import to_json

from infer.contracts.records import RequestRecord, StepRecord
from infer_console.messages import Kept, Maps, Messages, hello

RECORDS, NBYTES = 20_000, 32 << 20
"""The newest of a run's records up to these are kept, and of a file's runs those that fit into so many bytes."""
HEAD = "<!doctype html>\n<!-- A timeline of infer's engine -->\n"
RUN = '<script type="application/json" class="run">{}</script>\n'
RUNS = re.compile(RUN.format("(.*)").rstrip())
IMPORT = re.compile(r'^import (?:\* as (\w+)|\{ (.*?) \}) from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)


class TimelineSettings(BaseModel, extra="forbid"):
    file: Path | None = Field(None, description="write a page of the engine's steps to this file when the engine stops")
    title: str = Field("engine", max_length=200, description="the name of this run on the page, which can have several")
    budget: int | None = Field(None, description="draw a line at this many tokens per step")


class Nothing:
    """The observer if no file is named: it does nothing."""

    def infer_request_finished(self, record: RequestRecord) -> None:
        pass


class Timeline:
    """Records the engine's steps, and writes them to the file when it is closed. A page that is there already gets this
    run as a further one."""

    def __init__(self, file: Path, settings: TimelineSettings) -> None:
        self._file, self._settings = file, settings
        self._messages, self._maps = Messages(), Maps()
        self._kept = Kept(RECORDS, NBYTES)
        self._made = self._positions = 0

    def infer_step_finished(self, record: StepRecord) -> None:
        self._positions = max(self._positions, record.free_tokens)
        for message in self._messages.of(record):
            self._keep(message)
        if (made := self._maps.after(record)) is not None:
            self._keep(made)

    def infer_request_finished(self, record: RequestRecord) -> None:
        self._positions = max(self._positions, record.free_tokens)
        for message in self._messages.of(record):
            self._keep(message)

    def _keep(self, message: dict[str, object]) -> None:
        self._kept.keep(message)
        self._made += 1

    def close(self) -> None:
        for message in self._messages.ended():
            self._keep(message)
        add(self._file, self._settings.title, [*self._records()])

    def _records(self) -> Iterator[bytes]:
        about = {"server": self._settings.title, "budget": self._settings.budget, "fault": self._maps.fault}
        # When the last request has left, all positions are free.
        yield to_json(hello(cache=self._positions, **about))
        if lost := self._made - len(self._kept.all):
            yield to_json(self._messages.lost(lost))
        yield from self._kept.all


def make(settings: TimelineSettings) -> Timeline | Nothing:
    return Nothing() if settings.file is None else Timeline(settings.file, settings)


def add(file: Path, title: str, records: list[bytes]) -> None:
    """Write the page, with this run after those that it already has. Raises OSError."""
    run = b'{"title": %b, "records": [%b]}' % (to_json(title), b",".join(records))
    # An element of this kind ends at the next "</script", whatever is around it.
    made = run.replace(b"<", b"\\u003c").decode()
    before = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    runs = [*(RUNS.findall(before) if before.startswith(HEAD) else ()), made]
    while sum(map(len, runs)) > NBYTES and len(runs) > 1:
        del runs[0]
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(page(runs), encoding="utf-8", newline="\n")
    beside.replace(file)


def page(runs: list[str]) -> str:
    """The page with runs, each JSON without "<"."""
    static = files(__package__).joinpath("static")
    style, script = static.joinpath("style.css").read_text(), bundle("timeline")
    console = static.joinpath("index.html").read_text()
    found = re.search(r'<div id="live"[^>]*>(.*?)\n</div>', console, re.DOTALL)
    assert found is not None
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return f"""{HEAD}<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>infer timeline</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header>
  <h1>infer</h1>
  <label>Run <select id="run"></select></label>
</header>
<noscript>This page needs JavaScript.</noscript>
<main><div id="live" class="view">{found[1]}</div></main>
{"".join(map(RUN.format, runs))}<script>{script}</script>
</body>
</html>
"""


def bundle(entry: str) -> str:
    """A module of the console's, and those that it imports, as one script: each is a function of its own."""
    static, made = files(__package__).joinpath("static"), dict[str, str]()

    def taken(found: re.Match[str]) -> str:
        whole, names, module = found.groups()
        include(module)
        return f"const {whole or '{ ' + names.replace(' as ', ': ') + ' }'} = modules.{module};\n"

    def include(module: str) -> None:
        if module in made:
            return
        text = IMPORT.sub(taken, static.joinpath(f"{module}.js").read_text())
        names = ", ".join(name for _, name in EXPORT.findall(text))
        text = EXPORT.sub(r"\1", text)
        assert not re.search(r"^(import|export)\b|</script|<!--", text, re.MULTILINE), module
        made[module] = f"modules.{module} = (() => {{\n{text}return {{ {names} }};\n}})();\n"

    include(entry)
    return f'"use strict";\nconst modules = {{}};\n{"".join(made.values())}'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
