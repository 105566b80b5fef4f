"""One server for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.serving import chatty, serving, thinker

from infer.server.testing import Serving

KEY = "sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The demo model with a chat template, behind a key."""
    model = chatty(tmp_path_factory.mktemp("server"))
    keys = {"api_keys": ["other", KEY], "access_log": False}
    with serving(model=model, engine={"max_seq_len": 1024}, server=keys) as made:
        yield made


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One whose model reasons."""
    model = thinker(tmp_path_factory.mktemp("reasoner"))
    options = {"api_keys": KEY, "access_log": False, "served_model_name": "demo"}
    with serving(model=model, engine={"max_seq_len": 1024}, server=options) as made:
        yield made
