"""What watchers and timelines are told: in order, complete or with a word about what is missing, and within bounds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from tests.console.records import ended, step

from infer_console.messages import Kept, Maps, Messages


def kinds(told: Any) -> list[Any]:
    return [(each["kind"], each.get("id", each.get("index"))) for each in told]


def test_an_end_is_told_after_the_step_in_which_it_was() -> None:
    messages = Messages()
    assert kinds(messages.of(step(0, "a", "b"))) == [("step", 0)]
    assert kinds(messages.of(ended("a"))) == []
    assert kinds(messages.of(ended("b"))) == []
    told = [*messages.of(step(1, "a", "b", "c"))]
    assert kinds(told) == [("step", 1), ("end", "a"), ("end", "b")]
    assert [each["number"] for each in told[1:]] == [0, 1], "by the numbers that the steps have"
    assert [each["nth"] for each in told[1:]] == [0, 1]
    assert kinds(messages.of(ended("c"))) == []
    (last,) = messages.ended()
    assert (last["id"], last["nth"]) == ("c", 2)
    assert messages.numbers == {}
    messages.clear()
    [*messages.of(step(9, "a"))]
    assert messages.numbers == {"a": 3}, "a number is never used again"


def test_missing_records_are_counted_and_who_may_have_ended_in_them_is_forgotten() -> None:
    messages = Messages()
    [*messages.of(step(0, "a", "b"))]
    lost, told = messages.of(step(5, "b", "c"))
    assert (lost["records"], lost["requests"]) == (4, {"b": 1})
    assert (told["decodes"], told["new"]) == ([1, 2], {2: "c"})


def test_what_is_kept_is_bounded_in_number_and_in_size() -> None:
    kept = Kept(3, 100)
    for n in range(5):
        assert json.loads(kept.keep({"n": n})) == {"n": n}
    assert [json.loads(each)["n"] for each in kept.all] == [2, 3, 4]
    assert [json.loads(each)["n"] for each in kept.last(2)] == [3, 4]
    assert (kept.last(0), len(kept.last(99))) == ([], 3)
    kept.keep({"n": "x" * 80})
    assert len(kept.all) == 2
    assert kept.nbytes == sum(map(len, kept.all)) <= 100
    kept.clear()
    assert (kept.nbytes, kept.last(3)) == (0, [])


def fails() -> bytes:
    raise RuntimeError("lost count")


def leaves() -> bytes:
    raise SystemExit(3)


@pytest.mark.parametrize("blocks", [fails, leaves, lambda: b"\x00\x07", lambda: [0, 1], lambda: None])
def test_a_pool_that_makes_no_map_is_asked_once_and_the_log_says_so(
    blocks: Callable[[], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    maps = Maps()
    with caplog.at_level(logging.ERROR):
        for n in range(3):
            assert maps.after(step(n, "a", blocks=blocks)) is None
    assert maps.fault is not None
    assert "the pool cannot make one: " in maps.fault
    (said,) = caplog.records
    assert "not asked for another" in said.message


def test_a_map_has_the_number_of_its_step() -> None:
    made = Maps().after(step(4, "a"))
    assert made is not None
    assert (made["step"], made["cells"], made["counts"]) == (4, "0123", [1, 1, 1, 1])
