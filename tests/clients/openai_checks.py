# ruff: noqa: PT017, PT018
"""The official OpenAI client against running servers: ``python openai_checks.py URL THINKER``. The second one's model
reasons. Works with openai 2 and 3."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel, ConfigDict

URL, THINKER = sys.argv[1:] if len(sys.argv) > 2 else ("", "")
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
    chunks = list(client.completions.create(**asked, echo=True, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "def f(" + whole.choices[0].text


def embeddings(client: Any) -> None:
    """Unless told otherwise, the client asks for base64."""
    asked: Any = {"model": "demo", "input": ["def f(", "import os\n", "x"]}
    found = client.embeddings.create(**asked)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert all(abs(sum(x * x for x in each.embedding) - 1) < 1e-5 for each in found.data)
    plain = client.embeddings.create(**asked, encoding_format="float")
    for one, other in zip(found.data, plain.data, strict=True):
        assert max(abs(x - y) for x, y in zip(one.embedding, other.embedding, strict=True)) < 1e-7
    assert found.usage.total_tokens == found.usage.prompt_tokens == plain.usage.prompt_tokens > 3
    (short,) = client.embeddings.create(model="demo", input=[5, 6, 7], dimensions=8, user="u").data
    assert len(short.embedding) == 8 and abs(sum(x * x for x in short.embedding) - 1) < 1e-5


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
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    run: Any = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}
    only = client.chat.completions.create(
        **asked | {"tools": [run, WEATHER]}, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    assert {each.function.name for each in only.choices[0].message.tool_calls or ()} == {"get_weather"}
    code = '<tool_call>{"name": "run", "arguments": {"input": "print(\\"x\\")"}}</tool_call>'
    custom = client.chat.completions.create(
        **asked | {"tools": [run]}, metadata={"a": "b"}, extra_body={"structured_outputs": {"choice": [code]}}
    )
    (ran,) = custom.choices[0].message.tool_calls or [None]
    assert (ran.type, ran.custom.name, ran.custom.input) == ("custom", "run", 'print("x")')
    history: Any = [*MESSAGES, custom.choices[0].message, {"role": "tool", "tool_call_id": ran.id, "content": "x"}]
    assert client.chat.completions.create(**asked | {"tools": [run], "messages": history, "max_tokens": 3}).choices
    history = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert client.chat.completions.create(**asked | {"messages": history, "max_tokens": 3}).choices[0].message


def reasoning(client: Any) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(**asked, extra_body=body)
    thought = answer.choices[0].message
    assert thought.reasoning_content and not thought.content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens > 0
    same = client.chat.completions.create(**asked, reasoning_effort="high")
    assert same.choices[0].message.reasoning_content == thought.reasoning_content
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
    first = whole.output_text[:1]
    cut = client.responses.create(**asked, extra_body={"top_k": 1, "stop": [first]})
    assert (cut.status, cut.output_text) == ("completed", "")
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a loop"}]},
        {"role": "assistant", "content": whole.output_text},
        {"role": "user", "content": "another"},
    ]
    assert client.responses.create(**asked | {"input": conversation}).output_text


def response_tools(client: Any) -> None:
    look: Any = {
        "type": "function",
        "name": "look",
        "strict": True,
        "parameters": {"type": "object", "required": ["at"]},
    }
    look["parameters"] |= {"properties": {"at": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False}
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3} [0-9]"}
    patch = {"type": "custom", "name": "patch", "format": form}
    space = {"type": "namespace", "name": "mail", "description": "Letters.", "tools": [look]}
    asked: Any = {"model": "demo", "input": "a loop", "tools": [look, patch, space], "max_output_tokens": 60}
    asked |= {"temperature": 0}
    custom = client.responses.create(**asked, tool_choice={"type": "custom", "name": "patch"})
    (call,) = custom.output
    assert (call.type, call.name) == ("custom_tool_call", "patch") and re.fullmatch("[a-z]{3} [0-9]", call.input)
    asked |= {"parallel_tool_calls": False, "tool_choice": "required", "tools": [space]}
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert (call.type, call.namespace, call.name) == ("function_call", "mail", "look")
    assert json.loads(call.arguments)["at"] in ("Rome", "Oslo")
    with client.responses.stream(**asked) as stream:
        written = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert written[-1] == final.output[0].arguments == call.arguments
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    outputs += [{"type": "custom_tool_call_output", "call_id": custom.output[0].call_id, "output": "Done."}]
    history = [USER, *custom.output, *whole.output, *outputs]
    counted = client.responses.input_tokens.count(model="demo", input=history, tools=asked["tools"]).input_tokens
    again = client.responses.create(model="demo", input=history, tools=asked["tools"], max_output_tokens=1)
    assert again.usage.input_tokens == counted > whole.usage.input_tokens


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


class Opinion(BaseModel):
    model_config = ConfigDict(extra="forbid")
    verdict: Literal["good", "bad"]


class GetWeather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


USER: Any = {"role": "user", "content": "a loop"}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda made: made,
    lambda made: made.model_dump(),
    lambda made: made.model_dump(exclude_none=True),
    lambda made: made.to_dict(),
    lambda made: json.loads(made.model_dump_json()),
)
"""How people put into a history what they were answered."""


def prompt_of(client: Any, messages: list[Any]) -> str:
    """What the chat template makes of a conversation that goes on, as the model reads it."""
    asked: Any = {"model": "demo", "messages": messages, "max_tokens": 1}
    answer = client.chat.completions.create(**asked, extra_body={"prompt_logprobs": 0})
    entries = answer.choices[0].prompt_logprobs[1:]
    return "".join(next(iter(entry.values()))["decoded_token"] for entry in entries)


def chat_there_and_back(client: Any) -> None:
    """Whatever comes can be sent again, and the model reads all of it."""
    asked: Any = {"model": "demo", "messages": [USER], "max_tokens": 60, "temperature": 0}
    many: Any = asked | {"extra_body": THINK}
    tools: Any = asked | {"tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required"}
    tools |= {"parallel_tool_calls": False}
    messages = {
        "create": client.chat.completions.create(**many).choices[0].message,
        "logprobs": client.chat.completions.create(**many, logprobs=True).choices[0].message,
        "parse": client.chat.completions.parse(**many, response_format=Opinion).choices[0].message,
        "calls": client.chat.completions.create(**tools).choices[0].message,
        "parsed calls": client.chat.completions.parse(**tools).choices[0].message,
    }
    assert isinstance(messages["parse"].parsed, Opinion)
    assert isinstance(messages["parsed calls"].tool_calls[0].function.parsed_arguments, GetWeather)
    for name, more in {"stream": many, "parse": many | {"response_format": Opinion}, "calls": tools}.items():
        with client.chat.completions.stream(**more) as stream:
            stream.until_done()
            # The final completion is only there where no length has cut it.
            whole = stream.current_completion_snapshot if name == "stream" else stream.get_final_completion()
            messages[f"streamed {name}"] = whole.choices[0].message
    joined: Any = {}
    for chunk in client.chat.completions.create(**many, stream=True):
        for key, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
            joined[key] = value if key == "role" else joined.get(key, "") + value
    assert joined["reasoning_content"] and joined["content"]
    assert "<think>" + joined["reasoning_content"] in prompt_of(client, [USER, joined, USER])
    for name, message in messages.items():
        expected = [message.content or ""]
        if "calls" not in name:
            expected.append(f"<think>{message.reasoning_content}</think>")
        history: list[Any] = []
        for call in message.tool_calls or ():
            expected.append(f'"name": "{call.function.name}"')
            expected += list(json.loads(call.function.arguments).values())
            history.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
        assert len([text for text in expected if text]) == 2, (name, expected)
        for form in FORMS:
            prompt = prompt_of(client, [USER, form(message), *history, USER])
            for text in expected:
                assert text in prompt, (name, text, prompt)


def responses_there_and_back(client: Any) -> None:
    """The same of responses: reasoning, text, what was parsed of it, log-probabilities."""
    asked: Any = {"model": "demo", "input": "a loop", "max_output_tokens": 60, "temperature": 0, "extra_body": THINK}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    short: Any = asked | {"max_output_tokens": 3}
    found = [
        client.responses.create(**asked),
        client.responses.create(**short),
        client.responses.create(**asked | {"extra_body": {}}),
        client.responses.parse(**asked, text_format=Opinion),
        list(client.responses.create(**asked, stream=True))[-1].response,
        list(client.responses.create(**short, stream=True))[-1].response,
    ]
    with client.responses.stream(**asked, text_format=Opinion) as stream:
        found.append(stream.get_final_response())
    assert [[item.type for item in response.output] for response in found] == [
        ["reasoning", "message"],
        ["reasoning"],
        ["message"],
        ["reasoning", "message"],
        ["reasoning", "message"],
        ["reasoning"],
        ["reasoning", "message"],
    ]
    assert isinstance(found[3].output_parsed, Opinion) and isinstance(found[-1].output_parsed, Opinion)
    assert found[0].usage.output_tokens_details.reasoning_tokens > 3
    assert found[0].output[1].content[0].logprobs[0].top_logprobs[1].token
    for response in found:
        thought = "".join(item.content[0].text for item in response.output if item.type == "reasoning")
        message = {"role": "assistant", "content": response.output_text}
        message |= {"reasoning_content": thought} if thought else {}
        expected = len(
            client.with_options(base_url=THINKER).post(
                "/tokenize", cast_to=object, body={"messages": [USER, message, USER]}
            )["tokens"]
        )
        for form in FORMS:
            history = [USER, *map(form, response.output), USER]
            again = client.responses.create(model="demo", input=history, max_output_tokens=1)
            assert again.usage.input_tokens == expected, (message, history)


def plain(value: Any) -> Any:
    """A value without ids and times, what is null, what the client adds to a stream, and what it drops from one."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    apart = {
        "id",
        "call_id",
        "created",
        "created_at",
        "completed_at",
        "parsed",
        "parsed_arguments",
        "index",
        "stop_reason",
    }
    kept = {key: plain(each) for key, each in value.items() if key not in apart}
    return {key: each for key, each in kept.items() if each not in (None, [])}


