"""The ways in which families write calls: each is found by what a template of its shape writes, and what the template
writes is read back, whole and character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from tests.server.test_calling import FORMATS

from infer.contracts.registration import NoSettings
from infer.contracts.text import ReasoningTags, Tools
from infer.text.templates import PROBE_ARGUMENTS, PROBE_TOOL, ChatTemplate
from infer.text.tool_formats import recognize
from infer_agents.message_bodies import MessagesRequest
from infer_agents.message_bodies import conversation as agents_conversation
from infer_ollama.bodies import ChatBody
from infer_server.calling import make_parser
from infer_server.http.parsing import parse
from infer_server.input_items import CallItem, CallOutputItem, InputMessage, conversation
from infer_server.messages import Message, turns
from infer_tool_formats import infer_reasoning_formats, infer_tool_formats

REASONING: dict[str, ReasoningTags] = {each.name: each.factory(NoSettings()) for each in infer_reasoning_formats()}
TYPES: dict[str, Any] = {
    "city": {"type": "string"},
    "empty": {"type": "string"},
    "days": {"type": "array"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "sure": {"type": "boolean"},
    "none": {"type": ["object", "null"]},
    "where": {"type": "object", "properties": {"deep": {"type": "object"}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "w", "parameters": {"properties": TYPES}}},
    {"type": "function", "function": {"name": "clock.now", "description": "c", "parameters": {}}},
]
KNOWN: Tools = {"weather": {"properties": TYPES}, "clock.now": {}}
WEATHER = {
    "city": "Rome\n\"IT\", ä€😀 \\ {<b>} 'x' & </i>\n",
    "empty": "",
    "days": [1, {"a": None, "b": [True, "c d"]}, []],
    "n": -3,
    "x": 0.5,
    "sure": True,
    "none": None,
    "where": {"deep": {"list": ["x", 1500.0], "more": {}}},
}
ONE = [("weather", WEATHER)]
TWO = [*ONE, ("clock.now", {})]


def template(calls: str, *, said: str = "{{ message.content or '' }}", macros: str = "") -> str:
    """A template that shows tools and writes an assistant's text and then its calls."""
    return (
        macros + "{{ bos_token }}{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
        "{%- for message in messages %}<|{{ message.role }}|>"
        "{%- if message.role != 'assistant' %}{{ message.content }}"
        "{%- if message.tool_call_id %} is the result of {{ message.tool_call_id }}{% endif %}"
        "{%- else %}{% if message.content %}" + said + "{% endif %}{% if message.tool_calls %}" + calls + "{% endif %}"
        "{%- endif %}<|over|>{% endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def tags(call: str, argument: str, end: str, begin: str = "", last: str = "") -> str:
    """Calls whose arguments are written one by one."""
    each = "{% for key, value in call.function.arguments.items() %}" + argument + "{% endfor %}"
    return f"{begin}{{% for call in message.tool_calls %}}{call}{each}{end}{{% endfor %}}{last}"


def objects(begin: str, each: str, last: str) -> str:
    """Calls whose arguments are written as JSON."""
    return f"{begin}{{% for call in message.tool_calls %}}{each}{{% endfor %}}{last}"


NAME, JSON = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
TEXT = "{{ value if value is string else value | tojson }}"
COMMA = "{{ ', ' if not loop.last }}"
GEMMA = (
    '{%- macro written(value) -%}{%- if value is string -%}<|"|>{{ value }}<|"|>'
    "{%- elif value is boolean -%}{{ 'true' if value else 'false' }}"
    "{%- elif value is mapping -%}{{ '{' }}"
    "{%- for key, part in value | dictsort -%}{{ key }}:{{ written(part) }}{{ ',' if not loop.last }}{%- endfor -%}"
    "{{ '}' }}"
    "{%- elif value is sequence -%}["
    "{%- for part in value -%}{{ written(part) }}{{ ',' if not loop.last }}{%- endfor -%}]"
    "{%- else -%}{{ value }}{%- endif -%}{%- endmacro -%}"
)
KIND = (
    "{{ 'boolean' if value is boolean else 'null' if value is none else 'number' if value is number"
    " else 'string' if value is string else 'object' if value is mapping else 'array' }}"
)
MISTRAL = (
    "{%- macro checked(id) -%}{%- if not id is defined or id | length != 9 -%}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif -%}{{ id }}{%- endmacro -%}"
    "{%- for message in messages if message.role == 'tool' %}{% set _ = checked(message.tool_call_id) %}{% endfor -%}"
)
SPACE = "{{ ']<]minimax[>[' }}"
MINIMAX3 = (
    "{%- macro written(value) -%}"
    "{%- if value is mapping and value -%}{%- for key, part in value.items() -%}"
    f"{SPACE}<{{{{ key }}}}>{{{{ written(part) }}}}{SPACE}</{{{{ key }}}}>"
    "{%- endfor -%}{%- elif value is string -%}{{ value }}{%- else -%}{{ value | tojson }}{%- endif -%}{%- endmacro -%}"
)


class Family(NamedTuple):
    format: str
    template: str
    reasoning: str = "think"


FAMILIES = {
    "GLM 4.5": Family(
        "glm",
        template(
            tags(
                f"\n<tool_call>{NAME}{{{{ '\\n' }}}}",
                f"<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{TEXT}</arg_value>\n",
                "</tool_call>",
            )
        ),
    ),
    "GLM 4.7": Family(
        "glm",
        template(
            tags(
                f"<tool_call>{NAME}",
                f"<arg_key>{{{{ key }}}}</arg_key><arg_value>{TEXT}</arg_value>",
                "</tool_call>",
            )
        ),
    ),
    "Hunyuan 3": Family(
        "glm",
        template(
            tags(
                f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n",
                "<arg_key:opensource>{{ key }}</arg_key:opensource>\n"
                f"<arg_value:opensource>{TEXT}</arg_value:opensource>\n",
                "</tool_call:opensource>\n",
                "<tool_calls:opensource>\n",
                "</tool_calls:opensource>",
            )
        ),
        "hunyuan",
    ),
    "Kimi K2": Family(
        "kimi",
        template(
            objects(
                "<|tool_calls_section_begin|>",
                f"<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            )
        ),
    ),
    "DeepSeek V3.1": Family(
        "deepseek",
        template(
            objects(
                "<｜tool▁calls▁begin｜>",
                f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            )
        ),
    ),
    "DeepSeek V3": Family(
        "deepseek",
        template(
            objects(
                "<｜tool▁calls▁begin｜>",
                f"<｜tool▁call▁begin｜>{{{{ call.type }}}}<｜tool▁sep｜>{NAME}{{{{ '\\n```json\\n' }}}}{JSON}"
                "{{ '\n```' }}<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            )
        ),
    ),
    "DeepSeek V4": Family(
        "dsml",
        template(
            tags(
                f'<｜DSML｜invoke name="{NAME}">\n',
                "<｜DSML｜parameter name=\"{{ key }}\" string=\"{{ 'true' if value is string else 'false' }}\">"
                f"{TEXT}</｜DSML｜parameter>\n",
                "</｜DSML｜invoke>\n",
                "\n\n<｜DSML｜tool_calls>\n",
                "</｜DSML｜tool_calls>",
            )
        ),
    ),
    "MiniMax M2": Family(
        "minimax",
        template(
            tags(
                f'<invoke name="{NAME}">\n',
                f'<parameter name="{{{{ key }}}}">{TEXT}</parameter>\n',
                "</invoke>\n",
                "\n<minimax:tool_call>\n",
                "</minimax:tool_call>",
            )
        ),
    ),
    "MiniMax M3": Family(
        "minimax",
        template(
            tags(
                f'{SPACE}<invoke name="{NAME}">',
                f"{SPACE}<{{{{ key }}}}>{{{{ written(value) }}}}{SPACE}</{{{{ key }}}}>",
                f"{SPACE}</invoke>\n",
                f"{SPACE}<tool_call>\n",
                f"{SPACE}</tool_call>",
            ),
            macros=MINIMAX3,
        ),
        "minimax_m3",
    ),
    "Gemma 4": Family(
        "gemma",
        template(
            "{% for call in message.tool_calls %}<|tool_call>call:" + NAME + "{{ written(call.function.arguments) }}"
            "<tool_call|>{% endfor %}<|tool_response>",
            macros=GEMMA,
        ),
        "gemma",
    ),
    "LFM2": Family(
        "python",
        '{%- set system = "List of tools: [" %}{{ system if tools }}'
        "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ ']' if tools }}"
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "Command": Family(
        "tags",
        template(
            objects(
                "<|START_ACTION|>[\n",
                f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{NAME}", "parameters": {JSON}}}{COMMA}\n',
                "]<|END_ACTION|>",
            ),
            said="<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>",
        ),
        "command",
    ),
    "Command R": Family(
        "action",
        template(
            objects(
                "\nAction:\n```json\n[\n",
                f'    {{"tool_name": "{NAME}", "parameters": {JSON}}}{COMMA}\n',
                "]{{ '```' }}",
            )
        ),
    ),
    "Apertus": Family(
        "tags",
        template(objects("<|tools_prefix|>[", f'{{"{NAME}": {JSON}}}{COMMA}', "]<|tools_suffix|>")),
        "apertus",
    ),
    "Solar": Family(
        "solar",
        template(
            objects(
                "<|tool_calls|>",
                f"<|tool_call:begin|>{{{{ call.id }}}}<|tool_call:name|>{NAME}<|tool_call:args|>{JSON}"
                "<|tool_call:end|>",
                "",
            )
        ),
    ),
    "MiniCPM5": Family(
        "minicpm",
        template(
            tags(
                f'<function name="{NAME}">',
                '<param name="{{ key }}">'
                "{{ '<![CDATA[' + value + ']]>' if value is string and '<' in value else value }}</param>",
                "</function>",
            )
        ),
    ),
    "Mistral": Family(
        "mistral",
        template(
            objects(
                "[TOOL_CALLS][",
                f'{{"name": "{NAME}", "arguments": {JSON}, "id": "{{{{ checked(call.id) }}}}"}}{COMMA}',
                "]",
            ),
            macros=MISTRAL,
        ),
        "mistral",
    ),
    "GigaChat 3": Family(
        "tags",
        template(
            objects(
                "<|message_sep|>\n\nfunction call<|role_sep|>\n",
                f'{{"name": "{NAME}", "arguments": {JSON}}}{COMMA}',
                "",
            )
        ),
    ),
    "GigaChat 3.1": Family(
        "tags",
        template(objects("<|function_call|>", f'{{"name": "{NAME}", "arguments": {JSON}}}{COMMA}', "")),
    ),
    "Kimi K3": Family(
        "kimi3",
        "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        '{%- for message in messages %}<|open|>message role="{{ message.role }}"<|sep|>'
        "{%- if message.role != 'assistant' %}{{ message.content }}{% else %}"
        "<|open|>think<|sep|><|close|>think<|sep|>"
        "<|open|>response<|sep|>{{ message.content or '' }}<|close|>response<|sep|>{% if message.tool_calls %}"
        + tags(
            f'<|open|>call tool="{NAME}" index="{{{{ loop.index }}}}"<|sep|>',
            f'<|open|>argument key="{{{{ key }}}}" type="{KIND}"<|sep|>{TEXT}<|close|>argument<|sep|>',
            "<|close|>call<|sep|>",
            "<|open|>tools<|sep|>",
            "<|close|>tools<|sep|>",
        )
        + "{% endif %}{% endif %}<|close|>message<|sep|><|over|>{% endfor %}"
        '{%- if add_generation_prompt %}<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|><|close|>think<|sep|>{% endif %}",
    ),
    "Nemotron Nano": Family(
        "tags",
        template(objects("<TOOLCALL>[", f'{{"name": "{NAME}", "arguments": {JSON}}}{COMMA}', "]</TOOLCALL>")),
    ),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def written(source: str, calls: Iterable[tuple[str, Any]], content: str = "") -> str:
    """An assistant's message as a template writes it."""
    made: list[dict[str, Any]] = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "well?"}
    said = {"role": "assistant", "content": content or None, "tool_calls": made}
    shape = ChatTemplate(source, {})
    prompt = shape.prompt([user], tools=TOOLS, add_generation_prompt=True)
    whole = shape.prompt([user, said], tools=TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("<|over|>").removesuffix("<|im_end|>\n")


def read(parts: Iterable[str], format: str, tags: ReasoningTags | None = None, **how: Any) -> dict[str, Any]:
    parser = make_parser(KNOWN, FORMATS[format], tags=tags, **how)
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for piece in [*(piece for part in parts for piece in parser.push(part)), *parser.flush()]:
        if piece.kind == "call":
            said["calls"].append([piece.text, ""])
        elif piece.kind == "arguments":
            said["calls"][-1][1] += piece.text
        else:
            said[piece.kind] += piece.text
    return said


@each_family
def test_a_format_is_found_by_what_the_template_writes(name: str) -> None:
    shape = ChatTemplate(FAMILIES[name].template, {})
    assert shape.style.call is not None
    known = {PROBE_TOOL["function"]["name"]: PROBE_TOOL["function"]["parameters"]}
    found = recognize(FORMATS.values(), shape.style.call, known, ("look_up", PROBE_ARGUMENTS))
    assert found is not None
    assert found.name == FAMILIES[name].format


@each_family
@pytest.mark.parametrize("calls", [ONE, TWO, [("clock.now", {})]], ids=["one", "two", "empty"])
@pytest.mark.parametrize("content", ["", "Let me see (a < b):\n"], ids=["alone", "behind text"])
def test_what_a_template_writes_is_read_back(name: str, calls: list[tuple[str, Any]], content: str) -> None:
    format, source, reasoning = FAMILIES[name]
    text = written(source, calls, content)
    tags = REASONING[reasoning]
    for thought, within in (("", False), (f"{tags.opening}\nhm\n{tags.closing}", False), (f"hm{tags.closing}", True)):
        whole = read([thought + text], format, tags, thinking=within)
        assert [(called, json.loads(arguments)) for called, arguments in whole["calls"]] == calls
        assert whole["content"].strip() == content.strip()
        assert whole["reasoning"] == ("hm" if thought else "")
        assert read(list(thought + text), format, tags, thinking=within) == whole
        assert read([thought + text], format, tags, thinking=within, parallel=False)["calls"] == whole["calls"][:1]


@each_family
@pytest.mark.parametrize("calls", [ONE, TWO, [("clock.now", {})]], ids=["one", "two", "empty"])
def test_calls_in_reasoning_that_is_not_closed_are_read_where_a_mark_begins_them(
    name: str, calls: list[tuple[str, Any]]
) -> None:
    format, source, reasoning = FAMILIES[name]
    tags = REASONING[reasoning]
    text = written(source, calls).strip()
    marked = text.startswith(FORMATS[format].marks)
    for parts in ([f"hm\n{text}"], list(f"hm\n{text}")):
        said = read(parts, format, tags, thinking=True)
        assert [(called, json.loads(arguments)) for called, arguments in said["calls"]] == (calls if marked else [])
        assert said["content"] == ""
        assert said["reasoning"] == ("hm" if marked else f"hm\n{text}")
    planned = read([f"hm\n{text} is it"], format, tags, thinking=True)
    assert planned == {"content": "", "reasoning": f"hm\n{text} is it", "calls": []}


@each_family
def test_all_names_that_a_tool_may_have_are_read(name: str) -> None:
    names = ["a:b", "a-b.c", "a:0", "1", "a__b:c-1.2"]
    tools = [{"type": "function", "function": {"name": each, "description": "d"}} for each in names]
    shape = ChatTemplate(FAMILIES[name].template, {})
    functions = [{"name": each, "arguments": {"x": "y"}} for each in names]
    made = [{"id": "call00000", "type": "function", "function": function} for function in functions]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": made}]
    form: dict[str, Any] = {"tools": tools, "add_generation_prompt": False}
    text = shape.prompt(messages, **form).removeprefix(shape.prompt(messages[:1], **form))
    for parts in ([text], list(text)):
        part = make_parser({each: {} for each in names}, FORMATS[FAMILIES[name].format])
        pieces = [*(piece for each in parts for piece in part.push(each)), *part.flush()]
        assert [piece.text for piece in pieces if piece.kind == "call"] == names


@each_family
def test_a_call_that_is_cut_off_keeps_what_has_come(name: str) -> None:
    """Whatever has been taken for a call's text stays in its arguments; before that it is content."""
    format, source, _ = FAMILIES[name]
    text = written(source, ONE)
    whole = read([text], format)["calls"][0][1]
    at = text.index("IT")
    told = 0
    for end in range(1, len(text)):
        said = read([text[:end]], format)
        assert said["calls"] or not said["content"] or said["content"].strip() in text
        if not said["calls"]:
            continue
        ((called, arguments),) = said["calls"]
        assert called == "weather"
        assert whole.startswith(arguments) or end > at
        told = max(told, len(arguments))
        if format not in ("python", "tags", "action") and end > at:
            assert "Rome" in arguments
    assert told >= 1 or format in ("python", "tags", "action")


BROKEN = {
    "glm": "<tool_call>weather and so on</tool_call>",
    "kimi": "<|tool_call_begin|>functions.weather:0 and so on",
    "deepseek": "<｜tool▁call▁begin｜>weather and so on",
    "solar": "<|tool_call:begin|>1<|tool_call:name|>weather and so on",
    "dsml": "<｜DSML｜invoke weather> and so on",
    "minimax": "<invoke weather> and so on",
    "minicpm": "<function weather> and so on",
    "kimi3": '<|open|>call name="weather"<|sep|> and so on',
    "gemma": "<|tool_call>weather{} and so on",
    "tags": '<|START_ACTION|>{"tool_name": "weather", and so on',
    "python": "<|tool_call_start|>[weather(and so on",
}


@pytest.mark.parametrize("format", BROKEN)
def test_what_is_no_call_is_told_as_it_is(format: str) -> None:
    for text in (BROKEN[format], BROKEN[format].replace("weather", "unknown")):
        said = read(list(text), format)
        assert said["calls"] == []
        assert said["content"] == text.removeprefix("<|START_ACTION|>")


def test_what_ends_other_answers_is_not_made_text() -> None:
    """Marks are shown wherever the model writes them, also in a chat without tools."""
    marks = {mark for each in infer_tool_formats() for mark in each.marks}
    assert marks.isdisjoint({"<|message_sep|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|content|>", "<|end|>"})
    text = f'Well.\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {json.dumps(WEATHER)}}}'
    said = read(list(text), "tags")
    assert (said["content"].strip(), said["calls"][0][0], json.loads(said["calls"][0][1])) == (
        "Well.",
        "weather",
        WEATHER,
    )


@pytest.mark.parametrize(
    ("name", "thought"), [("seed", "<seed:think>\nhm\n</seed:think>"), ("mistral", "[THINK]hm[/THINK]")]
)
def test_a_familys_reasoning_is_told_apart(name: str, thought: str) -> None:
    said = read(list(f"{thought}So."), "xml", REASONING[name])
    assert said == {"content": "So.", "reasoning": "hm", "calls": []}


def test_parts_of_an_argument_may_be_tags() -> None:
    """MiniMax M3's lists and objects: the schema of a part decides on its type, JSON where there is none."""
    space = "]<]minimax[>["
    schema = {
        "type": "array",
        "items": {"type": "object", "properties": {"zip": {"type": "string"}, "list": {"type": "array"}}},
    }
    known: Tools = {"weather": {"properties": {"days": schema}}}

    def tag(key: str, inside: str) -> str:
        return f"{space}<{key}>{inside}{space}</{key}>"

    one = tag("item", tag("zip", "00123") + "\n" + tag("list", tag("item", "7") + tag("item", "x y")))
    other = tag("item", tag("more", "[1]"))
    for text, value in (
        (one + other, [{"zip": "00123", "list": [7, "x y"]}, {"more": [1]}]),
        ("[]", []),
        (f"{space}<item>1", f"{space}<item>1"),
        (f"a{one}", f"a{one}"),
        (tag("item", "1") + "b", tag("item", "1") + "b"),
        (f"{space}<a>" * 99 + f"{space}</a>" * 99,) * 2,
    ):
        answer = f'{space}<invoke name="weather">{tag("days", text)}{space}</invoke>'
        for parts in ([answer], list(answer)):
            part = FORMATS["minimax"].reader(known)
            pieces = [*(piece for each in parts for piece in part.push(each)), *part.flush()]
            told = "".join(piece.text for piece in pieces if piece.kind == "arguments")
            assert json.loads(told) == {"days": value}


def test_calls_are_named_by_ids_where_the_template_shows_nothing_else() -> None:
    """Also those that a client made up, and those of their results."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}
        for id, name in (("x", "weather"), ("y", "clock.now"))
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "well?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_call_id": "y"},
        {"role": "assistant", "content": "and", "tool_calls": [calls[0] | {"id": "z"}]},
        {"role": "tool", "content": "rain", "tool_call_id": "z"},
        {"role": "tool", "content": "?", "tool_call_id": "unknown"},
    ]
    text = ChatTemplate(FAMILIES["Kimi K2"].template, {}).prompt(messages, tools=TOOLS)
    ids = ["functions.weather:0", "functions.clock.now:1", "functions.weather:2"]
    assert all(f"<|tool_call_begin|>{id}<" in text for id in ids)
    assert f"noon is the result of {ids[1]}<" in text
    assert f"rain is the result of {ids[2]}<" in text
    assert "? is the result of unknown<" in text
    shown = ChatTemplate(FAMILIES["Solar"].template, {}).prompt(messages, tools=TOOLS)
    assert "<|tool_call:begin|>x<" in shown


def ollamas(calls: list[tuple[str, str]]) -> bytes:
    made = [{"id": id, "function": {"name": name, "arguments": {}}} for id, name in calls]
    results = [{"role": "tool", "tool_call_id": id, "content": name} for id, name in calls]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": made}, *results]
    return ChatBody.model_validate({"model": "m", "messages": messages}).history[0]


def openais(calls: list[tuple[str, str]]) -> bytes:
    made = [{"id": id, "function": {"name": name, "arguments": "{}"}} for id, name in calls]
    results = [{"role": "tool", "tool_call_id": id, "content": name} for id, name in calls]
    said = {"role": "assistant", "content": None, "tool_calls": made}
    return turns(Message.model_validate(each) for each in [{"role": "user", "content": "x"}, said, *results])


def responses(calls: list[tuple[str, str]]) -> bytes:
    items = [CallItem(type="function_call", call_id=id, name=name, arguments="{}") for id, name in calls]
    results = [CallOutputItem(type="function_call_output", call_id=id, output=name) for id, name in calls]
    return turns(conversation([InputMessage(role="user", content="x"), *items, *results]))


def anthropics(calls: list[tuple[str, str]]) -> bytes:
    made = [{"type": "tool_use", "id": id, "name": name, "input": {}} for id, name in calls]
    results = [{"type": "tool_result", "tool_use_id": id, "content": name} for id, name in calls]
    sides = [("user", "x"), ("assistant", made), ("user", results)]
    asked = {"messages": [{"role": role, "content": content} for role, content in sides]}
    shown = agents_conversation(parse(json.dumps(asked).encode(), MessagesRequest).messages)
    return json.dumps([message for message, _ in shown]).encode()


@pytest.mark.parametrize("api", [ollamas, openais, responses, anthropics])
def test_ids_are_short_where_the_template_takes_no_others(api: Callable[[list[tuple[str, str]]], bytes]) -> None:
    """Each result keeps the id of its call. Ids that are short are as they were."""
    ids = ["call_a1B2c3D4e", "toolu_a1B2c3D4e", "a1B2c3D4e", "é"]
    calls = list(zip(ids, ["weather", "clock.now"] * 2, strict=True))
    messages = json.loads(api(calls))
    shape = ChatTemplate(FAMILIES["Mistral"].template, {})
    text = shape.prompt(messages, tools=TOOLS)
    ids = re.findall(r'"id": "(\w+)"', text)
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)
    assert ids[2] == "a1B2c3D4e"
    assert re.findall(r"<\|tool\|>(\S+) is the result of (\w+)<", text) == [
        (name, id) for (_, name), id in zip(calls, ids, strict=True)
    ]
    assert shape.prompt(messages[:2], tools=TOOLS, add_generation_prompt=False) in text
    shown = ChatTemplate(FAMILIES["Solar"].template, {}).prompt(messages, tools=TOOLS)
    assert all(f"<|tool_call:begin|>{id}<" in shown for id, _ in calls)


def test_calls_become_content_where_the_template_drops_them() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": {"city": 'a "b"', "n": None}}}
    shape = ChatTemplate(FAMILIES["LFM2"].template, {})
    message = {"role": "assistant", "content": "So.", "tool_calls": [call]}
    written = '<|tool_call_start|>[weather(city="a \\"b\\"", n=None)]<|tool_call_end|>'
    assert f"assistant\nSo.{written}<|im_end|>" in shape.prompt([message], tools=TOOLS)
    call["function"] = {"name": "weather", "arguments": "no JSON"}
    assert "[weather(no JSON)]" in shape.prompt([message], tools=TOOLS)
