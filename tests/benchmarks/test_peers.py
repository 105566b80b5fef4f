"""The comparison with other engines, run with those that are installed here (infer and transformers) on a tiny
checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.peers import __main__ as peers
from benchmarks.peers import engines, online
from benchmarks.shapes import Costs, write_weights
from tests.support import CONFIGS

CONFIG = {**CONFIGS["qwen3"], "model_type": "qwen3", "vocab_size": 8192}


@pytest.mark.slow
def test_engines_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "CELLS", [(1, 16, 4), (2, 8, 4)])
    monkeypatch.setattr(peers, "CONFIGS", {"tiny": CONFIG})
    monkeypatch.setattr(engines, "ENVIRONMENTS", tmp_path / "nowhere")
    monkeypatch.setattr(peers.Ceilings, "__init__", lambda self: None)
    monkeypatch.setattr(peers.Ceilings, "run", lambda self: {"bandwidth": 1e9, "flops": 1e12, "int8 flops": 2e12})
    checkpoint, out = write_weights(tmp_path / "tiny", CONFIG), tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--repeat", "2"]
    for peer in ("infer", "infer int8", "transformers", "vllm", "ik_llama.cpp Q4_0"):
        arguments += ["--peer", peer]
    assert peers.main([*arguments, "--checkpoint", str(checkpoint), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "vllm: not installed" in printed
    assert "ik_llama.cpp Q4_0: not installed" in printed
    report = json.loads(out.read_text())
    assert set(report["runs"]) == {"infer", "infer int8", "transformers"}
    figures = {"prefill 1x16", "decode 1x16", "prefill 2x8", "decode 2x8"}
    assert all(seconds > 0 for seconds in report["ready_s"].values())
    for runs in report["runs"].values():
        assert [set(run) for run in runs] == [figures] * 2
        assert all(seconds > 0 for seconds in runs[0].values())
    assert {peer: set(bounds) for peer, bounds in report["bounds"].items()} == {"infer": figures, "infer int8": figures}
    assert "<svg" in out.with_suffix(".svg").read_text()
    for peer, quantization in (("infer", "none"), ("infer int8", "int8")):
        nbytes = Costs(CONFIG, quantization).decode_bytes([8, 8])
        assert report["bounds"][peer]["decode 2x8"] == nbytes / 1e9
    assert report["bounds"]["infer"]["prefill 2x8"] == 2 * report["bounds"]["infer int8"]["prefill 2x8"]


@pytest.mark.slow
def test_an_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that would not fit into memory beside it are not started, and nothing is compared with infer."""
    monkeypatch.setattr(peers, "CELLS", [(1, 16, 4)])
    monkeypatch.setattr(peers, "CONFIGS", {"tiny": CONFIG})
    monkeypatch.setattr(peers.Ceilings, "__init__", lambda self: None)
    monkeypatch.setattr(peers.Ceilings, "run", lambda self: {"bandwidth": 1e9, "flops": 1e12, "int8 flops": 2e12})
    checkpoint, out = write_weights(tmp_path / "tiny", CONFIG), tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--repeat", "1", "--checkpoint", str(checkpoint), "--json", str(out)]
    assert peers.main([*arguments, "--peer", "transformers"]) == 0
    assert set(json.loads(out.read_text())["runs"]) == {"transformers"}
    assert "times as long as transformers" in out.with_suffix(".svg").read_text()
    monkeypatch.setattr(engines, "ENVIRONMENTS", tmp_path / "nowhere")
    assert peers.main([*arguments, "--peer", "vllm"]) == 2


@pytest.mark.slow
def test_servers_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(online, "CONFIGS", {"tiny": CONFIG})
    monkeypatch.setattr(engines, "ENVIRONMENTS", tmp_path / "nowhere")
    checkpoint, out = write_weights(tmp_path / "tiny", CONFIG), tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--repeat", "2", "--scale", "0.05", "--max-seq-len", "128"]
    arguments += ["--workload", "baseline", "--workload", "chunked_prefill", "--set", "engine.prefill_chunk_size=16"]
    assert online.main([*arguments, "--checkpoint", str(checkpoint), "--json", str(out)]) == 0
    assert "vllm: not installed" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert set(runs) == {"baseline", "chunked_prefill"}
    for by_peer in runs.values():
        assert [(run["errors"], run["output_tok_s"] > 0) for run in by_peer["infer"]] == [([], True)] * 2


@pytest.mark.slow
def test_a_driver_that_fails_is_told(tmp_path: Path) -> None:
    python = engines.python_of("infer", {})
    assert python is not None
    with pytest.raises(RuntimeError, match=r"infer: .*failed"):
        peers.Peer("infer", python, tmp_path / "missing", [(1, 4, 2)])


def test_table() -> None:
    medians = {
        "infer": {"decode 1x8": 0.010, "prefill 1x8": 0.5},
        "other": {"decode 1x8": 0.015, "prefill 1x8": 0.6},
    }
    lines = peers.table(medians, {"decode 1x8": 0.009})
    assert lines[1].split() == ["decode", "1x8", "10.0", "0.90", "15.0", "1.50x"]
    assert lines[3].split() == ["decode,", "mean", "1.50x"]
