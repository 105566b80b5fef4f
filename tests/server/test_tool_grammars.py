"""Custom tools whose inputs follow grammars, over HTTP: in chats and in responses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.examples import slowly
from tests.puppet import Puppets, say
from tests.server.test_harmony import ANALYSIS, puppet
from tests.server.test_harmony import TEMPLATE as CHANNELS
from tests.serving import TEMPLATE, Body, Running, chatty, running

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
RULES = 'start: "+++ " WORD ("\\n" LINE){1,3}\nWORD: /[a-z]{2,5}/\nLINE: /[-+] "[^\\n"\\\\]{0,3}/'
EXPECTED = re.compile(r'\+\+\+ [a-z]{2,5}(\n[-+] "[^\n"\\]{0,3}){1,3}')
GOOD = '+++ abc\n+ "x\n- "'
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}


def tools(path: str, definition: str = RULES) -> list[Body]:
    grammar = {"syntax": "lark", "definition": definition}
    if path == CHAT:
        custom = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
        look = {"name": "look", "parameters": PARAMETERS}
        return [{"type": "function", "function": look}, {"type": "custom", "custom": custom}]
    look = {"type": "function", "name": "look", "parameters": PARAMETERS}
    return [look, {"type": "custom", "name": "patch", "format": {"type": "grammar"} | grammar}]


def asked(path: str, most: int = 200, **more: Any) -> Body:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "hi"}], "tools": tools(path), "max_tokens": most} | more
    return {"input": "hi", "tools": tools(path), "max_output_tokens": most, "store": False} | more


def called(answer: Any) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and its calls: names and inputs or arguments."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        parts = [call[call["type"]] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(part["name"], part.get("input", part.get("arguments"))) for part in parts]
    text = "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")
    parts = [item for item in answer["output"] if item["type"].endswith("_call")]
    return text, [(part["name"], part.get("input", part.get("arguments"))) for part in parts]


def written(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    """One that says what it is told, as far as it may."""
    model = puppet(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    async with running([Puppets()], model=model | {"tool_format": "tags"}, engine={"max_seq_len": 2048}) as made:
        yield made


async def ask(server: Running, path: str, body: Body, text: str) -> Any:
    """The answer of a model that would say ``text``."""
    count = asked(CHAT)
    _, counted, _ = await server.post({key: count[key] for key in ("messages", "tools")}, "/tokenize")
    await say(server, counted["count"], text + "<|return|>" * 30)
    status, answer, _ = await server.post(body, path)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("path", [RESPONSES, *slowly(CHAT)])
async def test_a_free_answer_is_held_to_grammars_in_calls_alone(server: Running, path: str) -> None:
    body = asked(path, seed=1)
    assert called(await ask(server, path, body, "Hello { [")) == ("Hello { [", [])
    free = called(await ask(server, path, body, f"Well. {written('look', {'at': 'y'})}"))
    assert free == ("Well. ", [("look", '{"at": "y"}')]), "as it would be without another tool's grammar"
    text, calls = called(await ask(server, path, body, f"So. {written('patch', {'input': GOOD})}"))
    assert (text, calls) == ("So. ", [("patch", GOOD)])
    _, [(name, input)] = called(await ask(server, path, body, written("patch", {"input": "no patch at all"})))
    assert name == "patch"
    assert EXPECTED.fullmatch(input), "which is not what the model would have said"


@pytest.mark.parametrize("path", [CHAT, *slowly(RESPONSES)])
async def test_a_required_list_holds_inputs(tmp_path: Path, path: str) -> None:
    """Drawn alone and in company, each has the same calls."""
    custom = tools(path)[1]
    more: Any = {"custom": custom["custom"] | {"name": "fix"}} if path == CHAT else {"name": "fix"}
    body = asked(path, tool_choice="required", parallel_tool_calls=False) | {"tools": [custom, custom | more]}
    if path == CHAT:
        body |= {"logprobs": True}
    async with running(model=chatty(tmp_path), engine={"max_seq_len": 2048}) as server:
        bodies = [body | {"seed": seed} for seed in range(2)]
        alone = [(await server.post(each, path))[1] for each in bodies]
        together = [answer for _, answer, _ in await asyncio.gather(*(server.post(each, path) for each in bodies))]
    for one, other in zip(alone, together, strict=True):
        assert called(one) == called(other)
        if path == CHAT:
            assert one["choices"][0]["logprobs"] == other["choices"][0]["logprobs"]
        _, [(name, input)] = called(one)
        assert name in ("patch", "fix")
        assert EXPECTED.fullmatch(input), one


@pytest.mark.parametrize("path", [RESPONSES, *slowly(CHAT)])
@pytest.mark.parametrize("choice", ["auto", *slowly("required")])
async def test_a_grammar_that_cannot_be_kept_to_is_refused_by_name(server: Running, path: str, choice: str) -> None:
    param = "tools[1].custom.format.grammar" if path == CHAT else "tools[1].format"
    for definition, why in (("start: x", "'patch' cannot be compiled"), ('start: %json {"type": "null"}', "%json")):
        body = asked(path, tool_choice=choice) | {"tools": tools(path, definition)}
        for _ in range(2):  # also when it is known
            status, answer, _ = await server.post(body, path)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert why in answer["error"]["message"]


@pytest.mark.slow
async def test_another_format_for_the_answer_comes_first(server: Running) -> None:
    answer = await ask(server, CHAT, asked(CHAT, 20, response_format={"type": "json_object"}), '{"a": Hello')
    content, calls = called(answer)
    assert (content[:5], calls) == ('{"a":', [])
    assert "Hello" not in content
    choice = {"structured_outputs": {"choice": ["Hi"]}}
    assert called(await ask(server, CHAT, asked(CHAT, 20, **choice), "Hello")) == ("Hi", [])
    status, answer, _ = await server.post(asked(CHAT, ignore_eos=True), CHAT)
    assert (status, "ignore_eos" in answer["error"]["message"]) == (400, True)


async def test_reasoning_stays_where_a_tool_has_a_grammar(server: Running) -> None:
    thought = f"<think>Shall I {written('patch', {'input': 'x'})}?</think>"
    answer = await ask(server, CHAT, asked(CHAT), f"{thought}\nSo. {written('patch', {'input': GOOD})}")
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == f"Shall I {written('patch', {'input': 'x'})}?"
    assert called(answer) == ("So. ", [("patch", GOOD)])
    stopped = await ask(server, CHAT, asked(CHAT, stop=["abc"]), written("patch", {"input": GOOD}))
    assert called(stopped) == ("", [("patch", "+++ ")])


def channelled(name: str, arguments: object) -> str:
    """A call as gpt-oss writes it."""
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"<|start|>assistant{header}{json.dumps(arguments)}<|call|>"


async def test_calls_in_channels_are_held(tmp_path: Path) -> None:
    """And reasoning is free, which may be the whole answer. Nothing waits for the channel ``final``."""
    model = puppet(tmp_path)
    loose = CHANNELS.replace("tool.function.parameters.properties.items()", "(tool.function.parameters or {}).items()")
    (tmp_path / "template.jinja").write_text(loose)
    thought = f"{ANALYSIS}Shall I call to=functions.patch with x?<|end|>"
    async with running([Puppets()], model=model, engine={"max_seq_len": 2048}) as server:
        for path in (CHAT, RESPONSES):
            body = asked(path, seed=1)
            look = channelled("look", {"at": "y"})
            assert called(await ask(server, path, body, f"{thought}{look}")) == ("", [("look", '{"at": "y"}')])
            answer = await ask(server, path, body, f"{thought}{channelled('patch', {'input': GOOD})}")
            assert called(answer) == ("", [("patch", GOOD)])
            for call in (channelled("patch", {"input": "no patch at all"}), " to=patch<|channel|>x<|message|>no patch"):
                _, [(name, input)] = called(await ask(server, path, body, call))
                assert name == "patch"
                assert EXPECTED.fullmatch(input), "which is not what the model would have said"
        final = f"{thought}<|start|>assistant<|channel|>final<|message|>Hi to=functions.patch <b>"
        message = (await ask(server, CHAT, asked(CHAT), final))["choices"][0]["message"]
        assert message["content"] == "Hi to=functions.patch <b>"
        assert message["reasoning_content"] == "Shall I call to=functions.patch with x?"


async def test_reasoning_that_the_prompt_opens_is_free(tmp_path: Path) -> None:
    """Also if its tags are no tokens, so that nothing but the grammar knows where it ends."""
    model = puppet(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    body = asked(CHAT, chat_template_kwargs={"enable_thinking": True}, seed=1)
    call, bad = written("patch", {"input": GOOD}), written("patch", {"input": "x"})
    async with running([Puppets()], model=model | {"tool_format": "tags"}, engine={"max_seq_len": 2048}) as server:
        for text, content, calls in (
            (f"Shall I {bad}?</think>So. {call}", "So. ", [("patch", GOOD)]),
            (f"Shall I {bad}", "", []),
        ):
            form = {key: body[key] for key in ("messages", "tools", "chat_template_kwargs")}
            _, counted, _ = await server.post(form, "/tokenize")
            await say(server, counted["count"], text + "<|return|>" * 30)
            _, answer, _ = await server.post(body, CHAT)
            assert called(answer) == (content, calls)
            assert answer["choices"][0]["message"]["reasoning_content"].startswith(f"Shall I {bad}")


SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"type": "string"}},
    "required": ["verdict"],
    "additionalProperties": False,
}


def formatted(path: str, most: int = 200, **more: Any) -> Body:
    """What asks for JSON, and offers a function."""
    body = asked(path, most, **more)
    body |= {"tools": body["tools"][:1]}
    form = {"name": "verdict", "schema": SCHEMA}
    if path == CHAT:
        return body | {"response_format": {"type": "json_schema", "json_schema": form}}
    return body | {"text": {"format": {"type": "json_schema"} | form}}


async def tell(server: Running, body: Body, text: str) -> None:
    """Have the model answer ``body``, of one message, with ``text``."""
    form: Body = {"messages": [{"role": "user", "content": "hi"}]}
    if body.get("tool_choice") != "none":
        form["tools"] = asked(CHAT)["tools"][:1]
    if "chat_template_kwargs" in body:
        form["chat_template_kwargs"] = body["chat_template_kwargs"]
    _, counted, _ = await server.post(form, "/tokenize")
    await say(server, counted["count"], text + "<|return|>" * 30)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_reply_has_its_format_or_calls_tools(server: Running, path: str) -> None:
    look, quoted = written("look", {"at": 3}), json.dumps({"verdict": written("look", {"at": 3})})
    two = f"{look}\n{written('look', {'at': 4})}"
    calls = [("look", '{"at": 3}'), ("look", '{"at": 4}')]
    for text, said, more in (
        ('{"verdict": "fine"}', ('{"verdict": "fine"}', []), {}),
        (quoted, (quoted, []), {}),
        (look, ("", calls[:1]), {}),
        (f"\n\n{two}", ("", calls), {}),
        (f"{look} So.", ("", calls[:1]), {"parallel_tool_calls": False}),
        (two, ("", calls[:1]), {"parallel_tool_calls": False}),
        ('{"verdict": "x"}', ('{"verdict": "x"}', []), {"tool_choice": "none"}),
    ):
        body = formatted(path, **more)
        await tell(server, body, text)
        status, answer, _ = await server.post(body, path)
        assert status == 200, answer
        assert called(answer) == said, text
    await tell(server, formatted(path), written("look", {"at": "y"}))
    _, answer, _ = await server.post(formatted(path, seed=1), path)
    _, [(name, arguments)] = called(answer)
    assert name == "look"
    assert re.match(r'\{"at":\s*-?[0-9]', arguments), "which is not what the model would have said"
    await tell(server, formatted(path, tool_choice="none"), look)
    _, answer, _ = await server.post(formatted(path, 40, tool_choice="none"), path)
    text, none = called(answer)
    assert (text[:1], none) == ("{", [])


async def test_a_streamed_reply_has_its_format_or_calls_tools(server: Running) -> None:
    """What is content is told as it comes."""
    for text in ('{"verdict": "<tool_call> is a tag"}', written("look", {"at": 3})):
        await tell(server, formatted(CHAT), text)
        *events, _ = await server.stream(formatted(CHAT), CHAT)
        deltas = [event["choices"][0]["delta"] for event in events]
        content = [delta["content"] for delta in deltas if delta.get("content")]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        reason = events[-1]["choices"][0]["finish_reason"]
        if text.startswith("{"):
            assert ("".join(content), calls, reason) == (text, [], "stop")
            assert len(content) > 3
        else:
            assert (content, [call["name"] for call in calls if "name" in call], reason) == ([], ["look"], "tool_calls")
            assert "".join(call["arguments"] for call in calls) == '{"at": 3}'


async def test_reasoning_comes_before_a_reply_of_either_kind(server: Running) -> None:
    """Whether the prompt opens it or the model does."""
    for opened in (False, True):
        more: Body = {"chat_template_kwargs": {"enable_thinking": True}} if opened else {}
        for text, said in (
            ('{"verdict": "x"}', ('{"verdict": "x"}', [])),
            (written("look", {"at": 3}), ("", [("look", '{"at": 3}')])),
        ):
            await tell(server, more, f"{'' if opened else '<think>'}Shall I {{?</think>\n\n{text}")
            _, answer, _ = await server.post(formatted(CHAT, **more), CHAT)
            assert called(answer) == said
            assert answer["choices"][0]["message"]["reasoning_content"] == "Shall I {?"


async def test_a_format_and_calls_that_no_grammar_tells_apart_are_refused(tmp_path: Path) -> None:
    model = chatty(tmp_path, tool_format="kimi3")
    async with running(model=model) as server:
        for path in (CHAT, RESPONSES):
            status, answer, _ = await server.post(formatted(path, 20), path)
            assert (status, answer["error"]["param"]) == (400, "tools")
            assert (
                "of model.tool_format = kimi3, from the answer; set tool_choice to none" in answer["error"]["message"]
            )
            status, _, _ = await server.post(formatted(path, 20, tool_choice="none"), path)
            assert status == 200
