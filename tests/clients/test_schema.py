"""Schemathesis against /openapi.json: the server does what the document says, whatever is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.clients.turns import KEY
from tests.examples import examples
from tests.serving import chatty, retokened, serving

from infer_server.testing import Serving

TIMES_OUT = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
"""A request may give itself less time than any answer takes."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Answers without a limit are short, too: the model ends its answer nearly wherever it would end a line."""
    folder = tmp_path_factory.mktemp("server")
    retokened(folder)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    weights = load_file(folder / "model.safetensors")
    rows, tokens = weights["model.embed_tokens.weight"], json.loads((folder / "tokenizer.json").read_text())["model"]
    rows[end] = rows[tokens["vocab"]["\u010a"]] * 1.1
    save_file(weights, folder / "model.safetensors")
    keys, model = {"api_keys": [KEY], "access_log": False}, chatty(folder, path=str(folder))
    with serving(model=model, engine={"max_seq_len": 96}, server=keys) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_is_documented_is_what_happens(mode: str, brief: Serving, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(TIMES_OUT)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)]
    command += ["run", f"{brief.url}/openapi.json", "--checks", CHECKS]
    command += ["--header", f"Authorization: Bearer {KEY}", "--mode", mode, "--seed", "1"]
    command += ["--max-examples", str(examples(6))]
    command += ["--phases", "examples,coverage,fuzzing", "--no-color", "--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
