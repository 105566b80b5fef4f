"""`infer new plugin`: what it writes is sound for every slot, and its test says what the README announces."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from infer.commands.cli import main
from infer.plugins.discovery import Plugins
from infer.plugins.extension_points import EXTENSION_POINTS
from infer_testing import ConformanceError, check, new

OTHERS = {"tools": "tool_format", "route": "routes"}
"""The slots that have another name in the table of slots."""
FAST = ("model", "weights", "tools", "proposer")


@pytest.mark.parametrize("slot", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in new.KINDS])
def test_the_plugin_is_found_and_its_test_says_what_the_readme_announces(
    slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"infer-new-{slot}"
    assert main(["new", "plugin", name, "--slot", slot]) == 0
    package = tmp_path / name
    monkeypatch.syspath_prepend(str(package / "src"))
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    ((entry, module),) = project["entry-points"]["infer"].items()
    plugins = Plugins.discover([importlib.import_module(module)])
    (offer,) = (o for o in plugins.offers[OTHERS.get(slot, slot)] if o.distribution == module)
    assert offer.name == entry == f"new_{slot}"
    tests = ModuleType(f"test_{module}")
    monkeypatch.setitem(sys.modules, tests.__name__, tests)
    exec((package / "tests" / f"test_{module}.py").read_text(), vars(tests))
    (test,) = (value for name, value in vars(tests).items() if name.startswith("test_"))
    given = {"caplog": caplog} if "caplog" in inspect.signature(test).parameters else {}
    readme = (package / "README.md").read_text()
    if new.PASSES in readme:
        test(**given)
    else:
        (announced,) = re.findall(r"fails until .*?`(.*?)`", readme, re.DOTALL)
        with pytest.raises(ConformanceError, match=re.escape(announced)) as failure:
            test(**given)
        first = next(outcome for outcome in failure.value.outcomes)
        assert announced in first.contract


def test_every_slot_of_the_kit_and_more_can_be_written() -> None:
    assert {*check._SUBJECTS} <= {*new.KINDS, *(OTHERS.get(slot, slot) for slot in new.KINDS)}
    assert {OTHERS.get(slot, slot) for slot in new.KINDS} <= {*EXTENSION_POINTS}


def test_what_is_written_finds_no_fault_with_ruff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for slot in new.KINDS:
        new.write(f"infer-{slot}-plugin", slot)
        ruff = [sys.executable, "-m", "ruff", "check", "--select", "E,F,W,I,UP,B,RUF", "."]
        done = subprocess.run(ruff, cwd=f"infer-{slot}-plugin", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_is_written_finds_no_fault_with_mypy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for slot in new.KINDS:
        new.write(f"infer-{slot}-plugin", slot)
        paths += [f"infer-{slot}-plugin/src", f"infer-{slot}-plugin/tests"]
    mypy = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", *paths]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "slot", "says"),
    [
        ("mine", "cash", "--slot cash: there is no such slot; it is one of model, cache, "),
        ("My_Plugin", "cache", "'My_Plugin' cannot be a package's name; take lower-case letters"),
        ("a--b", "cache", "'a--b' cannot be a package's name"),
        ("../mine", "cache", "'../mine' cannot be a package's name"),
        ("x" * 65, "cache", "64 characters at most"),
        ("class", "cache", "needs a module 'class', which is a word of Python"),
        ("infer", "cache", "needs a module 'infer', which can be imported here already"),
        ("infer-models", "model", "needs a module 'infer_models', which can be imported here already; take another"),
        ("here", "cache", "here is here already; take another name or another folder"),
    ],
)
def test_what_cannot_be_written_is_said(
    name: str, slot: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert main(["new", "plugin", name, "--slot", slot]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["here"], "nothing is written"
