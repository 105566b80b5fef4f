"""The reference has all of the contract, and its docstrings say what a plugin's author has to know."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infer import contracts

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "docs/reference.py"))
PLUGINS = Path(__file__).parents[1] / "docs/plugins.md"
FILES = [file for _, _, files in SCRIPT["SECTIONS"].values() for file in files]
PROMISED, FORM = SCRIPT["promised"](), SCRIPT["form"]


def members(file: str) -> Iterator[tuple[str, Any, Any]]:
    """(where, what, the class that it belongs to or itself) of all that a file defines."""
    for entry in SCRIPT["entries"](file):
        yield f"{file}: {entry.name}", entry, entry
        for member in entry.members:
            yield f"{file}: {entry.name}.{member.name}", member, entry


def test_it_has_what_the_contract_names_and_says_how_a_class_is_made() -> None:
    """All public names of each module that docs/plugins.md promises. (The reference kernels do what their protocol
    says.)"""
    plugins, page = (PLUGINS.read_text(encoding="utf-8"), SCRIPT["page"]())
    promise = plugins.partition("names the contract:")[2].partition("those of `infer_server")[0]
    named = set(re.findall(r"`(infer[\w.]*)`", promise)) - {"infer.kernels.reference", "infer.contracts"}
    # Requests and parameters are public names of infer, and settings have a page of their own.
    readers = {each.name for each in pkgutil.iter_modules(contracts.__path__)} - {"params", "request", "sections"}
    modules = [*map(importlib.import_module, named | {f"infer.contracts.{name}" for name in readers})]
    assert len(modules) == 9 + 16
    missing = []
    for module in modules:
        own = [name for name, what in vars(module).items() if getattr(what, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            what = getattr(module, name)
            if name.startswith("_") or not str(getattr(what, "__module__", "")).startswith("infer"):
                continue
            if isinstance(what, TypeVar):
                continue
            if f"### {name}\n" not in page:
                missing.append(f"{module.__name__}.{name}")
            elif (
                inspect.isclass(what)
                and "__init__" in vars(what)
                and "def __init__" in inspect.getsource(what)
                and f"- `{name}(" not in page
            ):
                missing.append(f"how {module.__name__}.{name} is made")
    assert missing == []


def test_who_keeps_a_promise_is_called_as_the_one_who_makes_it() -> None:
    """``add`` of a scheduler and ``add`` of a reader have nothing in common but the name."""
    made = ast.parse("class A:\n def add(self, sequence): 'Said.'\nclass B:\n def add(self, text): ...").body
    first, other = (entry.members[0] for entry in SCRIPT["_entries"](made))
    shown = [line for owner in SCRIPT["_entries"](made) for line in SCRIPT["_shown"](owner, {FORM(first): "A"})]
    assert FORM(first) != FORM(other)
    assert not any("As in" in line for line in shown)
    assert PROMISED[("free_tokens", "function")] == "CachePoolProtocol"


@pytest.mark.parametrize("file", FILES)
def test_everything_public_says_what_it_does(file: str) -> None:
    """A function or class by its docstring, ``__call__`` by its class, and what keeps a promise by who promises it."""
    assert [
        where
        for where, what, owner in members(file)
        if not isinstance(what.node, ast.AnnAssign)
        and not what.text
        and not ((what.name == "__call__" or what.kind == "maker") and owner.text)
        and FORM(what) not in PROMISED
    ] == []


@pytest.mark.parametrize("file", FILES)
def test_docstrings_name_shapes_bytes_and_errors(file: str) -> None:
    """Where a tensor is returned, its shape, or a function that has it; of a count of bytes, that; of what is raised,
    the error. A name that ends in its dimensions (``x_TD``) says its shape."""
    lacking = []
    for where, what, owner in members(file):
        said = f"{what.text or ''} {owner.text or ''}"
        node = what.node
        if isinstance(node, ast.FunctionDef):
            returns = "" if node.returns is None else ast.unparse(node.returns)
            known = FORM(what) in PROMISED or any(mark in said for mark in ("[", "``", "="))
            if "Tensor" in returns and not known:
                lacking.append(f"{where}: the shape of what it returns")
            raised = {
                name
                for each in ast.walk(node)
                if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)
                for name in [ast.unparse(each.exc.func)]
                if name.endswith("Error") and name not in ("TypeError", "NotImplementedError")
            }
            if raised and "Raise" not in said and PROMISED.get(FORM(what)) in (None, owner.name):
                lacking.append(f"{where}: that it raises {', '.join(sorted(raised))}")
        if "bytes" in what.name and "ytes" not in said and FORM(what) not in PROMISED:
            lacking.append(f"{where}: that it counts bytes")
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Tensor"):
            named = what.name.rpartition("_")[2].isupper() or what.name.rpartition("_")[2][-1:].isdigit()
            if not what.text and not named and not owner.text:
                lacking.append(f"{where}: its shape")
    assert lacking == []
