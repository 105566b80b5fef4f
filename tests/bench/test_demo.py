"""The timeline, made from records that the test writes itself."""

from pathlib import Path

import pytest

from infer.commands.cli import main
from infer.contracts.records import RequestRecord, StepRecord, WorkRecord
from infer_bench.demo import Arrival, SceneObserver, latencies, render


def step(index: int, started: float, finished: float, *work: WorkRecord) -> StepRecord:
    return StepRecord(index, started, finished, work, 1, 0, 0, sum(w.length for w in work), 0, 1, 0, 0)


STEPS = [
    step(0, 0.0, 0.010, WorkRecord("a", "prefill", 0, 32, False)),
    step(1, 0.010, 0.030, WorkRecord("b", "decode", 7, 1, True), WorkRecord("a", "prefill", 32, 8, True)),
    step(2, 0.030, 0.034, WorkRecord("a", "decode", 40, 1, True)),
    step(3, 0.034, 0.040, WorkRecord("a", "decode", 41, 1, True)),
]


def record(name: str) -> RequestRecord:
    return RequestRecord(name, 40, 3, 0, "length", 0.0, None, None, 0.04, 0)


def test_a_line_per_step_and_a_column_per_request() -> None:
    lines = [line.split() for line in render(STEPS, ["a", "b"], 64)]
    assert lines[0] == ["step", "ms", "tokens", "a", "b"]
    assert lines[1] == ["0", "10.0", "32/64", "0:32"]
    assert lines[2] == ["1", "20.0", "9/64", "32:40", "*", "*"]
    assert lines[3] == ["2", "4.0", "1/64", "*"]


def test_latencies_in_milliseconds() -> None:
    found = latencies(STEPS, {"a": record("a"), "b": record("b")})["a"]
    assert [round(x, 6) for x in (found.ttft, found.itl_mean, found.itl_min, found.itl_max, found.jitter)] == [
        30.0,
        5.0,
        4.0,
        6.0,
        1.0,
    ]


def test_later_requests_come_at_their_steps() -> None:
    submitted: list[Arrival] = []
    observer = SceneObserver([Arrival("B", 1, 4, 4), Arrival("C", 3, 4, 4)], submitted.append)
    observer.infer_step_finished(first := step(0, 1.0, 2.0, WorkRecord("A", "prefill", 0, 4, True)))
    assert (observer.steps, [a.id for a in submitted]) == ([first], ["B"])


def test_what_keeps_the_model_from_loading_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.endswith(
        "infer: model.path is not set: give a folder, file, hub id or bundled name, e.g. --model demo.\n"
    )
