# ruff: noqa: PT017, PT018
"""The official OpenAI client against a running server: ``python openai_checks.py URL``. Works with openai 2 and 3."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

URL = sys.argv[1] if len(sys.argv) > 1 else ""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
MESSAGES: Any = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "a loop"}]


def models(client: Any) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "demo"


def completions(client: Any) -> None:
    asked: Any = {"model": "demo", "prompt": "def f(", "max_tokens": 12, "seed": 4, "temperature": 0.9}
    whole = client.completions.create(**asked)
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    several = client.completions.create(**asked | {"prompt": ["def f(", [5, 6, 7]], "n": 2})
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == whole.choices[0].text
    assert several.choices[1].text != whole.choices[0].text
    again = client.completions.create(**asked | {"seed": 5})
    assert several.choices[1].text == again.choices[0].text, "the second is drawn with the next seed"
    echoed = client.completions.create(**asked | {"echo": True, "logprobs": 1, "max_tokens": 0})
    logprobs = echoed.choices[0].logprobs
    assert echoed.choices[0].text == "def f(" and logprobs is not None
    assert logprobs.tokens is not None and "".join(logprobs.tokens).removeprefix("<|endoftext|>") == "def f("
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None


def chat(client: Any) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 20, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    texts = [choice.message.content for choice in whole.choices]
    assert whole.choices[0].message.role == "assistant"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 20
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode(errors="replace") == texts[0]
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    streamed = ["", ""]
    usage: Any = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert usage.total_tokens == whole.usage.total_tokens
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "loop"}]}]
    one = client.chat.completions.create(**asked | {"messages": parts, "n": 1})
    assert one.choices[0].message.content


def tools(client: Any) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 100, "seed": 1}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        forced = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        (call,) = forced.choices[0].message.tool_calls or [None]
        assert forced.choices[0].finish_reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    # What this model would never write of itself, it is made to write.
    written = client.chat.completions.create(
        **asked, extra_body={"structured_outputs": {"choice": [f"Let me see. {CALL}"]}}
    )
    message = written.choices[0].message
    (call,) = message.tool_calls or [None]
    assert message.content == "Let me see. " and call.function.name == "get_weather"
    assert written.choices[0].finish_reason == "tool_calls"
    name = arguments_text = content = ""
    for chunk in client.chat.completions.create(
        **asked, stream=True, extra_body={"structured_outputs": {"choice": [f"Let me see. {CALL}"]}}
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            assert part.function is not None
            name += part.function.name or ""
            arguments_text += part.function.arguments or ""
    assert (name, content) == ("get_weather", "Let me see. ")
    assert json.loads(arguments_text) == {"city": "Rome", "days": 3}
    history: Any = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert client.chat.completions.create(**asked | {"messages": history, "max_tokens": 3}).choices[0].message


def reasoning(client: Any) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    thought = client.chat.completions.create(**asked, extra_body=body).choices[0].message
    assert thought.reasoning_content and not thought.content
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, extra_body=body, stream=True)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == thought.reasoning_content


def structured(client: Any) -> None:
    schema = WEATHER["function"]["parameters"]
    format: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 100, "seed": 2}
    answer = client.chat.completions.create(**asked, response_format=format).choices[0]
    assert json.loads(answer.message.content or "")["city"] in ("Rome", "Oslo") and answer.finish_reason == "stop"
    regex = client.completions.create(
        model="demo", prompt="Phone: ", max_tokens=30, extra_body={"guided_regex": r"\+39 \d{3} \d{4}"}
    )
    text = regex.choices[0].text
    assert len(text) == 12 and text.startswith("+39 ")
    choice = client.completions.create(model="demo", prompt="x", extra_body={"guided_choice": ["yes!", "no, never"]})
    assert choice.choices[0].text in ("yes!", "no, never")


def responses(client: Any) -> None:
    asked: Any = {"model": "demo", "input": "a loop", "instructions": "Write Python.", "max_output_tokens": 16}
    asked |= {"temperature": 0, "store": False}
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete" and whole.usage is not None and whole.usage.output_tokens == 16
    events = list(client.responses.create(**asked, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == whole.output_text == events[-1].response.output_text
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a loop"}]},
        {"role": "assistant", "content": whole.output_text},
        {"role": "user", "content": "another"},
    ]
    assert client.responses.create(**asked | {"input": conversation}).output_text


def errors(client: Any) -> None:
    def fails(kind: type[openai.APIStatusError], **asked: Any) -> openai.APIStatusError:
        try:
            client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 1} | asked)
        except kind as error:
            assert error.request_id, "every answer has its id"
            return error
        raise AssertionError(f"no {kind.__name__}: {asked}")

    assert fails(openai.BadRequestError, temperature=-1).param == "temperature"
    assert fails(openai.BadRequestError, messages=[]).param == "messages"
    assert fails(openai.BadRequestError, messages=[{"role": "robot", "content": ""}]).param == "messages"
    assert fails(openai.BadRequestError, extra_body={"frobnicate": 1}).param == "frobnicate"
    assert fails(openai.NotFoundError, model="gpt-4").code == "model_not_found"
    long: Any = [{"role": "user", "content": "x " * 5000}]
    assert fails(openai.BadRequestError, messages=long).code == "context_length_exceeded"
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        assert error.request_id
    else:
        raise AssertionError("a wrong key was let in")


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="sesame", max_retries=0)
    for check in (models, completions, chat, tools, reasoning, structured, responses, errors):
        check(client)
        print(f"{check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()
