from __future__ import annotations

import json

import pytest

import infer_phi_tools
from infer.contracts.text import PartProtocol, Piece, Tools
from infer_phi_tools import infer_tool_formats
from infer_server.testing import serving
from infer_testing import check_tool_format, tiny_checkpoint

ARGUMENTS = {"place": 'Rome "IT"', "days": 3, "more": {"a": [1, "]}"]}}


def written(*calls: tuple[str, object]) -> str:
    return f"functools{json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def reader(tools: Tools) -> PartProtocol:
    (registration,) = infer_tool_formats()
    return registration.factory(tools, registration.settings())


def test_it_keeps_the_contract() -> None:
    check_tool_format(reader, written(("look_up", ARGUMENTS)), "look_up", ARGUMENTS)


def test_several_calls_are_read() -> None:
    text = f"I look. {written(('f', {}), ('g', {'x': 1}))} So."
    part = reader({"f": {}, "g": {}})
    found = [*part.push(text), *part.flush()]
    assert [piece.text for piece in found if piece.kind == "call"] == ["f", "g"]
    assert "".join(piece.text for piece in found if piece.kind == "arguments") == '{}{"x": 1}'
    assert [piece for piece in found if piece.kind == "content"] == [
        Piece("content", "I look. "),
        Piece("content", "So."),
    ]


def test_the_server_finds_the_format_in_a_chat_template(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = tiny_checkpoint("LlamaForCausalLM")
    (folder / "template.jinja").write_text(
        "{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
        "{%- for message in messages %}{{ message.content }}"
        "{%- if message.tool_calls %}functools["
        "{%- for call in message.tool_calls %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "{{ ', ' if not loop.last }}{%- endfor %}]{%- endif %}{% endfor %}"
    )
    template = {"chat_template": str(folder / "template.jinja")}
    with serving(str(folder), plugins=[infer_phi_tools], model=template):
        assert "tool calls are read as model.tool_format = functools" in caplog.text
