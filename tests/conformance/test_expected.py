"""The list of expected differences is well formed, and the runner compares with it. No checkout is needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.conformance.__main__ import run
from tests.conformance.expected import PEERS, SURPRISES, Outcome, Peer, compare, load, runs, summarize

each = pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
LIST = """
[peer]
title = "Peer"
plugin = "vllm_peer"
root = "."
conftests = "tests/entrypoints"
files = ["tests/entrypoints/test_a.py"]

[[peer.differs]]
reason = "It is so."
tests = ["tests/entrypoints/test_a.py::test_cases", "tests/entrypoints/test_a.py::test_one[b]"]
"""
FOUND = {
    "tests/entrypoints/test_a.py::test_cases[a]": Outcome("failed", "1 == 2"),
    "tests/entrypoints/test_a.py::test_cases[b]": Outcome("failed", "1 == 2"),
    "tests/entrypoints/test_a.py::test_one[a]": Outcome("passed"),
    "tests/entrypoints/test_a.py::test_one[b]": Outcome("failed", "2 == 3"),
    "tests/entrypoints/test_a.py::test_other": Outcome("skipped", "Skipped: needs more"),
}


@each
def test_each_listed_test_is_of_a_file_that_runs_and_has_one_reason(peer: Peer) -> None:
    assert all(reason.endswith(".") and tests for reason, tests in peer.differs)
    assert max(Counter(reason for reason, _ in peer.differs).values()) == 1
    listed = [test for _, tests in peer.differs for test in tests]
    assert [test for test in listed if test.partition("::")[0] not in peer.files] == []
    assert [test for test in listed if len(peer.reasons(test)) != 1 or listed.count(test) != 1] == []


@each
def test_the_last_run_was_of_this_list(peer: Peer) -> None:
    found = runs()[peer.name]
    assert {*found.differing} == {reason for reason, _ in peer.differs}, "--record writes last.json anew"
    for reason, tests in peer.differs:
        assert found.differing[reason] >= len(tests)
    assert found.passed


def test_what_is_not_as_listed_is_told() -> None:
    peer = load(LIST)["peer"]
    assert compare(peer, FOUND) == []
    unlisted, passing, absent = SURPRISES
    name = "tests/entrypoints/test_a.py"
    for test, outcome, says in (
        (f"{name}::test_one[a]", Outcome("failed", "no"), f"{unlisted}: {name}::test_one[a]: no"),
        (f"{name}::test_cases[a]", Outcome("passed"), f"{passing}: {name}::test_cases[a]"),
        (f"{name}::test_one[b]", Outcome("skipped", "no"), f"{absent}: {name}::test_one[b]"),
    ):
        assert compare(peer, FOUND | {test: outcome}) == [says]
    alone = {f"{name}::test_one[a]": Outcome("passed")}
    assert compare(peer, alone, whole=False) == []
    assert len(compare(peer, alone)) == 2


def test_what_is_recorded_counts_by_reasons() -> None:
    made = summarize(load(LIST)["peer"], FOUND, "abc")
    assert made == ("abc", 1, {"It is so.": 3}, {"needs more": 1})


@pytest.mark.slow
def test_tests_of_a_checkout_run_against_infer(tmp_path: Path) -> None:
    """Of one like vLLM's, whose own package is called ``tests``, too."""
    folder = tmp_path / "tests/entrypoints"
    folder.mkdir(parents=True)
    for package in (tmp_path / "tests", folder):
        (package / "__init__.py").touch()
    (folder / "test_a.py").write_text("""\
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.somewhere import Thing


@pytest.fixture(scope="module")
def client():
    with RemoteOpenAIServer("some/model", ["--max-model-len", "512"]) as server:
        yield server.get_client()


def test_chat(client):
    said = client.chat.completions.create(model="some/model", messages=[{"role": "user", "content": "3 * 4"}])
    assert said.choices[0].message.content == "I heard: 3 * 4 12"
    assert said.choices[0].finish_reason == "stop"


def test_call(client):
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    said = client.chat.completions.create(
        model="some/model",
        messages=[{"role": "user", "content": "the weather in Rome"}],
        tools=[{"type": "function", "function": tool}],
    )
    assert said.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_that_fails(client):
    assert client.models.list().data[0].id == "other"


def test_of_a_class():
    Thing(1)
""")
    peer = load(LIST)["peer"]
    kinds = {name.partition("::")[2]: kind for name, (kind, _) in run(peer, tmp_path, peer.files, 2).items()}
    assert kinds == {
        "test_chat": "passed",
        "test_call": "passed",
        "test_that_fails": "failed",
        "test_of_a_class": "skipped",
    }
