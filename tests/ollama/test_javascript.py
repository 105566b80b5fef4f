"""Ollama's official client for JavaScript. What its checks find is held against the Python client, or against what the
model was told to say."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ollama.test_ollama import CALL, LOOK, MODEL, USER, client, drawing, server, told
from tests.serving import Body, Running, running

__all__ = ["drawing", "server"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")]
CHECKS = Path(__file__).with_name("ollama_checks.mjs")
MODULE = Path(sys.prefix) / "node/node_modules/ollama/dist/index.mjs"


async def found(server: Running, check: str, **options: Any) -> Any:
    command = ["node", str(CHECKS), server.url, str(MODULE), check, json.dumps(options)]
    done = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await done.communicate()
    assert done.returncode == 0, error.decode()
    return json.loads(out)


async def test_what_is_drawn_is_what_the_python_client_gets(drawing: Running) -> None:
    told = await found(drawing, "drawn")
    options = {"temperature": 0.8, "seed": 3, "num_predict": 30, "top_k": 20}
    whole = await client(drawing).chat(MODEL, [USER], options=options)
    assert told["chat"]["message"] == {"role": "assistant", "content": whole.message.content}
    assert told["chat"]["prompt_eval_count"] == whole.prompt_eval_count
    assert (told["chat"]["eval_count"], told["chat"]["done_reason"]) == (30, "length")
    generated = await client(drawing).generate(MODEL, "def f(", raw=True, options=options)
    assert told["generated"] == generated.response
    assert told["city"] in ("Rome", "Oslo")
    embedded = await client(drawing).embed(MODEL, ["one", "two"])
    assert told["embeddings"] == [list(each) for each in embedded.embeddings]


async def test_calls_and_thoughts_go_round(server: Running) -> None:
    await told(server, f"Well.{CALL % 1}{CALL % 2}", tools=[LOOK])
    tools = await found(server, "tools", look=LOOK)
    message = tools["first"]["message"]
    assert message["content"] == "Well."
    calls: list[Body] = [{"name": "look", "arguments": {"at": i}, "index": i - 1} for i in (1, 2)]
    assert [call["function"] for call in message["tool_calls"]] == calls
    results = [{"role": "tool", "tool_name": "look", "content": str(i)} for i in range(2)]
    again = await client(server).chat(MODEL, [USER, message, *results], tools=[LOOK], options={"num_predict": 1})
    assert tools["next"] == again.prompt_eval_count

    await told(server, "hm</think>Hello", chat_template_kwargs={"enable_thinking": True})
    thinking = await found(server, "thinking")
    message = thinking["first"]["message"]
    assert message == {"role": "assistant", "content": "Hello", "thinking": "hm"}
    again = await client(server).chat(MODEL, [USER, message, USER], think=True, options={"num_predict": 1})
    assert thinking["next"] == again.prompt_eval_count


async def test_models_refusals_and_an_abort(drawing: Running) -> None:
    models = await found(drawing, "models")
    assert "demo:latest" in models["models"]
    assert "demo:latest" in models["running"]
    assert "completion" in models["capabilities"]
    assert models["pulled"] == "success"
    assert models["version"].count(".") == 2
    refused = await found(drawing, "refused")
    assert {name: status for name, (status, _) in refused.items()} == {"format": 400, "option": 400, "model": 404}
    assert "format" in refused["format"][1]
    assert "seed" in refused["option"][1]
    assert "other" in refused["model"][1]
    assert (await found(drawing, "aborted")) == {"parts": 3, "error": "AbortError"}
    await drawing.idle()


async def test_the_key_goes_in_a_header() -> None:
    async with running(server={"access_log": False, "api_keys": "sesame"}) as server:
        assert (await found(server, "models", key="sesame"))["pulled"] == "success"
