"""LangChain over Ollama's API: what it gets can be sent back, and streams add up to the whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.ollama.test_ollama import CALL, LOOK, USER, drawing, server, told
from tests.serving import Running

__all__ = ["drawing", "server"]  # fixtures

pytestmark = pytest.mark.slow


def chat(server: Running, **options: Any) -> Any:
    from langchain_ollama import ChatOllama

    return ChatOllama(model="demo", base_url=server.url, **options)


async def whole_and_streamed(model: Any, messages: list[Any]) -> Any:
    """The whole answer, which is the sum of what is streamed."""
    whole, parts = await model.ainvoke(messages), [part async for part in model.astream(messages)]
    streamed = parts[0]
    for part in parts[1:]:
        streamed += part
    for field in ("content", "additional_kwargs"):
        assert getattr(streamed, field) == getattr(whole, field), field
    calls = [[(call["name"], call["args"]) for call in each.tool_calls] for each in (whole, streamed)]
    assert calls[0] == calls[1]
    assert streamed.usage_metadata == whole.usage_metadata
    assert streamed.response_metadata["done_reason"] == whole.response_metadata["done_reason"]
    return whole


async def test_calls_and_results_go_round(server: Running) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    tokens = await told(server, f"Well.{CALL % 1}{CALL % 2}", tools=[LOOK])
    model = chat(server).bind_tools([LOOK])
    first = await whole_and_streamed(model, [HumanMessage("hi")])
    assert first.content == "Well."
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("look", {"at": 1}), ("look", {"at": 2})]
    assert first.usage_metadata["input_tokens"] == tokens
    results = [ToolMessage(str(i), tool_call_id=call["id"]) for i, call in enumerate(first.tool_calls)]
    own = [{"id": f"call0000{i}", "type": "function"} for i in range(2)]
    for i, call in enumerate(own):
        call["function"] = {"name": "look", "arguments": f'{{"at": {i + 1}}}'}  # type: ignore[assignment]
    history: list[Any] = [USER, {"role": "assistant", "content": "Well.", "tool_calls": own}]
    history += [{"role": "tool", "tool_call_id": f"call0000{i}", "content": str(i)} for i in range(2)]
    tokens = await told(server, "Done", messages=history, tools=[LOOK])
    last = await whole_and_streamed(model, [HumanMessage("hi"), first, *results])
    assert (last.content, last.usage_metadata["input_tokens"]) == ("Done", tokens)


async def test_reasoning_goes_round(server: Running) -> None:
    from langchain_core.messages import HumanMessage

    await told(server, "hm</think>Hello", chat_template_kwargs={"enable_thinking": True})
    model = chat(server, reasoning=True)
    first = await whole_and_streamed(model, [HumanMessage("hi")])
    assert (first.content, first.additional_kwargs["reasoning_content"]) == ("Hello", "hm")
    assert (await model.ainvoke([HumanMessage("hi"), first, HumanMessage("hi")])).content is not None


async def test_a_schema_and_embeddings(drawing: Running) -> None:
    from langchain_ollama import OllamaEmbeddings
    from pydantic import BaseModel

    class City(BaseModel):
        capital: bool

    model = chat(drawing, seed=3, num_predict=100).with_structured_output(City, method="json_schema")
    assert isinstance(await model.ainvoke("hi"), City)
    embeddings = OllamaEmbeddings(model="demo", base_url=drawing.url)
    found = await asyncio.to_thread(embeddings.embed_documents, ["one", "two"])
    _, expected, _ = await drawing.post({"input": ["one", "two"]}, "/v1/embeddings")
    assert found == [each["embedding"] for each in expected["data"]]
