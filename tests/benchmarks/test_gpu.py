"""The GPU benchmarks' arithmetic, and the contents of the box."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import box, kernels, pack
from benchmarks.gpu.models import covered
from benchmarks.gpu.timing import Ceilings

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
        "hangs": box.Part(1, ["-c", "import time; print('begun', flush=True); time.sleep(600)"]),
        "fails": box.Part(60, ["-c", "raise SystemExit(3)"]),
        "works": box.Part(60, ["-c", "import json, sys; json.dump([1], open(sys.argv[1], 'w'))", "{json}"]),
        "is late": box.Part(60, ["-c", ""]),
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


@pytest.mark.parametrize(
    ("log", "figures", "words", "status"),
    [
        ("12 passed, 3 skipped in 4.00s", None, box.PYTEST, 0),
        ("1 skipped, 12 passed in 4.00s", None, box.PYTEST, 0),
        ("12 skipped in 4.00s", None, box.PYTEST, "ran no test"),
        ("", "[1]", box.GPU, 0),
        ("", "[]", box.GPU, "measured nothing"),
        ("", None, box.GPU, "measured nothing"),
    ],
)
def test_a_part_that_does_nothing_fails(
    log: str, figures: str | None, words: list[str], status: int | str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(log)
    if figures is not None:
        (tmp_path / "figures").write_text(figures)
    assert box.verdict(box.Part(1, words), 0, tmp_path / "log", tmp_path / "figures") == status


COLLECT = """
import sys
sys.modules.update(dict.fromkeys({absent}))
import pytest
for name, words in {parts}.items():
    print(name, int(pytest.main([*words, "--collect-only", "-p", "no:asyncio"])))
"""


@pytest.mark.slow
def test_every_part_collects_tests_without_the_packages_that_the_box_lacks() -> None:
    carried = {Path(path).name for path in pack.PACKAGES}
    absent = [f"infer_{path.name}" for path in (ROOT / "plugins").iterdir() if path.name not in carried]
    assert "infer_kernels_cpu" in absent
    parts: dict[str, list[str]] = {}
    for name, part in box.PARTS.items():
        if "pytest" in part.words:
            words = part.words[2:]
            at = words.index("-n") if "-n" in words else len(words)
            parts[name] = words[:at] + words[at + 2 :]
    command = [sys.executable, "-c", COLLECT.format(absent=absent, parts=parts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"GPU_DRY_RUN": "1"})
    for name in parts:
        assert f"\n{name} 0\n" in f"\n{done.stdout}", done.stdout + done.stderr


def test_all_parts_of_a_call_have_their_time() -> None:
    for parts in box.CALLS.values():
        assert sum(part.limit for part in parts.values()) <= box.LIMIT - 20, "to set up, and to pack the results"
    assert next(iter(box.CALLS["correct"])) == "smoke"


def test_figures_of_kernels_are_saved_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"kernel": "first", "us": 1.0}
        raise RuntimeError("the second one")

    monkeypatch.setattr(gpu, "DRY", True)
    monkeypatch.setattr(Ceilings, "measure", lambda: Ceilings(1.0, 1.0))
    monkeypatch.setattr(kernels, "measure", measure)
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "kernels", "--shape", "Llama-3.2-1B", "--json", str(file)])
    with pytest.raises(RuntimeError, match="the second one"):
        gpu.main()
    assert json.loads(file.read_text())["kernels"]["Llama-3.2-1B"] == [{"kernel": "first", "us": 1.0}]


@pytest.mark.slow
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
