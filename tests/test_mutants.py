"""Every planted bug can be planted, and the command tells which of them the tests notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants import plant
from tests.mutants.plant import ROOT, Mutant, lacking, read, try_all


@pytest.mark.slow
def test_every_mutant_can_be_planted_and_names_tests_that_exist() -> None:
    mutants = read()
    assert mutants
    for mutant in mutants:
        mutant.planted((ROOT / mutant.file).read_text(encoding="utf-8"))
        assert mutant.tests, f"{mutant.name}: no tests"
        assert [why for test in mutant.tests if (why := lacking(test))] == [], mutant.name


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one module and three tests, of which one fails anyway and one is skipped. Their process has
    something to say at its end, as some libraries do."""
    (tmp_path / "core/src").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "core/src/planted_on.py").write_text("def double(x):\n    return x * 2 + 0\n")
    (tmp_path / "tests/test_it.py").write_text(
        "import atexit\nimport pytest\nfrom planted_on import double\natexit.register(print, 'leaked 2 functions')\n"
        "def test_it():\n    assert double(2) == 4\n"
        "def test_red():\n    assert 0\ndef test_skipped():\n    pytest.skip('no browser')\n"
    )
    monkeypatch.setattr(plant, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.slow  # ten runs of pytest
def test_killed_survived_and_broken_are_told_apart(tree: Path) -> None:
    def mutant(name: str, old: str, new: str, test: str = "test_it") -> Mutant:
        return Mutant(name, "core/src/planted_on.py", old, new, (f"tests/test_it.py::{test}",))

    mutants = [
        mutant("noticed", "x * 2", "x * 3"),
        mutant("same for 2", "x * 2", "x ** 2"),
        mutant("absent", "x * 7", "x"),
        mutant("changes nothing", "return x", "return  x"),
        mutant("not python", "x * 2", "x * )"),
        mutant("red anyway", "x * 2", "x * 3", "test_red"),
        mutant("no such test", "x * 2", "x * 3", "test_none"),
        mutant("no test runs", "x * 2", "x * 3", "test_skipped"),
    ]
    before = (tree / "core/src/planted_on.py").read_text()
    found = {mutant.name: outcome for mutant, outcome, _ in try_all(mutants, 2)}
    assert found == dict.fromkeys(found, "broken") | {"noticed": "killed", "same for 2": "SURVIVED"}
    assert len(found) == len(mutants)
    assert (tree / "core/src/planted_on.py").read_text() == before


def test_a_test_that_does_not_exist_is_seen_without_running_it() -> None:
    assert lacking("tests/core/engine/test_traffic.py::TestTraffic") is None
    assert (
        lacking("tests/core/engine/test_engine.py::test_nothing")
        == "tests/core/engine/test_engine.py has no test_nothing"
    )
    assert lacking("tests/nothing.py") == "tests/nothing.py is no file"


def test_the_command_says_so_when_no_mutant_has_the_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "no such name"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "no such mutant\n")
