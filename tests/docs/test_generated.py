"""What pages take from the code is as the code has it: tables, quoted sentences, and routes."""

from __future__ import annotations

import ast
import json
import re
import runpy
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.docs.pages import PAGES, ROOT

from infer_models import infer_models
from infer_server.openapi import PAGES as OWN
from infer_server.testing import serving

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs/tables.py"))
SLOW = ("memory", "coders", "compared")
"""Tables that take seconds to make."""
HELD = {name: page for page in PAGES.values() for name, _ in SCRIPT["TABLE"].findall(page.text)}


def test_each_table_is_in_a_page() -> None:
    assert {*HELD} == {*SCRIPT["TABLES"]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in HELD])
def test_a_table_is_what_the_code_says(name: str) -> None:
    text = HELD[name].text
    assert text == SCRIPT["written"](text, [name]), "python docs/tables.py writes it anew"


def sentences() -> Iterator[str]:
    """Every text of the code, with … for what is put into it."""
    for file in (*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[.\d]*[sdfg]|\{[\w!]+\}", "…", node.value)


def test_the_sentences_that_are_explained_are_those_of_the_code() -> None:
    known = [" ".join(text.split()) for text in sentences()]
    quoted = [
        (block.line, block.text.strip())
        for block in PAGES["docs/troubleshooting.md"].blocks
        if block.language == "text"
    ]
    assert quoted
    assert [quote for quote in quoted if not any(quote[1] in text for text in known)] == []


def test_what_broke_elsewhere_is_guarded_here() -> None:
    _, _, text = PAGES["docs/agents.md"].text.partition("## What broke elsewhere")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    named = {(row[0], test) for row in rows for test in re.findall(r"`(test_\w+)`", row[-1])}
    assert {each for each, _ in named} == {row[0] for row in rows}, "each row names a test"
    files = (*ROOT.glob("tests/agents/test_*.py"), ROOT / "tests/server/test_api.py")
    tests = {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(), re.M)}
    assert {each for each in named if each[1] not in tests} == set()


def test_the_routes_of_the_api_are_those_of_its_page() -> None:
    """Those that /openapi.json describes, which are all but pages that plugins serve for themselves."""
    page = PAGES["docs/api.md"]
    named = {path for _, code in page.code for path in re.findall(r"(?<![\w.])/[\w/{}.]+", code)}
    with (
        serving("demo", kernels={"threads": 1}) as server,
        urllib.request.urlopen(f"{server.url}/openapi.json") as answer,
    ):
        paths = json.load(answer)["paths"]
    served = {re.sub(r"{\w+}", "{}", path) for path in paths} | {*OWN}
    assert {re.sub(r"{\w+}", "{}", path) for path in named} == served


def test_the_page_of_the_families_names_every_architecture() -> None:
    """But those without an output head, which are named as one."""
    named = {name for _, text in PAGES["plugins/models/README.md"].inline for name in re.findall(r"\w+", text.content)}
    known = {name for registration in infer_models() for name in registration.architectures}
    assert {name for name in known if not name.endswith("Model")} - named == set()
