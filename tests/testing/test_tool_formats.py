"""``check_tool_format``: ours pass on the calls that they read, and it names the bugs that are planted in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.core.engine.test_schedulers import documented
from tests.examples import seeded, slowly
from tests.testing.planted import Bug, Bugs, caught

from infer.contracts.text import PartProtocol, Piece, Tools
from infer.text.tool_formats.reader import Reader, Script, Steps
from infer_testing import check_tool_format
from infer_tool_formats import infer_tool_formats

NAME, ARGUMENTS = "look_up", {"place": 'Rome "IT"', "days": 3, "more": [1, {"a": None}]}
SCHEMA = {"properties": {"days": {"type": "integer"}, "more": {"type": "array"}}}
JSON = json.dumps(ARGUMENTS)
TEXTS = {key: value if isinstance(value, str) else json.dumps(value) for key, value in ARGUMENTS.items()}
TYPES = {"place": "string", "days": "number", "more": "array"}
OBJECT = json.dumps({"name": NAME, "arguments": ARGUMENTS})
WRITTEN = {
    "tags": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "json": OBJECT,
    "action": f"Action:\n```json\n[{OBJECT}]\n```",
    "mistral": f"[TOOL_CALLS]{NAME}[ARGS]{JSON}",
    "harmony": f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{JSON}<|call|>",
    "python": f"[{NAME}({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())})]",
    "xml": f"<tool_call>\n<function={NAME}>\n"
    + "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in TEXTS.items())
    + "</function>\n</tool_call>",
    "glm": f"<tool_call>{NAME}\n"
    + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in TEXTS.items())
    + "</tool_call>",
    "minimax": f'<minimax:tool_call>\n<invoke name="{NAME}">\n'
    + "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in TEXTS.items())
    + "</invoke>\n</minimax:tool_call>",
    "dsml": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{NAME}">\n'
    + "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if key == "place" else "false"}">{text}</｜DSML｜parameter>\n'
        for key, text in TEXTS.items()
    )
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "minicpm": f'<function name="{NAME}">'
    + "".join(f'<param name="{key}">{text}</param>' for key, text in TEXTS.items())
    + "</function>",
    "kimi3": f'<|open|>tools<|sep|><|open|>call tool="{NAME}" index="1"<|sep|>'
    + "".join(
        f'<|open|>argument key="{key}" type="{TYPES[key]}"<|sep|>{text}<|close|>argument<|sep|>'
        for key, text in TEXTS.items()
    )
    + "<|close|>call<|sep|><|close|>tools<|sep|>",
    "kimi": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{JSON}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "solar": f"<|tool_calls|><|tool_call:begin|>ab12<|tool_call:name|>{NAME}<|tool_call:args|>{JSON}<|tool_call:end|>",
    "gemma": f'<|tool_call>call:{NAME}{{place:<|"|>Rome "IT"<|"|>,days:3,more:[1,{{a:null}}]}}<tool_call|>',
}
"""The call as each format writes it."""
OURS = {registration.name: registration for registration in infer_tool_formats()}
planted: Bugs[Callable[[Tools], PartProtocol]] = Bugs([])


def reader_of(name: str) -> Callable[[Tools], PartProtocol]:
    registration = OURS[name]
    return lambda tools: registration.factory(tools, registration.settings())


@pytest.mark.parametrize("name", [*list(OURS)[:2], *slowly(*list(OURS)[2:])])
@pytest.mark.draws
@seeded()
def test_ours_pass(name: str, seed: int) -> None:
    check_tool_format(reader_of(name), WRITTEN[name], NAME, ARGUMENTS, schema=SCHEMA, seed=seed)


def test_the_documented_one_passes() -> None:
    (registration,) = documented("quills")["infer_tool_formats"]()
    make = lambda tools: registration.factory(tools, registration.settings())  # noqa: E731
    check_tool_format(make, f"«{NAME}|{JSON}»", NAME, ARGUMENTS)
    quoted = {"text": "»", "deep": {"list": ["}»", '"|«']}}
    check_tool_format(make, f"«{NAME}|{json.dumps(quoted, ensure_ascii=False)}»", NAME, quoted)


@planted.each
def test_a_planted_bug_is_named(bug: Bug[Any]) -> None:
    caught(bug, lambda **keys: check_tool_format(bug.make, WRITTEN["tags"], NAME, ARGUMENTS, **keys))


class Changed:
    """The format ``tags``, whose input and pieces subclasses change."""

    def __init__(self, tools: Tools) -> None:
        self.inner = reader_of("tags")(tools)

    def push(self, text: str) -> Iterator[Piece]:
        yield from self.change(self.inner.push(text))

    def flush(self) -> Iterator[Piece]:
        yield from self.change(self.inner.flush())

    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return pieces


@planted("a tag is left in the text", "reads", "'</tool_call>' of the call is content")
class LeavesTags(Changed):
    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            yield piece
            if piece.text.endswith("]}"):
                yield Piece("content", "</tool_call>")


@planted("the name has quotes", "reads", "is read as calls of")
class Quoted(Changed):
    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return (Piece("call", f'"{piece.text}"') if piece.kind == "call" else piece for piece in pieces)


@planted("arguments are told as Python prints them", "reads", "which is not JSON")
class Python(Changed):
    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return (piece._replace(text=piece.text.replace('"', "'")) for piece in pieces)


@planted("a kind that there is not", "reads", "is no Piece of a kind that there is")
class Unkind(Changed):
    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return (piece._replace(kind="tool") for piece in pieces)  # type: ignore[arg-type]


@planted("only the first call is read", "both", r"is read as calls of \['look_up'\], not as two")
class First(Changed):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.calls = 0

    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.calls += piece.kind == "call"
            if self.calls < 2:
                yield piece


@planted("text before a call is lost", "prose", "and the call are read as")
class Drops(Changed):
    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return (piece for piece in pieces if piece.kind != "content")


@planted("a tag is only found in one push", "cuts", "if it comes cut at")
class Whole(Changed):
    def push(self, text: str) -> Iterator[Piece]:
        if "<tool_call>" in text:
            yield from self.inner.push(text)
        else:
            yield from self.inner.push(text.replace("<", "("))


@planted("any function may be called", "others", "where 'look_up' is no tool")
class Anyone(Changed):
    def __init__(self, tools: Tools) -> None:
        super().__init__({**tools, NAME: {}})


@planted("a call that is cut off raises", "cut_off", "raised JSONDecodeError")
class Raises(Changed):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.told = ""

    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.told += piece.text if piece.kind == "arguments" else ""
            yield piece

    def flush(self) -> Iterator[Piece]:
        yield from super().flush()
        json.loads(self.told or "{}")


@planted("arguments are closed where they are cut off", "cut_off", "the arguments of .* are")
class Closes(Raises):
    def flush(self) -> Iterator[Piece]:
        try:
            yield from super().flush()
        except ValueError:
            yield Piece("arguments", "!}")


@planted("all is held until the end", "early", "of 5000 characters without a call, 5000 are held back")
def _holds(tools: Tools) -> PartProtocol:
    def script(reader: Reader) -> Steps[None]:
        while not reader.ended:
            yield None
        yield reader.content(reader.take())

    return Script(script)


@planted("a bracket that begins no call is lost", "lone", "is read as the content")
class Swallows(Changed):
    def change(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            yield piece._replace(text=piece.text.replace("<", "")) if piece.kind == "content" else piece


@planted("what came before is read again with every delta", "proportion", "deltas of text without a call take")
class Again(Changed):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.all = ""

    def push(self, text: str) -> Iterator[Piece]:
        self.all += text
        sum(letter == "<" for letter in self.all)
        yield from super().push(text)
