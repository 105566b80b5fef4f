"""One server for all clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.agents.test_messages import puppet
from tests.clients.turns import KEY, PLAIN, SAID, THOUGHT
from tests.puppet import Puppet, Puppets
from tests.serving import chatty, serving, thinker
from tokenizers import Tokenizer

from infer.contracts.request import Request
from infer.engine.loop import EngineLoop
from infer_server.testing import Serving


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


class Scripted(NamedTuple):
    """A server whose model says ``SAID``, and the prompts that it has read."""

    url: str
    prompts: list[str]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    model, prompts = puppet(tmp_path_factory.mktemp("scripted")), list[str]()
    options = {"api_keys": KEY, "access_log": False, "served_model_name": "demo"}
    submit = EngineLoop.submit_all

    def told(loop: EngineLoop, requests: Sequence[Request], mailbox: Any) -> int:
        for request in requests:
            ids = request.prompt_token_ids
            prompts.append(tokenizer.decode(list(ids), skip_special_tokens=False))
            answer = tokenizer.encode(_answer(prompts[-1]) + "<|endoftext|>", add_special_tokens=False).ids
            Puppet.said[len(ids) - 1 :][: len(answer)] = torch.tensor(answer)
        return submit(loop, requests, mailbox)

    tokenizer = Tokenizer.from_file(str(Path(model["path"]) / "tokenizer.json"))
    Puppet.said.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineLoop, "submit_all", told)
        with serving(plugins=[Puppets()], model=model, engine={"max_seq_len": 2048}, server=options) as made:
            yield Scripted(made.url, prompts)


def _answer(prompt: str) -> str:
    thought = f"{THOUGHT}</think>" if prompt.endswith("<think>") else ""
    results = prompt.count("# tool: ")
    return thought + (SAID[min(results and results - 1, 2)] if "<|tools|>" in prompt else PLAIN)
