"""The official Anthropic client for Node. That for Python drives tests/agents."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.conftest import Scripted
from tests.clients.turns import FUNCTION, KEY, PLAIN, SAID, THOUGHT, prompt


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_anthropic_for_node(scripted: Scripted) -> None:
    checks, modules = Path(__file__).with_name("anthropic_checks.mjs"), Path(sys.prefix) / "node/node_modules"
    script = {"said": SAID[-1], "plain": PLAIN, "thought": THOUGHT, "key": KEY, "tool": FUNCTION}
    command = ["node", str(checks), scripted.url, str(modules), json.dumps(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 6
    again = [read for read in scripted.prompts if "# user: more" in read]
    assert len(again) == 4
    assert all(read.endswith(prompt()) for read in again)
