"""Calls as tags: one around the function, in it one around each argument. Families differ in the tags (``Dialect``). An
argument's text is a string or JSON, as its tag or the function's schema says."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import from_json

from infer.contracts.text import CallForm, CallSyntax, Piece, Tools
from infer.text.tool_formats.reader import (
    BLANK,
    LOOK_AHEAD,
    Marks,
    Reader,
    Steps,
    ahead,
    arguments,
    begin_call,
    comes,
    dumped,
    prose,
    spaces,
)
from infer.text.tool_formats.reader import (
    SPACE as WHITE,
)
from infer_tool_formats.schemas import Schema

MOST_NESTED = 64
MOST_CODE = 1 << 17
"""Longer texts are not parsed as Python: its parser takes a microsecond for each character."""
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
WORDS = {"True": True, "False": False, "None": None}
"""Python's constants, as templates write them that print Python values."""
STRING = Schema(None, {"type": "string"})
NO_STRING = Schema(None, {"type": [*TYPES]})


class Dialect(NamedTuple):
    """The tags of one way to write calls. The match of a pattern must not depend on how much text follows it."""

    call: str
    """How a call begins."""
    header: re.Pattern[str]
    """All of a call up to its first argument, with the function's ``name``."""
    argument: str
    """How an argument begins."""
    key: re.Pattern[str]
    """All of an argument up to its text, with its ``key``. ``string``, if there is such a group, is "true" or "string"
    for a string and anything else for JSON; without it, the schema decides."""
    end_argument: str
    """Where an argument's text ends; ``{key}`` stands for its key."""
    end_call: str
    around: Mapping[str, str]
    """Tags around calls, which are dropped: opening and closing."""
    dropped: tuple[str, ...] = ()
    """Other tags that are dropped."""
    within: tuple[str, str] = ("", "")
    """What may stand around an argument's text without being part of it."""
    nested: re.Pattern[str] | None = None
    """Tags in the text of an argument whose value has parts: their ``key``, and ``end`` if it is a closing one."""


def _around(*names: str) -> dict[str, str]:
    return {f"<{name}>": f"</{name}>" for name in names}


def _glm(suffix: str = "") -> Dialect:
    """``<tool_call>name``, and in it pairs of ``<arg_key>`` and ``<arg_value>``. Hunyuan ends each tag in a suffix."""
    return Dialect(
        f"<tool_call{suffix}>",
        re.compile(
            rf"<tool_call{suffix}>\s*(?P<name>[^\s<]{{1,256}})\s*(?:<tool_sep{suffix}>\s*)?"
            rf"(?=<arg_key{suffix}>|</tool_call{suffix}>)"
        ),
        f"<arg_key{suffix}>",
        re.compile(rf"<arg_key{suffix}>\s*(?P<key>[^\s<]{{1,256}})\s*</arg_key{suffix}>\s*<arg_value{suffix}>"),
        f"</arg_value{suffix}>",
        f"</tool_call{suffix}>",
        _around(f"tool_calls{suffix}"),
    )


def _invoke(call: str, argument: str, around: Mapping[str, str], more: str = "") -> Dialect:
    """``<invoke name="...">``, and in it ``<parameter name="...">``, or other tags with a name."""
    return Dialect(
        f'<{call} name="',
        re.compile(rf'<{call} name="(?P<name>[^"]{{0,256}})">'),
        f'<{argument} name="',
        re.compile(rf'<{argument} name="(?P<key>[^"]{{0,256}})"{more}>'),
        f"</{argument}>",
        f"</{call}>",
        around,
    )


QWEN = Dialect(
    "<function=",
    re.compile(r"<function=(?P<name>[^>]{0,256})>"),
    "<parameter=",
    re.compile(r"<parameter=(?P<key>[^>]{0,256})>"),
    "</parameter>",
    "</function>",
    _around("tool_call", "seed:tool_call"),
    within=("\n", "\n"),
)
FORM = CallForm(
    header="<function=NAME>",
    named="<function=NAME>(?s:.*)",
    before=rf"{WHITE}<parameter=input>\n",
    after=rf"\n<\/parameter>{WHITE}<\/function>",
    closing="</parameter>",
)
"""``QWEN``'s."""


