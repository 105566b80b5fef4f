"""Grammars in llguidance's dialect of Lark, rewritten for the places where models write what they describe: within a
JSON string, where quotes and line breaks are escaped, or in front of a closing tag."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MOST_KEPT = 64
"""How many characters a class may have whose rewriting is cached."""
ESCAPED = {chr(code) for code in range(0x20)} | {'"', "\\"}
"""The characters that cannot stand in a JSON string as they are."""
PLAIN = r'[^"\\\x00-\x1F]'
"""A class of all others."""
COMMON = {
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The terminals of Lark's ``common`` that may match such characters, and those of several lines."""
WITH_JSON = ("%json", "%regex", "%llguidance")
_TOKEN = re.compile(
    r"""(?P<skip>[ \t]+|\#[^\n]*|//[^\n]*)
    |(?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<special><[^<>\s]+>)
    |(?P<reference>@[\w-]+)
    |(?P<keyword>%[a-z]+)
    |(?P<rule>[!?_]{0,2}[a-z][_a-z0-9-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9-]*)
    |(?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)
    |(?P<line>(?:\r?\n)+[ \t]*)
    |(?P<arrow>->)|(?P<range>\.\.)
    |(?P<mark>::|[-:,.(){}\[\]~|&=_+*?!])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_CLASS_PART = re.compile(r"\\.|\[:\^?[a-z]+:\]|[\[\]]", re.DOTALL)
_REPEATED = re.compile(r"(/(?:\[(?:\\.|[^\]\[\\])+\]|\\[a-zA-Z]|[^\\\[\]().]))\+(/)")
"""A regular expression that repeats one character."""
_GROUP = re.compile(r"\(\?([imsuUxR-]*)([:)])")


class Token(NamedTuple):
    kind: str
    text: str


def tokens(lark: str) -> Iterator[Token]:
    """The tokens of a grammar, white space and comments left out. Raises ValueError."""
    at = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        if found is None:
            line = lark.count("\n", 0, at) + 1
            raise ValueError(f"its line {line} cannot be read")
        at = found.end()
        kind = str(found.lastgroup)
        if kind != "skip":
            yield Token(kind, found[0])
        if found[0] in WITH_JSON:
            while lark[at : at + 1].isspace():
                at += 1
            _, end = json.JSONDecoder().raw_decode(lark, at)
            yield Token("value", lark[at:end])
            at = end


def quoted(lark: str, before: str, after: str) -> str:
    """A grammar of JSON strings, without the quotes around them, that hold what ``lark`` describes, between texts that
    match two regular expressions. Each character is written in one way: escaped only if it must be, and as briefly as
    can be. Raises ValueError if the grammar cannot be rewritten."""
    return _Quoting(lark).between(before, after)


def bounded(lark: str, before: str, after: str, closing: str) -> str:
    """A grammar of the texts that ``lark`` describes and that do not hold ``closing``, between texts that match two
    regular expressions, which may be empty. ``closing`` follows: ``after`` begins with it, or with a line break and it,
    or is empty. Raises ValueError if the grammar cannot be rewritten."""
    return _Bounding(lark, after, closing).between(before, after)


class _Rewriting:
    """Rewrites a grammar token by token.

    llguidance ends a terminal where the next character cannot belong to it, without a look at what follows. An escape
    begins as all others do, so behind a terminal that may hold one, no other can begin. That does not matter if all of
    the grammar is one terminal. It can be if no rule refers to itself; otherwise ``_check`` looks at each terminal.
    """

    FAULTS: Sequence[tuple[str, str]] = ()
    """What no terminal in rules may match: regular expressions, each with what is wrong with one that does."""

    def __init__(self, lark: str) -> None:
        found = list(tokens(lark))
        self._prefix = "held"
        while any(token.text.lower().startswith(self._prefix) for token in found):
            self._prefix += "x"
        self._statements = list(_statements(found))
        self._flat = not _recursive(self._statements)
        """Whether the whole grammar becomes one terminal."""
        self._terminals: dict[str, str] = {}
        """The terminals that stand in rules, with the names that they get, unless the grammar is flat."""
        self._ignored = f"{self._prefix}0ignored".upper()  # rules get names with a hyphen
        self._ignores = any(statement[0].text == "%ignore" for statement in self._statements)

    def between(self, before: str, after: str) -> str:
        """The grammar with what stands around it. Raises ValueError."""
        lines = [self._statement(statement) for statement in self._statements]
        start, whole = self._rule("start"), f"{self._prefix}0whole".upper()
        first, last = (f"/{text}/" if text else "" for text in (before, after))
        ignored = [
            " ".join(self._body(self._once(each[1:]), False)) for each in self._statements if each[0].text == "%ignore"
        ]
        if self._ignores:
            lines.append(f"{self._ignored}: {' | '.join(f'({text})' for text in ignored)}")
        if self._flat:
            lines += [f"{whole}: {first} ({start}{self._without()}) {last}", f"start: {whole}"]
            return "\n".join(lines)
        if self._ignores:
            lines.append(f"%ignore {self._named(self._ignored)}")
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        self._check("\n".join(lines))
        return "\n".join([*lines, f"start: {first} {start} {last}"])

    def _once(self, body: Sequence[Token]) -> Sequence[Token]:
        """What is ignored without the sign that it may repeat, since all that is ignored may."""
        if len(body) == 2 and body[1].text == "+":
            return body[:1]
        if len(body) != 1:
            return body
        (token,) = body
        for statement in self._statements:
            words = [each.text for each in statement]
            if token.kind == "terminal" and words[:2] == [token.text, ":"] and len(words) == 3:
                token = statement[2]
            elif words[0] == "%import":
                known = {alias: COMMON.get(name, "") for name, alias in _imports(words[1:])}
                token = Token("regex", f"/{known[token.text]}/") if token.text in known else token
        return (
            [token._replace(text=repeated[1] + repeated[2])] if (repeated := _REPEATED.fullmatch(token.text)) else body
        )

    def _without(self) -> str:
        """What the one terminal of a flat grammar is intersected with."""
        return ""

    def _check(self, lark: str) -> None:
        """Raise ValueError if a terminal in rules may hide where another one or what follows begins."""
        for text, name in self._terminals.items():
            for regex, fault in self.FAULTS:
                if _starts(f"{lark}\nstart: CHECKED\nCHECKED: {name} & /{regex}/"):
                    which = "what it ignores" if text == self._ignored else text
                    raise ValueError(f"as a rule of it refers to itself, {fault.replace('{}', which)}")

    def _rule(self, name: str) -> str:
        """The name that a rule gets."""
        name = f"{self._prefix}-{name.lstrip('!?')}"
        return name.upper() if self._flat else name

    def _statement(self, statement: Sequence[Token]) -> str:
        first = statement[0]
        if first.text == "%import":
            return self._imported([token.text for token in statement[1:]])
        if first.text == "%ignore":
            return ""
        if first.text == "%llguidance":
            return " ".join(token.text for token in statement)
        if first.kind not in ("rule", "terminal"):
            raise ValueError(f"{first.text} cannot be kept to within a call")
        if len(statement) < 2 or statement[1].text != ":":
            raise ValueError(f"{first.text} has attributes or parameters, which cannot be kept to within a call")
        rule = first.kind == "rule"
        name = self._rule(first.text) if rule else first.text
        return f"{name}: {' '.join(self._body(statement[2:], rule))}"

    def _body(self, tokens: Sequence[Token], rule: bool) -> Iterator[str]:
        """What defines a rule, or else a terminal."""
        at = 0
        while at < len(tokens):
            kind, text = tokens[at]
            at += 1
            if kind == "string" and [token.kind for token in tokens[at : at + 2]] == ["range", "string"]:
                text = self._range(text, tokens[at + 1].text)
                at += 2
            elif kind == "string":
                text = self._string(text)
            elif kind == "regex":
                text = self._regex(text)
            elif kind == "rule":
                text = self._rule(text)
            elif kind == "arrow":  # and an alias
                at += 1
                continue
            elif kind in ("special", "reference", "keyword") or text == "::":
                raise ValueError(f"{text} cannot be kept to within a call")
            elif text == "~" and [token.kind for token in tokens[at : at + 1]] != ["number"]:
                raise ValueError("the operator ~ for what does not match cannot be kept to within a call")
            if rule and kind in ("string", "regex", "terminal"):
                if not self._flat:
                    text = self._named(text)
                elif self._ignores:
                    text = f"({text} {self._ignored}*)"
            yield text

    def _named(self, text: str) -> str:
        return self._terminals.setdefault(text, f"{self._prefix}-{len(self._terminals)}".upper())

    def _imported(self, words: Sequence[str]) -> str:
        return "\n".join(
            f"{alias}: {self._regex(f'/{COMMON[name]}/')}" if name in COMMON else f"%import common.{name} -> {alias}"
            for name, alias in _imports(words)
        )

    def _range(self, first: str, last: str) -> str:
        return f"{first}..{last}"

    def _string(self, text: str) -> str:
        return text

    def _regex(self, text: str) -> str:
        return text


_ALONE = "each terminal must end before a line break or another escaped character, or consist of one, and {} need not"


class _Quoting(_Rewriting):
    FAULTS = ((r"([^\\]|\\(?s:.))+\\(?s:.*)", _ALONE),)

    def _range(self, first: str, last: str) -> str:
        ends = [_literal(text) for text in (first, last)]
        if [len(end) for end in ends] != [1, 1]:
            raise ValueError(f"{first}..{last} is no range of characters")
        return f"/{quoted_regex('[{}-{}]'.format(*map(escaped, ends)))}/"

    def _string(self, text: str) -> str:
        value = _literal(text.removesuffix("i"))
        if not text.endswith("i") or not value:
            return json.dumps(json.dumps(value, ensure_ascii=False)[1:-1])
        return self._regex(f"/{escaped(value)}/i")

    def _regex(self, text: str) -> str:
        body, _, flags = text[1:].rpartition("/")
        return f"/{quoted_regex(body, flags)}/{flags}"


class _Bounding(_Rewriting):
    def __init__(self, lark: str, after: str, closing: str) -> None:
        super().__init__(lark)
        self._closing, first = closing, closing[0]
        begins = f"no terminal may hold {first!r}, with which {closing} begins behind the input, and {{}} may"
        lines = [(r"(?s:.+)\n(?s:.*)", _ALONE)] if after.startswith(r"\n") else []
        self.FAULTS = (*lines, (f"(?s:.*){escaped(first)}(?s:.*)", begins))  # as it might arise from several terminals

    def _without(self) -> str:
        return f" & ~/(?s:.*){escaped(self._closing)}(?s:.*)/"


def escaped(text: str) -> str:
    """A regular expression for a text, as it stands between slashes."""
    return re.sub(r"[^\w\s<>]|[\s]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _statements(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The statements of a grammar: a line goes on if the next one begins with a bar."""
    statement: list[Token] = []
    for i, token in enumerate(tokens):
        if token.kind != "line":
            statement.append(token)
        elif statement and (i + 1 == len(tokens) or tokens[i + 1].text != "|"):
            yield statement
            statement = []
    if statement:
        yield statement


def _imports(words: Sequence[str]) -> list[tuple[str, str]]:
    """The terminals of Lark's ``common`` that a statement imports, each with the name that it gets. Raises
    ValueError."""
    match words:
        case ["common", ".", name]:
            return [(name, name)]
        case ["common", ".", name, "->", alias]:
            return [(name, alias)]
        case ["common", "(", *names, ")"]:
            return [(name, name) for name in names if name != ","]
    raise ValueError(f"it imports {''.join(words)}, and only terminals of common can be imported")


def _recursive(statements: Sequence[Sequence[Token]]) -> bool:
    """Whether a rule refers to itself, also through others."""
    used = {
        first.text.lstrip("!?"): {token.text.lstrip("!?") for token in rest if token.kind == "rule"}
        for first, *rest in statements
        if first.kind == "rule"
    }
    while leaves := {name for name, names in used.items() if not names & used.keys()}:
        used = {name: names for name, names in used.items() if name not in leaves}
    return bool(used)


def quoted_regex(body: str, flags: str = "") -> str:
    """A regular expression for what ``body`` matches, as it is written within a JSON string. Both are as they stand
    between slashes. Raises ValueError."""
    _check_flags(flags)
    out: list[str] = []
    dots = ["s" in flags]
    """For each open group, whether a dot matches line breaks."""
    at = 0
    while at < len(body):
        character = body[at]
        end = at + 1
        piece = character
        if character == "\\":
            found = _ESCAPE.match(body, at)
            if found is None:
                raise ValueError(f"the regular expression {body[:100]!r} ends in a backslash")
            end = found.end()
            piece = _atom(found[0])
        elif character == "[":
            end = _class_end(body, at)
            piece = _atom(body[at:end])
        elif character == ".":
            piece = _written(ESCAPED - (set() if dots[-1] else {"\n"}), PLAIN)
        elif character == "(" and (group := _GROUP.match(body, at)):
            end = group.end()
            piece = group[0]
            _check_flags(group[1])
            dot = "s" in group[1].partition("-")[0] or (dots[-1] and "s" not in group[1].partition("-")[2])
            if group[2] == ":":
                dots.append(dot)
            else:
                dots[-1] = dot
        elif character == "(":
            dots.append(dots[-1])
            if body.startswith(("(?P<", "(?<"), at):
                end = body.find(">", at) + 1 or len(body)
                piece = body[at:end]
        elif character == ")":
            if len(dots) > 1:
                dots.pop()
        elif character == "{":
            end = body.find("}", at) + 1 or len(body)
            piece = body[at:end]
        elif character in ESCAPED:
            piece = _written({character}, None)
        out.append(piece)
        at = end
    return "".join(out)


def _check_flags(flags: str) -> None:
    on, _, off = flags.partition("-")
    if bad := set(on) & set("xlR") or set(off) & set("u"):
        raise ValueError(f"the flag {bad.pop()!r} of a regular expression cannot be kept to within a call")


def _class_end(body: str, at: int) -> int:
    """The end of a class that begins there. A bracket right at its beginning is a member."""
    depth = 0
    while at < len(body):
        if body[at] == "[":
            depth += 1
            at += 1 + body.startswith("^", at + 1)
            at += body.startswith("]", at)
        elif body[at] == "]":
            depth -= 1
            at += 1
        found = _CLASS_PART.search(body, at)
        if not depth or found is None:
            break
        at = found.start() if found[0] in ("[", "]") else found.end()
        while found and found[0] not in ("[", "]") and (found := _CLASS_PART.search(body, at)):
            at = found.start() if found[0] in ("[", "]") else found.end()
    if depth:
        raise ValueError(f"the regular expression {body[:100]!r} has a class without an end")
    return at


def _literal(text: str) -> str:
    """The value of a string of Lark."""
    return str(json.loads(re.sub(r"\\(x(..)|.)", lambda m: f"\\u00{m[2]}" if m[2] else m[0], text)))


def _written(escaped: set[str], plain: str | None) -> str:
    """A regular expression for the characters ``escaped``, each as JSON escapes it, or one of the class ``plain``."""
    codes = {c: json.dumps(c)[2:-1] for c in sorted(escaped)}
    ways = []
    if short := [code for code in codes.values() if len(code) == 1]:
        ways.append(rf"\\[{''.join(map(re.escape, short))}]")
    for high in "01":
        if low := "".join(code[4] for code in codes.values() if code.startswith(f"u00{high}")):
            ways.append(rf"\\u00{high}[{low}]")
    ways = [f"(?-i:{'|'.join(ways)})"] if ways else []
    return f"(?:{'|'.join(ways if plain is None else [plain, *ways])})"


def _atom(text: str) -> str:
    """What an escape or a class matches, as it is written within a JSON string."""
    return (_short_atom if len(text) <= MOST_KEPT else _short_atom.__wrapped__)(text)


@functools.lru_cache(maxsize=4096)
def _short_atom(text: str) -> str:
    found = _starts(f"start: /{text}/")
    escaped = {chr(byte) for byte in found} & ESCAPED
    if not escaped:
        return text
    return _written(escaped, f"[{text}&&{PLAIN}]" if len(escaped) < len(found) else None)


def _starts(lark: str) -> Sequence[int]:
    """The bytes with which a text may begin that fits a grammar; none if the grammar is invalid, which whoever compiles
    it says."""
    matcher = LLMatcher(_bytes(), json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    if matcher.is_error():
        return []
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return [int(byte) for byte in np.flatnonzero(bits[:256])]


class _Bytes:
    """A tokenizer whose tokens are the single bytes, as llguidance takes it."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
