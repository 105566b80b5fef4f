"""The official OpenAI clients: Python 2 and 3, and Node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples import slowly

from infer_server.testing import Serving

HERE = Path(__file__).parent
BESIDE = Path(sys.prefix)
"""Where `make install` puts what cannot be in one environment with the rest."""


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, *slowly(3)])
def test_openai_for_python(version: int, server: Serving, reasoner: Serving) -> None:
    beside = str(BESIDE / "openai-3") if version == 3 else ""
    asked = "import openai; print(openai.__version__)"
    assert run(sys.executable, "-c", asked, PYTHONPATH=beside).startswith(f"{version}.")
    told = run(sys.executable, str(HERE / "openai_checks.py"), server.url, reasoner.url, PYTHONPATH=beside)
    assert told.count(": ok") == 14


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_openai_for_node(server: Serving, reasoner: Serving) -> None:
    module = BESIDE / "node" / "node_modules" / "openai" / "index.mjs"
    told = run("node", str(HERE / "openai_checks.mjs"), server.url, str(module), reasoner.url)
    assert told.count(": ok") == 11