def streams_add_up(client: Any) -> None:
    """Field by field, as the client puts them together."""
    tool = openai.pydantic_function_tool(GetWeather)
    call = '<tool_call>{"name": "GetWeather", "arguments": {"city": "Rome"}}</tool_call>'
    asked: Any = {"model": "demo", "messages": [USER], "max_tokens": 60, "temperature": 0}
    forms: list[Any] = [{"extra_body": THINK}, {"extra_body": THINK, "response_format": Opinion}, {"logprobs": True}]
    forms += [
        {"tools": [tool], "extra_body": {"structured_outputs": {"choice": [text]}}} for text in (call, f"So: {call}")
    ]
    for more in forms:
        for _ in range(2):  # the second finds the prompt in the cache, as the stream does
            whole = (
                client.chat.completions.parse(**asked, **more)
                if "response_format" in more
                else (client.chat.completions.create(**asked, **more))
            )
        with client.chat.completions.stream(**asked, **more, stream_options={"include_usage": True}) as stream:
            stream.until_done()
            snapshot = stream.current_completion_snapshot
        assert plain(snapshot.model_dump()) == plain(whole.model_dump()), (snapshot, whole)
    asked = {"model": "demo", "input": "a loop", "max_output_tokens": 60, "temperature": 0}
    look = {"type": "function", "strict": True, **{k: v for k, v in tool["function"].items() if k != "strict"}}
    include: Any = {"include": ["message.output_text.logprobs"], "extra_body": THINK | {"top_logprobs": 1}}
    for more in (
        {"extra_body": THINK},
        include,
        {"tools": [look], "tool_choice": "required", "parallel_tool_calls": False},
    ):
        for _ in range(2):
            whole = client.responses.create(**asked, **more)
        with client.responses.stream(**asked, **more) as stream:
            *_, last = stream  # the final response is only there where no length has cut it
        final: Any = last.response
        assert plain(final.model_dump()) == plain(whole.model_dump()), (final, whole)


