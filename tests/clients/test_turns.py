"""Frameworks work through a task on every API that they speak: turns of text and calls of tools, whole and streamed,
and all that they made of them sent back."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import Scripted
from tests.clients.turns import FUNCTION, KEY, PLAIN, SAID, THOUGHT, get_weather, prompt, same

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HI: Any = {"role": "user", "content": "hi"}
MORE: Any = {"role": "user", "content": "more"}


def chat_openai(url: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key=KEY, max_retries=0, **more)


def chat_anthropic(url: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    thinks: Any = {"type": "enabled", "budget_tokens": 1024}
    return ChatAnthropic(model="demo", base_url=url, api_key=KEY, max_retries=0, max_tokens=200, thinking=thinks)


RESPONSES: Any = {"use_responses_api": True, "reasoning": {"effort": "high", "summary": "auto"}}
LANGCHAIN: dict[str, Callable[[str], Any]] = {
    "chat": lambda url: chat_openai(url, reasoning_effort="high", stream_usage=True),
    "responses": lambda url: chat_openai(url, **RESPONSES),
    "responses-v1": lambda url: chat_openai(url, **RESPONSES, output_version="v1"),
    "anthropic": chat_anthropic,
}


@pytest.mark.parametrize("api", LANGCHAIN)
def test_langchain(api: str, scripted: Scripted) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    model, look = LANGCHAIN[api](scripted.url), tool(get_weather)

    def told(message: Any) -> Any:
        # Of reasoning in a stream of responses, LangChain reads the summary alone.
        blocks = same(message.content_blocks, {"index", "content", "status"})
        return blocks, same([message.tool_calls, message.invalid_tool_calls, message.usage_metadata])

    def ask(bound: Any, whole: list[Any], parts: list[Any]) -> Any:
        for _ in range(2):  # the second finds the prompt in the cache, as the stream does
            once = bound.invoke(whole)
        streamed = joined(bound.stream(parts))
        assert told(streamed) == told(once)
        known = streamed.response_metadata
        assert same(known) == same({key: once.response_metadata[key] for key in known})
        whole.append(once)
        parts.append(streamed)
        return once

    assert ask(model, [HumanMessage("hi")], [HumanMessage("hi")]).text == PLAIN
    whole: list[Any] = [HumanMessage("hi")]
    parts: list[Any] = [HumanMessage("hi")]
    bound = model.bind_tools([look])
    while ask(bound, whole, parts).tool_calls:
        for history in (whole, parts):
            history += [look.invoke(call) for call in history[-1].tool_calls]
    for history in (whole, parts):
        bound.invoke([*history, HumanMessage("more")])
        assert scripted.prompts[-1].endswith(prompt("" if api == "chat" else THOUGHT))


def joined(parts: Iterator[Any]) -> Any:
    return functools.reduce(lambda one, other: one + other, parts)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing it asks the internet
    import litellm

    return litellm


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_litellm(api: str, scripted: Scripted, litellm: Any) -> None:
    asked: Any = {"model": f"{api}/demo", "api_key": KEY, "max_tokens": 200, "max_retries": 0}
    asked["allowed_openai_params"] = ["reasoning_effort", "thinking"]
    if api == "openai":
        asked |= {"api_base": f"{scripted.url}/v1", "reasoning_effort": "high"}
    else:
        asked |= {"api_base": scripted.url, "thinking": {"type": "enabled", "budget_tokens": 1024}}

    def told(answer: Any) -> Any:
        # LiteLLM's own: a whole answer's counts of calls begin with the other blocks, and its fields of one provider.
        return same(answer.model_dump(), {"index", "provider_specific_fields", "text_tokens"})

    def ask(whole: list[Any], parts: list[Any], **more: Any) -> Any:
        for _ in range(2):
            once = litellm.completion(**asked, messages=whole, **more)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, messages=parts, **usage, **more)))
        message = streamed.choices[0].message
        if api == "anthropic":
            (block,) = message.thinking_blocks
            assert (
                block["thinking"] == 2 * THOUGHT
            )  # LiteLLM adds the whole to its parts, and a text where there is none
            block["thinking"], message.content = THOUGHT, message.content or None
        assert told(streamed) == told(once)
        whole.append(once.choices[0].message)
        parts.append(message)
        return whole[-1]

    message = ask([HI], [HI])
    assert (message.content, message.reasoning_content) == (PLAIN, THOUGHT)
    whole, parts = [HI], [HI]
    tools: Any = {"tools": [{"type": "function", "function": FUNCTION}]}
    while ask(whole, parts, **tools).tool_calls:
        for history in (whole, parts):
            history += [
                {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
                for call in history[-1].tool_calls
            ]
    for history in (whole, parts):
        litellm.completion(**asked, messages=[*history, MORE], **tools)
        assert scripted.prompts[-1].endswith(prompt())


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of LiteLLM's own usage
def test_litellm_with_responses(scripted: Scripted, litellm: Any) -> None:
    asked: Any = {"model": "openai/demo", "api_key": KEY, "api_base": f"{scripted.url}/v1"}
    asked |= {"reasoning": {"effort": "high"}, "allowed_openai_params": ["reasoning"]}

    def ask(whole: list[Any], parts: list[Any], **more: Any) -> list[Any]:
        for _ in range(2):
            once = litellm.responses(**asked, input=whole, **more)
        streamed = list(litellm.responses(**asked, input=parts, stream=True, **more))[-1].response
        assert same(streamed.model_dump()) == same(once.model_dump())
        assert once.id != streamed.id
        whole += once.output
        parts += streamed.output
        return [item for item in once.output if item.type == "function_call"]

    assert not ask([HI], [HI])
    whole, parts = [HI], [HI]
    tools: Any = {"tools": [{"type": "function"} | FUNCTION]}
    while calls := ask(whole, parts, **tools):
        for history in (whole, parts):
            history += [
                {"type": "function_call_output", "call_id": call.call_id}
                | {"output": get_weather(**json.loads(call.arguments))}
                for call in history[-len(calls) :]
            ]
    for history in (whole, parts):
        litellm.responses(**asked, input=[*history, MORE], **tools)
        assert scripted.prompts[-1].endswith(prompt())


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents(api: str, scripted: Scripted) -> None:
    import agents
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning

    run: Any = {"run_config": agents.RunConfig(tracing_disabled=True)}

    async def ask(agent: Any) -> tuple[Any, Any]:
        for _ in range(2):
            once = await agents.Runner.run(agent, "hi", **run)
        streamed = agents.Runner.run_streamed(agent, "hi", **run)
        async for _ in streamed.stream_events():
            pass
        for each, other in zip(streamed.raw_responses, once.raw_responses, strict=True):
            assert each.usage == other.usage
            outputs = [[same(item.model_dump()) for item in response.output] for response in (each, other)]
            assert outputs[0] == outputs[1]
        assert same(streamed.to_input_list()) == same(once.to_input_list())
        return once, streamed

    async with AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        model: Any = agents.OpenAIResponsesModel("demo", client)
        if api == "chat":
            model = agents.OpenAIChatCompletionsModel(
                "demo", client, should_replay_reasoning_content=lambda context: True
            )
        settings = agents.ModelSettings(reasoning=Reasoning(effort="high"), include_usage=True)
        plain, _ = await ask(agents.Agent(name="a", model=model, model_settings=settings))
        assert plain.final_output == PLAIN
        tools: Any = [agents.function_tool(get_weather)]
        agent = agents.Agent(name="a", model=model, model_settings=settings, tools=tools)
        for done in await ask(agent):
            assert done.final_output == SAID[2]
            await agents.Runner.run(agent, [*done.to_input_list(), MORE], **run)
            assert scripted.prompts[-1].endswith(prompt())


def test_pydantic_ai(scripted: Scripted) -> None:
    """Which needs openai 3."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(sys.prefix) / "openai-3"), str(ROOT)))}
    command = [sys.executable, str(ROOT / "tests/clients/pydantic_ai_checks.py"), scripted.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 3
    assert scripted.prompts[-1].endswith(prompt())
    assert sum(read.endswith(prompt()) for read in scripted.prompts) >= 6


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_llama_index(api: str, scripted: Scripted) -> None:
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

    asked: Any = {"model": "demo", "api_base": f"{scripted.url}/v1", "api_key": KEY, "max_retries": 0}
    asked |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    thinks: Any = {"reasoning_effort": "high"} if api == "chat" else {"reasoning": {"effort": "high"}}
    if api == "chat":
        model: Any = OpenAILike(**asked, additional_kwargs=thinks)
    else:  # which sends reasoning back only if the server stores it
        model = OpenAILikeResponses(**asked, additional_kwargs=thinks, store=True)
    look = FunctionTool.from_defaults(get_weather)
    tools: Any = {"tools": [look], "allow_parallel_tool_calls": True}

    def told(message: Any) -> Any:
        made = same(message.model_dump(), {"index", "num_tokens"})
        # LlamaIndex's own: in a stream, there is always a text, and reasoning has no count.
        return made | {"blocks": [block for block in made["blocks"] if block.get("text") != ""]}

    def calls(message: Any) -> Any:
        return model.get_tool_calls_from_response(ChatResponse(message=message), error_on_no_tool_call=False)

    def ask(whole: list[Any], parts: list[Any], **more: Any) -> Any:
        for _ in range(2):
            once = model.chat_with_tools(chat_history=whole, **more) if more else model.chat(whole)
        chunks = model.stream_chat_with_tools(chat_history=parts, **more) if more else model.stream_chat(parts)
        *_, last = chunks
        assert told(last.message) == told(once.message)
        whole.append(once.message)
        parts.append(last.message)
        return once.message

    hi = ChatMessage(role="user", content="hi")
    assert ask([hi], [hi]).content == PLAIN
    whole, parts = [hi], [hi]
    while calls(ask(whole, parts, **tools)):
        for history in (whole, parts):
            history += [
                ChatMessage(
                    role="tool", content=str(look(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
                )
                for call in calls(history[-1])
            ]
    for history in (whole, parts):
        model.chat_with_tools(chat_history=[*history, ChatMessage(role="user", content="more")], **tools)
        assert scripted.prompts[-1].endswith(prompt("" if api == "chat" else THOUGHT))
