"""The server's own tests, and those of OpenAI's clients, with an ingress before two of each server.

Other clients' tests would say the same of an ingress: what they send and read are the same routes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/clients/test_openai.py",
    *(f"tests/core/server/test_{name}.py" for name in ("access", "api", "embeddings", "rerank", "routes")),
    *(f"tests/core/server/test_{name}.py" for name in ("server", "streams")),
    *(f"tests/agents/test_{name}.py" for name in ("messages", "response_tools", "responses", "store")),
    "tests/decisions/test_decisions.py",
)


@pytest.mark.slow
def test_an_ingress_passes_the_server_s_tests() -> None:
    command = (sys.executable, "-m", "pytest", "-p", "tests.ray.behind", "-p", "no:cacheprovider", *TESTS)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
