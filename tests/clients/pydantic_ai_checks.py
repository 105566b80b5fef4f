"""Pydantic AI against a running server whose model is scripted: ``python pydantic_ai_checks.py URL``."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tests.clients.turns import KEY, PLAIN, SAID, get_weather, same


def told(done: Any) -> Any:
    messages = ModelMessagesTypeAdapter.dump_python(done.all_messages(), mode="json")
    for part in (part for message in messages for part in message["parts"]):
        if isinstance(part.get("args"), str):  # as it came in a stream
            part["args"] = json.loads(part["args"])
    return same(messages)


async def drain(_: object, events: Any) -> None:
    """With one, requests are streamed. (``run_stream`` takes the first text for the last.)"""
    async for _ in events:
        pass


async def ask(agent: Any) -> tuple[Any, Any]:
    for _ in range(2):  # the second finds the prompt in the cache, as the stream does
        once = await agent.run("hi")
    streamed = await agent.run("hi", event_stream_handler=drain)
    assert told(streamed) == told(once), (told(streamed), told(once))
    return once, streamed


async def main(url: str) -> None:
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as openai,
        AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as anthropic,
    ):
        own, other = OpenAIProvider(openai_client=openai), AnthropicProvider(anthropic_client=anthropic)
        thinks = {"type": "enabled", "budget_tokens": 1024}
        models: list[tuple[Any, Any]] = [
            (OpenAIChatModel("demo", provider=own), {"openai_reasoning_effort": "high"}),
            (OpenAIResponsesModel("demo", provider=own), {"openai_reasoning_effort": "high"}),
            (AnthropicModel("demo", provider=other), {"anthropic_thinking": thinks, "max_tokens": 2000}),
        ]
        for model, settings in models:
            plain, _ = await ask(Agent(model, model_settings=settings))
            assert plain.output == PLAIN
            agent = Agent(model, model_settings=settings, tools=[get_weather])
            for done in await ask(agent):
                assert done.output == SAID[2]
                await agent.run("more", message_history=done.all_messages())
            print(f"{type(model).__name__}: ok", flush=True)


asyncio.run(main(sys.argv[1]))