def decisions(client: Any) -> None:
    """Of openai 3 only."""
    if not hasattr(client, "decisions"):
        return
    found = client.decisions.create(
        model="demo",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "I was charged twice!"}]}],
        questions=[
            {"type": "predicate", "name": "angry", "instructions": "The writer is angry."},
            {"type": "choice", "instructions": "Who?", "choices": [{"value": "billing"}, {"value": True}]},
            {
                "type": "score",
                "instructions": "How?",
                "levels": [{"label": "calm", "description": "well"}, {"label": "hot"}],
            },
        ],
        prompt_cache_key="mine",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        safety_identifier="me",
    )
    angry, who, how = found.answers
    assert (angry.type, angry.name) == ("predicate", "angry") and 0 < angry.probability < 1
    assert who.choice in ("billing", True) and [type(each.value) for each in who.probabilities] == [str, bool]
    assert [(each.value, each.label) for each in how.probabilities] == [(0, "calm"), (1, "hot")]
    assert abs(how.score - how.probabilities[1].probability) < 1e-9 and 0 <= how.confidence <= 1
    assert found.usage.input_tokens == found.usage.total_tokens > found.usage.input_tokens_details.cached_tokens


def main() -> None:
    client, thinker = (openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) for url in (URL, THINKER))
    checks = (models, completions, embeddings, chat, tools, reasoning, structured, responses, response_tools)
    for check in (*checks, decisions, errors):
        check(client)
        print(f"{check.__name__}: ok", flush=True)
    for check in (chat_there_and_back, responses_there_and_back, streams_add_up):
        check(thinker)
        print(f"{check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()
