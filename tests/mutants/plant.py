"""Planted bugs: what they are, and what becomes of the tests that should notice them.

A mutant is a small change of one file and the tests of which at least one must fail because of it. They are kept
as data in the TOML files beside this module. Compiled sources are out of scope: a change there needs a build.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.forking import Forks

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
"""For each test that a mutant names. It may make them hang: that is noticed, too."""
LEFT_OUT = (".*", "__pycache__", "dist", "build", "*.egg-info")
PRELOADED = ("torch", "transformers", "hypothesis", "pytest")
"""What tests import, without what may have a bug planted. Importing it takes longer than most tests."""
PYTEST = (
    str(Path(sys.executable).with_name("pytest")),
    "--numprocesses",
    "0",
    "--tb=short",
    "-rfEs",
    "-p",
    "no:cacheprovider",
)
PASSED = re.compile(r"^=* ?.*\b[1-9]\d* passed\b.* in [\d.]+s", re.MULTILINE)
"""pytest's last line, which libraries may follow with lines of their own when the process ends."""

Outcome = Literal["killed", "SURVIVED", "broken"]


@dataclass(frozen=True)
class Mutant:
    name: str
    """What the bug does."""
    file: str
    """Relative to the repository."""
    old: str
    """Text that the file holds exactly once."""
    new: str
    tests: tuple[str, ...]
    """pytest's node ids: file, or file::test."""

    def planted(self, source: str) -> str:
        """The source with the bug in it. Raises ValueError where it cannot be planted."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds the old text {count} times, not once")
        changed = source.replace(self.old, self.new)
        if self.file.endswith(".py") and ast.dump(ast.parse(changed)) == _tree(source):
            raise ValueError(f"the change to {self.file} changes nothing")
        return changed


def read(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """All there are, file by file. Raises ValueError for an entry that is not one, or a name given twice."""
    found: dict[str, Mutant] = {}
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]:
            try:
                mutant = Mutant(**entry | {"tests": tuple(entry["tests"])})
            except (KeyError, TypeError) as error:
                raise ValueError(f"{file.name}: {entry.get('name')!r} is no mutant: {error}") from None
            if mutant.name in found:
                raise ValueError(f"{file.name}: there are two mutants named {mutant.name!r}")
            found[mutant.name] = mutant
    return list(found.values())


@functools.cache
def changed(ref: str) -> frozenset[str]:
    """The files that differ from a commit, new ones included."""
    asked = (["diff", "--name-only", ref], ["ls-files", "--others", "--exclude-standard"])
    lists = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True) for words in asked]
    return frozenset(line for found in lists for line in found.stdout.splitlines())


@functools.cache
def _tree(source: str) -> str:
    return ast.dump(ast.parse(source))


@functools.cache
def _body(file: Path) -> Sequence[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def lacking(test: str) -> str | None:
    """Why there is no such test, so far as its file tells without being imported."""
    name, *parts = test.partition("[")[0].split("::")
    if not (ROOT / name).is_file():
        return f"{name} is no file"
    body = _body(ROOT / name)
    for part in parts:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == part:
                body = node.body
                break
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [part]:
                body = []
                break
        else:
            return f"{name} has no {part}"
    return None


class Workshop:
    """A copy of the sources, where tests run as they do in the repository."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
        if (ROOT / ".venv").is_dir():
            (folder / ".venv").symlink_to(ROOT / ".venv")  # where some tests look for other interpreters' packages
        sources = [folder, folder / "core/src", *sorted(folder.glob("plugins/*/src"))]
        # These come before the repository's own, which are installed as editable.
        self._env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "PYTHONDONTWRITEBYTECODE": "",
            "OMP_NUM_THREADS": "1",  # several of these run side by side
        }
        self._forks = Forks(Path(sys.executable), self._env, *PRELOADED)
        self._times = itertools.count(1)

    def test(self, tests: Sequence[str], *options: str) -> tuple[int | None, str]:
        """pytest's exit status, None where it did not end in time, and what it printed."""
        words = [*PYTEST, *options, *tests]
        try:
            done = self._forks.run(words, self._folder, self._env, TIMEOUT_S * len(tests))
        except subprocess.TimeoutExpired as late:
            return None, str(late)
        return done.returncode, done.stderr + done.stdout

    def close(self) -> None:
        self._forks.close()

    def _write(self, file: Path, source: str) -> None:
        """Each version has a time of its own: two of one size and one second would share their bytecode."""
        file.write_text(source, encoding="utf-8")
        os.utime(file, (at := next(self._times), at))

    def try_out(self, mutant: Mutant) -> tuple[Outcome, str]:
        """Plant it, run its tests, and take it out again. The second value says why it is broken, if so."""
        file = self._folder / mutant.file
        source = file.read_text(encoding="utf-8")
        try:
            self._write(file, mutant.planted(source))
        except (ValueError, SyntaxError) as error:
            return "broken", str(error)
        try:
            status, output = self.test(mutant.tests, "-x")
        finally:
            self._write(file, source)
        if status == 0:
            return (
                ("SURVIVED", "")
                if PASSED.search(output)
                else ("broken", f"its tests are skipped here:\n{_end(output)}")
            )
        return ("killed", "") if status in (1, None) else ("broken", f"its tests cannot be run:\n{_end(output)}")


def try_all(mutants: Sequence[Mutant], workers: int) -> Iterator[tuple[Mutant, Outcome, str]]:
    """Each one's outcome, as it is known. A mutant whose tests fail without it is broken."""
    with _workshops(min(workers, len(mutants))) as free, ThreadPoolExecutor(workers) as pool:

        def failing(tests: Sequence[str]) -> dict[str, str]:
            """Which of these fail as things are, and how."""
            workshop = free.get()
            try:
                status, output = workshop.test(tests)
            finally:
                free.put(workshop)
            if status == 1:
                lines = output.splitlines()
                starts = {test: (f"FAILED {test}", f"ERROR {test}") for test in tests}
                return {test: _end(output) for test in tests if any(line.startswith(starts[test]) for line in lines)}
            if status != 0 and len(tests) > 1:  # one that cannot be collected keeps the others from running
                return {test: why for each in tests for test, why in failing([each]).items()}
            return {} if status == 0 else {tests[0]: _end(output)}

        def outcome(mutant: Mutant) -> tuple[Mutant, Outcome, str]:
            workshop = free.get()
            try:
                return mutant, *workshop.try_out(mutant)
            finally:
                free.put(workshop)

        tests = sorted({test for mutant in mutants for test in mutant.tests})
        shares = [share for i in range(workers) if (share := tests[i::workers])]
        red = {test: why for found in pool.map(failing, shares) for test, why in found.items()}
        sound = []
        for mutant in mutants:
            if bad := [test for test in mutant.tests if test in red]:
                yield mutant, "broken", f"{bad[0]} fails without it:\n{red[bad[0]]}"
            else:
                sound.append(mutant)
        yield from pool.map(outcome, sound)


@contextmanager
def _workshops(number: int) -> Iterator[queue.SimpleQueue[Workshop]]:
    free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="infer-mutants-") as folder, ExitStack() as closed:
        for i in range(number):
            free.put(workshop := Workshop(Path(folder) / str(i)))
            closed.callback(workshop.close)
        yield free


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-15:])
