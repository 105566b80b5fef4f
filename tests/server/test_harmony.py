"""gpt-oss's channels, from the chat template to the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.puppet import Puppets, say
from tests.serving import Running, retokened, running

from infer.text.templates import ChatTemplate
from infer_tool_formats.harmony import END, TOKENS

TEMPLATE = """\
<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>
{%- if tools or messages[0].role in ['system', 'developer'] %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}{% endif %}
{%- if tools %}namespace functions {
{% for tool in tools %}// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {
{% for name, each in tool.function.parameters.properties.items() %}{{ name }}: {{ each.type }},
{% endfor %}}) => any;
{% endfor %}}{% endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages if message.role not in ['system', 'developer'] %}
{%- if message.role == 'tool' %}
{{- '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' ~ message.content | tojson ~ '<|end|>' }}
{%- elif message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('one of content and thinking') }}{% endif %}
{%- if message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ (message.content or message.thinking) ~ '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}
{{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
REQUEST: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>'
CHAT = "/v1/chat/completions"


def puppet(folder: Path) -> dict[str, Any]:
    """The section ``model``, with the tokens of gpt-oss, of which two end an answer."""
    ids = retokened(folder, *TOKENS, END, special=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|return|>"], ids["<|call|>"]]}))
    (folder / "template.jinja").write_text(TEMPLATE)
    section = {"path": str(folder), "chat_template": str(folder / "template.jinja"), "family": "puppet"}
    return section | {"dtype": "float32"}


async def told(server: Running, asked: dict[str, Any], text: str) -> None:
    """Have the model answer ``asked`` with ``text``."""
    form = {key: asked[key] for key in ("messages", "tools") if key in asked}
    _, prompt, _ = await server.post(form, "/tokenize")
    await say(server, prompt["count"], text)


SAID: list[tuple[str, list[Any], dict[str, Any]]] = [
    (f"{ANALYSIS}hm<|end|>{FINAL}Hello<|return|>", [], {"content": "Hello", "reasoning_content": "hm"}),
    (f"{ANALYSIS}hm<|end|>{FINAL}Hello<|return|>", [LOOK], {"content": "Hello", "reasoning_content": "hm"}),
    (f"{ANALYSIS}hm<|end|>{CALL}", [LOOK], {"reasoning_content": "hm", "call": ("look", '{"at": 1}')}),
    ("Plain.<|return|>", [], {"content": "Plain."}),
]


async def test_channels_become_the_parts_of_an_answer(tmp_path: Path) -> None:
    """Whole and streamed, without settings, and what ends the answer is no part of it."""
    async with running([Puppets()], model=puppet(tmp_path)) as server:
        for text, tools, said in SAID:
            body = REQUEST | ({"tools": tools} if tools else {})
            await told(server, body, text)
            _, whole, _ = await server.post(body, CHAT)
            *events, _ = await server.stream(body, CHAT)
            (choice,) = whole["choices"]
            call = said.get("call")
            calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
            assert [(each["name"], each["arguments"]) for each in calls] == ([call] if call else [])
            deltas = [event["choices"][0]["delta"] for event in events]
            for key in ("content", "reasoning_content"):
                assert (choice["message"].get(key) or "") == said.get(key, "")
                assert "".join(delta.get(key) or "" for delta in deltas) == said.get(key, "")
            parts = [each["function"]["arguments"] for delta in deltas for each in delta.get("tool_calls", ())]
            assert "".join(parts) == (call[1] if call else "")
            assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"]
            assert choice["finish_reason"] == ("tool_calls" if call else "stop")


async def test_a_format_applies_in_the_final_channel_only(tmp_path: Path) -> None:
    """And /v1/responses counts the tokens before it as reasoning."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    async with running([Puppets()], model=puppet(tmp_path)) as server:
        for constrained in ("", " <|constrain|>json"):
            thought = f"{ANALYSIS}hm, final<|end|>{FINAL.replace('<|message|>', constrained + '<|message|>')}"
            await told(server, REQUEST, f"{thought}something else<|return|>")
            _, answer, _ = await server.post(REQUEST | {"response_format": form}, CHAT)
            _, response, _ = await server.post({"input": "hi", "max_output_tokens": 60}, "/v1/responses")
            _, counted, _ = await server.post({"prompt": thought, "add_special_tokens": False}, "/tokenize")
            message = answer["choices"][0]["message"]
            assert message["reasoning_content"] == "hm, final"
            assert message["content"] in ('"yes"', '"no"')
            assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == counted["count"]


async def test_a_call_may_come_in_place_of_the_format(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    asked = REQUEST | {"tools": [LOOK]}
    async with running([Puppets()], model=puppet(tmp_path)) as server:
        for text, content, calls in (
            (f"{ANALYSIS}hm<|end|>{CALL}", None, ["look"]),
            (f'{ANALYSIS}hm<|end|>{FINAL}"yes"<|return|>', '"yes"', []),
            (f"{ANALYSIS}hm<|end|>{FINAL}Hello<|return|>", '"no"', []),
        ):
            await told(server, asked, text)
            status, answer, _ = await server.post(asked | {"response_format": form}, CHAT)
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            assert message["reasoning_content"] == "hm"
            assert message["content"] == content or (content == '"no"' and message["content"] in ('"yes"', '"no"'))
            assert [call["function"]["name"] for call in message.get("tool_calls", ())] == calls


def test_the_template_gets_the_reasoning_behind_a_call() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    asked = {"role": "user", "content": "hi"}
    made = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    told = ChatTemplate(TEMPLATE, {}).prompt([asked, made, {"role": "tool", "tool_call_id": "a", "content": "seen"}])
    begin = "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>"
    assert f"{ANALYSIS}hm<|end|>{begin}" in told
    assert f"Plan<|end|>{begin}" in ChatTemplate(TEMPLATE, {}).prompt([asked, made | {"content": "Plan"}])
