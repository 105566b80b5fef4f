"""LangChain, LiteLLM and Instructor, used as in their documentation."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from tests.clients.turns import KEY

from infer_server.testing import Serving

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


class Weather(BaseModel):
    """What the weather is like."""

    model_config = ConfigDict(extra="forbid")  # or this model goes on inventing fields

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=-40, le=50)


@pytest.mark.slow
def test_langchain(server: Serving) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a place."""
        return f"Sunny in {city}."

    def model(**more: Any) -> Any:
        return ChatOpenAI(
            model="demo", base_url=f"{server.url}/v1", api_key=KEY, max_tokens=100, seed=3, max_retries=0, **more
        )

    whole = model().invoke("a loop")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model().stream("a loop")) == whole.content
    made = model().bind_tools([get_weather], tool_choice="required", strict=True).invoke("the weather")
    assert made.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    constrained = model(extra_body={"structured_outputs": {"choice": [CALL]}})
    (call,) = constrained.bind_tools([get_weather]).invoke("the weather").tool_calls
    assert get_weather.invoke(call["args"]) == "Sunny in Rome."
    found = model().with_structured_output(Weather, method="json_schema").invoke("the weather")
    assert isinstance(found, Weather)


@pytest.mark.slow
def test_langchain_with_ollamas_api(server: Serving) -> None:
    from langchain_ollama import ChatOllama

    kwargs = {"headers": {"Authorization": f"Bearer {KEY}"}}
    model = ChatOllama(
        model="demo", base_url=server.url, client_kwargs=kwargs, num_predict=20, seed=3, validate_model_on_init=True
    )
    whole = model.invoke("a loop")
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 20
    assert "".join(str(chunk.content) for chunk in model.stream("a loop")) == whole.content


@pytest.mark.slow
def test_litellm(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing it asks the internet
    import litellm
    from litellm.exceptions import BadRequestError

    asked: dict[str, Any] = {
        "model": "openai/demo",
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": "a loop"}],
        "max_tokens": 60,
        "seed": 3,
    }
    whole = litellm.completion(**asked)
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    schema = Weather.model_json_schema()
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    called = litellm.completion(**asked, tools=tools, tool_choice="required").choices[0].message.tool_calls
    Weather.model_validate_json(called[0].function.arguments)
    Weather.model_validate_json(litellm.completion(**asked, response_format=Weather).choices[0].message.content)
    with pytest.raises(BadRequestError):
        litellm.completion(**asked | {"temperature": -1.0})


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(mode: str, server: Serving) -> None:
    import instructor
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY), mode=getattr(instructor.Mode, mode)
    )
    found = client.chat.completions.create(
        model="demo",
        response_model=Weather,
        messages=[{"role": "user", "content": "the weather"}],
        max_tokens=100,
        max_retries=0,
        seed=1,
    )
    assert isinstance(found, Weather)
    assert json.loads(found.model_dump_json())
