"""docs/tutorial.md works: its files are written, its changes made and its commands run, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_examples import ROOT, build, environment

TUTORIAL = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def changed(text: str, change: str) -> str:
    """The text with a change made: lines with a minus go, those with a plus come."""
    lines = change.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in "- ")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in "+ ")
    assert text.count(old) == 1, old
    return text.replace(old, new)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command, and what the page shows of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path) -> None:
    wheels = build(tmp_path / "dist", [ROOT / "core", ROOT / "plugins/cache_slotted"])
    bin = environment(tmp_path / "made", wheels)
    (bin / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {bin.parent} "$@"\n')
    (bin / "pytest").write_text(f'#!/bin/sh\nexec {bin}/python -m pytest -p no:cacheprovider -p no:xdist "$@"\n')
    for name in ("pip", "pytest"):
        (bin / name).chmod(0o755)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("INFER_", "PYTHON", "PYTEST"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
    variables = plain | offline | {"PATH": f"{bin}:{os.environ['PATH']}"}
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "dist").symlink_to(wheels)
    ran = 0
    for language, block in BLOCK.findall(TUTORIAL.read_text()):
        first, _, rest = block.partition("\n")
        if language == "console":
            for command, shown in commands(block):
                done = subprocess.run(
                    command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=900
                )
                said, ran = done.stdout + done.stderr, ran + 1
                fails = any(re.fullmatch(r"[1-9]\d* failed", line) for line in shown)
                assert (done.returncode != 0) == fails, f"{command}\n{said}"
                assert not [line for line in shown if line not in said], f"{command}\n{said}"
        elif language == "diff":
            file = folder / first.removeprefix("--- ")
            file.write_text(changed(file.read_text(), rest))
        else:
            file = folder / first.removeprefix("# ")
            assert file.suffix == {"python": ".py", "toml": ".toml"}[language]
            file.write_text(rest)
    assert ran > 10
