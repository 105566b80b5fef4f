"""Which of the peers' tests run, and which of them are expected to differ: ``expected.toml``."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LAST = HERE / "last.json"
"""What the last recorded run found."""
SURPRISES = ("fails, and is not listed", "is listed, and passes", "is listed, and does not run")


class Outcome(NamedTuple):
    """What became of a test."""

    kind: str
    """passed, failed or skipped."""
    why: str = ""


class Difference(NamedTuple):
    """Tests that fail for one reason."""

    reason: str
    tests: Sequence[str]
    """As pytest names them. A test with cases stands for all of them, unless the cases are listed themselves."""


class Peer(NamedTuple):
    """An engine whose tests are run."""

    name: str
    title: str
    plugin: str
    """Pytest's plugin in ``peers``."""
    root: str
    """The folder of the checkout that pytest runs in."""
    conftests: str
    """The outermost folder in it whose conftest.py is read."""
    files: Sequence[str]
    differs: Sequence[Difference]

    def reasons(self, test: str) -> list[str]:
        """Why a test is expected to fail; several reasons if the list is wrong."""
        names = {test, test.partition("[")[0]}
        return [each.reason for each in self.differs if names & {*each.tests}]


class Run(NamedTuple):
    """What a run found."""

    commit: str
    passed: int
    differing: Mapping[str, int]
    """How many tests fail, by the reason."""
    skipped: Mapping[str, int]
    """How many tests do not run, by the reason."""


def load(text: str) -> dict[str, Peer]:
    """The peers of a file like ``expected.toml``, by their names."""
    return {
        name: Peer(name, differs=[Difference(**each) for each in table.pop("differs", ())], **table)
        for name, table in tomllib.loads(text).items()
    }


PEERS = load((HERE / "expected.toml").read_text())


def runs() -> dict[str, Run]:
    """The last recorded runs, by the peer's name."""
    return {name: Run(**found) for name, found in json.loads(LAST.read_text()).items()}


def compare(peer: Peer, found: Mapping[str, Outcome], whole: bool = True) -> list[str]:
    """What is not as listed, a line each. With ``whole``, all tests have been asked for, so that listed ones are among
    them."""
    unlisted, passing, absent = SURPRISES
    lines = [
        f"{unlisted}: {name}: {why[:400]}"
        for name, (kind, why) in found.items()
        if kind == "failed" and not peer.reasons(name)
    ]
    lines += [f"{passing}: {name}" for name, (kind, _) in found.items() if kind == "passed" and peer.reasons(name)]
    if whole:
        failed = [name for name, (kind, _) in found.items() if kind != "skipped"]
        ran = {*failed, *(name.partition("[")[0] for name in failed)}
        lines += [f"{absent}: {test}" for each in peer.differs for test in each.tests if test not in ran]
    return lines


def summarize(peer: Peer, found: Mapping[str, Outcome], commit: str) -> Run:
    """Counts of a run that is as listed."""
    kinds = Counter(kind for kind, _ in found.values())
    differing = Counter(peer.reasons(name)[0] for name, (kind, _) in found.items() if kind == "failed")
    skipped = Counter(why.removeprefix("Skipped: ") for kind, why in found.values() if kind == "skipped")
    return Run(commit, kinds["passed"], dict(sorted(differing.items())), dict(sorted(skipped.items())))
