"""Many of the server's own tests, and those of OpenAI's clients, with an ingress before two of each server.

Other clients' tests would say the same of an ingress: what they send and read are the same routes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
API = (
    "test_chat_is_the_completion_of_what_the_template_makes",
    "test_unknown_fields_are_refused_or_ignored",
    "test_keys_open_every_route_but_health",
    "test_what_is_no_http_gets_json",
    "test_lists_of_prompts_longer_than_the_queue",
    "test_n_answers_of_one_prompt_are_those_of_its_seeds",
    "test_the_document_knows_every_route",
    "test_a_seed_gives_the_same_alone_and_in_company",
    "test_what_is_wrong_may_be_long_but_its_answer_is_not",
    "test_any_bytes_are_the_same_streamed_and_whole",
)
RESPONSES = (
    "test_what_is_streamed_is_what_comes_whole",
    "test_openais_library_reads_it_and_sends_it_back",
    "test_a_failure_ends_a_response_as_failed",
    "test_the_count_is_what_the_response_takes",
)
TESTS = (
    "tests/clients/test_openai.py::test_openai_for_python[3]",
    "tests/clients/test_openai.py::test_openai_for_node",
    *(f"tests/server/test_{name}.py" for name in ("access", "server", "streams")),
    *(f"tests/server/test_api.py::{name}" for name in API),
    *(f"tests/agents/test_{name}.py" for name in ("messages", "responses", "store")),
    *(f"tests/agents/test_response_tools.py::{name}" for name in RESPONSES),
    "tests/decisions/test_decisions.py::test_decisions_as_openai_asks_them",
    "tests/decisions/test_decisions.py::test_a_large_body_asks_for_what_a_small_one_does",
)
"""What an ingress does something of its own with: methods, headers, bodies of each size, keys, streams of each form,
errors, what is kept, and who leaves. What templates, tools and each field of a body mean is nothing to it: it sends
such bodies as others."""


@pytest.mark.slow
def test_an_ingress_passes_the_server_s_tests() -> None:
    command = (sys.executable, "-m", "pytest", "-p", "tests.ray.behind", "-p", "no:cacheprovider", *TESTS)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
