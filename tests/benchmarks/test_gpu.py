"""The GPU benchmarks' arithmetic, and the contents of the box."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from benchmarks.gpu import box, pack
from benchmarks.gpu.models import covered

ROOT = Path(__file__).parents[2]


def test_how_busy_a_device_was() -> None:
    assert covered([]) is None
    assert covered([(3.0, 3.0)]) is None
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (9.0, 10.0)]) == 0.6


def test_the_box_carries_what_the_bare_machine_lacks() -> None:
    found = pack.missing(
        {"torch", "numpy", "triton", "safetensors", "tokenizers", "aiohttp", "rich", "jinja2", "psutil"}
    )
    names = {pinned.split("==")[0] for pinned in found}
    assert {"pydantic", "pydantic-core", "annotated-types", "llguidance", "typing-inspection", "pluggy"} <= names
    assert not names & {"torch", "numpy", "aiohttp", "multidict", "infer-core"}
    assert f"pydantic=={distribution('pydantic').version}" in found


def test_a_part_that_hangs_or_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    parts = {
        "hangs": (1, ["-c", "import time; print('begun', flush=True); time.sleep(600)"]),
        "fails": (60, ["-c", "raise SystemExit(3)"]),
        "works": (60, ["-c", "import json, sys; json.dump([1], open(sys.argv[1], 'w'))", "{json}"]),
        "is late": (60, ["-c", ""]),
    }
    monkeypatch.setattr(box, "HERE", tmp_path)
    monkeypatch.setattr(box, "PARTS", parts)
    monkeypatch.setattr(box, "unpack", lambda work: dict(os.environ))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "work" / "triton-cache").mkdir(parents=True)
    (tmp_path / "work" / "triton-cache" / "kernel").write_text("compiled")
    monkeypatch.chdir(tmp_path)  # parts run elsewhere: a relative folder must not move
    monkeypatch.setattr(sys, "argv", ["box.py", "hangs", "fails", "works", "--work", "work"])
    assert box.main() == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["parts"]
    assert {name: part["status"] for name, part in summary.items()} == {"hangs": "out of time", "fails": 3, "works": 0}
    assert summary["hangs"]["last words"] == ["begun"]
    assert (tmp_path / "work" / "logs" / "works.json").read_text() == "[1]"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "logs.tar.gz",
        "triton-cache.tar.xz",
    }
    monkeypatch.setattr(sys, "argv", ["box.py", "is late", "--limit", "0", "--work", str(tmp_path / "work")])
    assert box.main() == 1
    assert "no time left" in (tmp_path / "out" / "summary.json").read_text()


def test_the_bare_machine_has_no_pytest_asyncio() -> None:
    """Its settings in pyproject.toml then abort nothing."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:asyncio",
        "-n",
        "0",
        "tests/kernels_triton/test_matmul.py",
        "-k",
        "no_rows",
    ]
    if importlib.util.find_spec("xdist") is None:
        command = [word for word in command if word not in ("-n", "0")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
