from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import infer_deepseek_tools
from infer.protocols import PartProtocol, Piece, Tools
from infer.server.testing import serving
from infer.testing import check_tool_format, tiny_checkpoint
from infer_deepseek_tools import infer_tool_formats

CALLS, END_CALLS, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"
SEP, END_CALL = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ARGUMENTS = {"place": 'Rome "IT"', "days": 3, "more": {"a": [1, "```"]}}


def v3(name: str, arguments: object) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{json.dumps(arguments, indent=1)}\n```{END_CALL}"


def v31(name: str, arguments: object) -> str:
    return f"{CALL}{name}{SEP}{json.dumps(arguments)}{END_CALL}"


def reader(tools: Tools) -> PartProtocol:
    (registration,) = infer_tool_formats()
    return registration.factory(tools, registration.settings())


@pytest.mark.parametrize("form", [v3, v31])
def test_it_keeps_the_contract(form: Callable[[str, object], str]) -> None:
    text = CALLS + form("look_up", ARGUMENTS) + END_CALLS
    check_tool_format(reader, text, "look_up", ARGUMENTS)


@pytest.mark.parametrize("form", [v3, v31])
def test_several_calls_are_read(form: Callable[[str, object], str]) -> None:
    text = f"I look.{CALLS}{form('f', {})}\n{form('g', {'x': 1})}{END_CALLS}"
    part = reader({"f": {}, "g": {}})
    found = [*part.push(text), *part.flush()]
    assert [piece.text for piece in found if piece.kind == "call"] == ["f", "g"]
    given = "".join(piece.text for piece in found if piece.kind == "arguments")
    assert given.split() == ["{}{", '"x":', "1", "}"] or given == '{}{"x": 1}'
    assert [piece for piece in found if piece.kind == "content"] == [Piece("content", "I look.")]


def test_the_server_finds_the_format_in_a_chat_template(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = tiny_checkpoint("LlamaForCausalLM")
    (folder / "template.jinja").write_text(
        "{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
        "{%- for message in messages %}{{ message.content }}"
        "{%- for call in message.tool_calls or [] %}"
        f"{CALLS}{CALL}function{SEP}{{{{ call.function.name }}}}\n```json\n"
        f"{{{{ call.function.arguments | tojson }}}}\n```{END_CALL}{END_CALLS}"
        "{%- endfor %}{% endfor %}"
    )
    template = {"chat_template": str(folder / "template.jinja")}
    with serving(str(folder), plugins=[infer_deepseek_tools], model=template):
        assert "tool calls are read as model.tool_format = deepseek" in caplog.text