def _glm_form(suffix: str, separator: str) -> CallForm:
    call, key, text = (f"<{tag}{suffix}>" for tag in ("tool_call", "arg_key", "arg_value"))
    end_call, end_key, end_text = (f"</{mark[1:]}" for mark in (call, key, text))
    return CallForm(
        header=f"{call}{WHITE}NAME{WHITE}{separator}{key}{WHITE}input{WHITE}{end_key}{WHITE}{text}",
        named=rf"{call}[{BLANK}]*NAME([<{BLANK}](?s:.*))?",
        before="",
        after=f"{end_text}{WHITE}{end_call}",
        closing=end_text,
        marks=(call, key, text, end_call, end_key, end_text, f"<tool_sep{suffix}>"),
    )


GLM_FORMS = (_glm_form("", ""), _glm_form(":opensource", f"<tool_sep:opensource>{WHITE}"))
"""GLM's and Hunyuan's."""
SPACE = "]<]minimax[>["
"""What MiniMax M3's tags begin with: a token that text does not contain."""
MINIMAX_FORMS = (
    CallForm(
        header='<invoke name="NAME">',
        named='<invoke name="NAME">(?s:.*)',
        before=f'{WHITE}<parameter name="input">',
        after=rf"<\/parameter>{WHITE}<\/invoke>",
        closing="</parameter>",
        marks=(SPACE,),
    ),
    CallForm(
        header=f'{SPACE}<invoke name="NAME">',
        named='<invoke name="NAME">(?s:.*)',
        before=f"{WHITE}{SPACE}<input>",
        after=rf"{SPACE}<\/input>{WHITE}{SPACE}<\/invoke>",
        closing=f"{SPACE}</input>",
        marks=(SPACE,),
    ),
)
"""M2's and M3's."""
DSML = "｜DSML｜"
MINIMAX3 = Dialect(
    f'{SPACE}<invoke name="',
    re.compile(rf'{re.escape(SPACE)}<invoke name="(?P<name>[^"]{{0,256}})">'),
    f"{SPACE}<",
    re.compile(rf"{re.escape(SPACE)}<(?P<key>[^<>/]{{1,256}})>"),
    f"{SPACE}</{{key}}>",
    f"{SPACE}</invoke>",
    {f"{SPACE}<tool_call>": f"{SPACE}</tool_call>"},
    nested=re.compile(rf"\s*{re.escape(SPACE)}<(?P<end>/)?(?P<key>[^<>/]{{1,256}})>"),
)
KIMI3 = Dialect(
    "<|open|>call ",
    re.compile(r'<\|open\|>call tool="(?P<name>[^"]{0,256})"[^<]{0,64}<\|sep\|>'),
    "<|open|>argument ",
    re.compile(r'<\|open\|>argument key="(?P<key>[^"]{0,256})" type="(?P<string>\w{1,16})"<\|sep\|>'),
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    {"<|open|>tools<|sep|>": "<|close|>tools<|sep|>"},
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
DIALECTS: dict[str, tuple[Dialect, ...]] = {
    "xml": (QWEN,),
    "glm": (_glm(), _glm(":opensource")),
    "minimax": (_invoke("invoke", "parameter", _around("minimax:tool_call")), MINIMAX3),
    "dsml": (
        _invoke(
            f"{DSML}invoke",
            f"{DSML}parameter",
            _around(f"{DSML}tool_calls", f"{DSML}function_calls"),
            r' string="(?P<string>\w{1,8})"',
        ),
    ),
    "minicpm": (_invoke("function", "param", {})._replace(within=("<![CDATA[", "]]>")),),
    "kimi3": (KIMI3,),
}
"""By the names of the formats."""
FORMS = {"xml": (FORM,), "glm": GLM_FORMS, "minimax": MINIMAX_FORMS}
"""Those of formats in which the model may be held to grammars."""
TOKENS: dict[str, tuple[str, ...]] = {
    "xml": (*QWEN.around, *QWEN.around.values()),
    "glm": tuple(
        f"<{slash}{tag}{suffix}>"
        for suffix in ("", ":opensource")
        for tag in ("tool_call", "tool_calls", "tool_sep", "arg_key", "arg_value")
        for slash in ("", "/")
    ),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>", SPACE),
    "dsml": (DSML,),
    "minicpm": ("<function", "</function>", "<param", "</param>"),
    "kimi3": ("<|open|>", "<|close|>", "<|sep|>"),
}
"""Those that tags consist of."""


def _syntax(name: str, dialect: Dialect, header: str, argument: str) -> Iterator[CallSyntax]:
    """A dialect's, with and without tags around calls. What begins a call and an argument are regular expressions."""
    end = dialect.end_argument.format(key="KEY")
    for opening, closing in [("", ""), *dialect.around.items()]:
        yield CallSyntax(
            header=header,
            end=f"{WHITE}{dialect.end_call}",
            arguments=((f"{WHITE}{argument}", end),),
            opening=opening and f"{opening}{WHITE}",
            closing=closing and f"{WHITE}{closing}",
            marks=(*TOKENS[name], end.partition("KEY")[0], dialect.end_call, *filter(None, (opening, closing))),
        )


_GLM, _HUNYUAN = DIALECTS["glm"]
SYNTAX = {
    "xml": (*_syntax("xml", QWEN, "<function=NAME>", "<parameter=KEY>"),),
    "glm": (
        *_syntax("glm", _GLM, f"<tool_call>NAME{WHITE}", f"<arg_key>KEY</arg_key>{WHITE}<arg_value>"),
        *_syntax(
            "glm",
            _HUNYUAN,
            f"<tool_call:opensource>NAME{WHITE}<tool_sep:opensource>{WHITE}",
            f"<arg_key:opensource>KEY</arg_key:opensource>{WHITE}<arg_value:opensource>",
        ),
    ),
    "minimax": (
        *_syntax("minimax", DIALECTS["minimax"][0], '<invoke name="NAME">', '<parameter name="KEY">'),
        *_syntax("minimax", MINIMAX3, f'{SPACE}<invoke name="NAME">', f"{SPACE}<KEY>"),
    ),
    "dsml": (
        *_syntax(
            "dsml",
            DIALECTS["dsml"][0],
            f'<{DSML}invoke name="NAME">',
            f'<{DSML}parameter name="KEY" string="(true|false)">',
        ),
    ),
    "minicpm": (*_syntax("minicpm", DIALECTS["minicpm"][0], '<function name="NAME">', '<param name="KEY">'),),
}


def xml(reader: Reader, tools: Tools, name: str) -> Steps[None]:
    """Calls in one of the dialects of a format. Anything that is no call is content, also between tags around calls."""
    dialects = DIALECTS[name]
    calls = {dialect.call: dialect for dialect in dialects}
    around = {mark: close for dialect in dialects for mark, close in dialect.around.items()}
    close = ""
    while (mark := (yield from prose(reader, _marks(name, close)))) is not None:
        if mark in calls:
            yield from _function(reader, tools, calls[mark])
            if close:
                yield from spaces(reader)
            continue
        reader.take(len(mark))
        if mark == close:
            close = ""
        elif mark in around:
            close = around[mark]
            blank = yield from spaces(reader)
            if not (yield from comes(reader, *calls)):
                yield reader.content(blank)


def _function(reader: Reader, tools: Tools, dialect: Dialect) -> Steps[None]:
    function = yield from begin_call(reader, tools, dialect.call, dialect.header)
    if function is None:
        return
    yield from spaces(reader)
    if (yield from comes(reader, "{")):
        yield from arguments(reader)
        yield from spaces(reader)
        if (yield from comes(reader, dialect.end_call)):
            reader.take(len(dialect.end_call))
        return
    parameters = Schema(tools[function], tools[function])
    before = "{"
    while not (end := (yield from comes(reader, dialect.end_call))):
        found = None
        if (yield from comes(reader, dialect.argument)):
            found = yield from ahead(reader, dialect.key)
        if found is None:
            break
        reader.take(found.end())
        key, string = found["key"], found.groupdict().get("string")
        schema = STRING if string in ("true", "string") else NO_STRING if string else parameters.member(key)
        yield Piece("arguments", f"{before}{dumped(key)}: ")
        if not (yield from _value(reader, dialect, key, schema)):
            return  # the text was cut off, so the JSON of the arguments stays unfinished too
        before = ", "
        yield from spaces(reader)
    if end:
        reader.take(len(end))
    elif reader.ended:
        return
    yield Piece("arguments", "{}" if before == "{" else "}")


def _value(reader: Reader, dialect: Dialect, key: str, schema: Schema) -> Steps[bool]:
    """Yield an argument's value: a string as it comes, anything else once it is whole. Returns whether it is whole. It
    ends at a closing tag only if another tag follows, because code in an argument may contain the closing tag."""
    opening, closing = dialect.within
    if opening and ((yield from comes(reader, opening)) or (reader.ended and _begins(reader, (opening,)))):
        reader.take(len(opening))
    end = dialect.end_argument.format(key=key)
    ends = Marks(closing + end, end)
    follow = (dialect.argument, dialect.end_call, *dialect.around.values())
    string = schema.types == {"string"} or (not schema.types and dialect.nested is None)
    taken: list[str] = []
    if string:
        yield Piece("arguments", '"')
    while True:
        found = reader.find(ends.pattern)
        text = reader.before(found) if found else reader.take(len(reader) - ends.begun(reader.last(ends.longest)))
        whole = False
        if found:
            after = reader.take(len(found[0])) + (yield from spaces(reader))
            following = yield from comes(reader, *follow)
            whole = following is not None or (reader.ended and _begins(reader, follow))
            text += "" if whole else after
        if not string:
            taken.append(text)
        elif text:
            yield Piece("arguments", dumped(text)[1:-1])
        if whole:
            text = "".join(taken)
            value = typed(text, schema) if dialect.nested is None else _joined(text, schema, dialect.nested)
            yield Piece("arguments", '"' if string else dumped(value))
            return True
        if found:
            continue
        if reader.ended:
            reader.take()  # the beginning of a closing tag
            yield Piece("arguments", "".join(taken))
            return False
        yield None


def _begins(reader: Reader, texts: tuple[str, ...]) -> bool:
    """Whether all that is left may be the beginning of one of the texts."""
    held = reader.peek(LOOK_AHEAD)
    return any(text.startswith(held) for text in texts)


def typed(text: str, schema: Schema) -> Any:
    """An argument's value by its JSON schema; the text itself if the schema names it, or allows no other type that
    fits."""
    names = schema.types
    if not names or names == {"string"} or text in schema.texts:
        return text
    try:
        value = _parsed(text)
    except ValueError:
        return text
    if isinstance(value, float) and value.is_integer() and names & {"integer", "number"} == {"integer"}:
        value = int(value)  # to JSON schemas, 3.0 is an integer
    kinds = tuple(kind for name in names for kind in TYPES.get(name, ()))
    fits = isinstance(value, kinds) and not (isinstance(value, bool) and "boolean" not in names)
    return value if fits else text


def _parsed(text: str) -> Any:
    """A value in JSON, or as Python prints it. Raises ValueError."""
    if text.strip() in WORDS:
        return WORDS[text.strip()]
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        if not text.lstrip().startswith(("[", "{")) or len(text) > MOST_CODE:
            raise
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("neither JSON nor a literal") from error
    return value


def _joined(text: str, schema: Schema, tag: re.Pattern[str]) -> Any:
    """The value of a text that may consist of tags, a list if each is an ``item``; the text itself if they do not fit
    together."""
    opened: list[tuple[str, Schema, list[tuple[str, Any]]]] = [("", schema, [])]
    at = 0
    for found in tag.finditer(text):
        key, above, parts = opened[-1]
        before, at = text[at : found.start()], found.end()
        if not found["end"]:
            if before.strip() or len(opened) > MOST_NESTED:
                return text
            opened.append((found["key"], above.member(found["key"]), []))
        elif found["key"] != key or (parts and before.strip()):
            return text
        else:
            opened.pop()
            opened[-1][2].append((key, _whole(parts) if parts else _guessed(before, above)))
    parts = opened[0][2]
    if not at:
        return _guessed(text, schema)
    return text if len(opened) > 1 or text[at:].strip() else _whole(parts)


def _guessed(text: str, schema: Schema) -> Any:
    """As ``typed``; if the schema does not say, the text is JSON if it can be."""
    return typed(text, schema if schema.types else NO_STRING)


def _whole(parts: list[tuple[str, Any]]) -> Any:
    return [value for _, value in parts] if all(key == "item" for key, _ in parts) else dict(parts)


@functools.cache
def _marks(name: str, close: str) -> Marks:
    own = [mark for dialect in DIALECTS[name] for mark in (dialect.call, *dialect.around, *dialect.dropped)]
    return Marks(*own, *([close] if close else []))
