from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import infer_perfetto
from infer import LLM, SamplingParams, SettingsError
from infer_perfetto import PerfettoSettings, Trace
from infer_testing import tiny_checkpoint


def served(**observer: Any) -> None:
    """Answers three requests, two at a time."""
    folder = tiny_checkpoint("LlamaForCausalLM")
    observers, engine = {"perfetto": observer}, {"max_batch_size": 2, "prefill_chunk_size": 16}
    with LLM(str(folder), plugins=[infer_perfetto], observers=observers, engine=engine) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        llm.generate([[5] * 40, [6] * 3, [7] * 3], params)


def test_the_trace_has_every_step_and_every_request(tmp_path: Path) -> None:
    served(path=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    steps = [event for event in events if event["ph"] == "X"]
    assert [step["args"]["step"] for step in steps] == list(range(len(steps)))
    assert sum(step["args"]["computed_tokens"] for step in steps) == 46 + 3 * 4, "prompts, and all but the last tokens"
    assert all(step["dur"] >= 0 for step in steps)
    begun = [event for event in events if event["ph"] == "b"]
    ended = [event for event in events if event["ph"] == "e"]
    assert [(e["id"], e["name"]) for e in begun] == [(e["id"], e["name"]) for e in ended]
    assert all(b["ts"] <= e["ts"] for b, e in zip(begun, ended, strict=True))
    assert len({event["id"] for event in begun}) == 3
    for id in {event["id"] for event in begun}:
        parts = {event["name"] for event in begun if event["id"] == id} - {id}
        assert parts >= {"prefill", "decode"}


def test_a_trace_that_is_cut_off_can_be_read_up_to_there(tmp_path: Path) -> None:
    trace = Trace(PerfettoSettings(path=tmp_path / "trace.json"))
    trace._left = 1
    trace._write(ph="C", name="last")
    trace._write(ph="C", name="one too many")
    trace.close()
    assert [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())][2:] == ["last"]


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    served()
    assert not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"observers\.perfetto\.path = .*trace\.json.*No such file"):
        Trace(PerfettoSettings(path=tmp_path / "no" / "trace.json"))
