"""Schemathesis over /openapi.json: what is documented is what happens, whatever is sent."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.clients.conftest import KEY
from tests.serving import Serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_is_documented_is_what_happens(mode: str, server: Serving) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS]
    command += ["--header", f"Authorization: Bearer {KEY}", "--mode", mode, "--max-examples", "40", "--seed", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "--no-color", "--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
