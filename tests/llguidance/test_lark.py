"""Grammars rewritten for JSON strings, and for texts in front of a closing tag."""

from __future__ import annotations

import functools
import json
import random
import re

import pytest
from llguidance import LLMatcher
from tests.examples import slowly

from infer_llguidance import lark
from infer_llguidance.lark import bounded, quoted, quoted_regex


@functools.cache
def start(grammar: str) -> LLMatcher:
    matcher = LLMatcher(lark._bytes(), json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def fits(grammar: str, text: str) -> bool:
    matcher = start(grammar).deep_copy()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def fits_quoted(grammar: str, text: str) -> bool:
    return fits(quoted(grammar, "<", '"'), f'<{json.dumps(text, ensure_ascii=False)[1:-1]}"')


def fits_bounded(grammar: str, text: str) -> bool:
    return fits(bounded(grammar, "<", r"\n<\/p>", "</p>"), f"<{text}\n</p>")


REGEXES = [
    *(r"[\s\S]", r"\s", r"[^a]", r"[^\n]", ".", "(?s:.)", '"', r"\\", r"[\[\]\"]", r"[]\"a]", r"[^]\"]", "[[:space:]]"),
    *(
        r"[a-z&&[^k]]",
        r"\x0a",
        r"\u0022",
        r"\p{Cc}",
        r"\W",
        r"[[a\"]c]",
        r"(?i)k\"\n",
        r"(?s).(?-s:.)",
        r"a{2,3}\"{1,2}",
    ),
    *(r"\/\t", "(?P<name>.)|(?:\\n)", "k?.?\n"),
]


@pytest.mark.parametrize("regex", [*slowly(*REGEXES[:-6]), *REGEXES[-6:]])
def test_a_quoted_regular_expression_matches_the_quoted_text(regex: str) -> None:
    plain, rewritten = f"start: /{regex}/", f"start: /{quoted_regex(regex)}/"
    for character in [*map(chr, range(0x30)), "K", "\\", "]", "a", "c", "k", "\x7f", "é", "😀"]:
        for text in (character, character * 2, f"k{character}\n"):
            assert fits(rewritten, json.dumps(text, ensure_ascii=False)[1:-1]) == fits(plain, text), text


def test_escapes_are_written_in_one_case() -> None:
    assert fits("start: /%s/" % quoted_regex(r"(?i)k\n"), r"K\n")  # noqa: UP031
    assert not fits("start: /%s/" % quoted_regex(r"(?i)k\n"), r"k\N")  # noqa: UP031


RULES = """
start: a "b" | c  // a comment
a: /.*\\.py/ "\\n"   # and one
  | "x" -> alias
?c: _d~2..3 [E] F? G
_d: "a".."c"
E: "e" & /[a-e]/ | "q\\"\\x41"i
F: ("+" | INT)
%import common.INT
%import common (WS, LF)
G: LF?
"""
EXPRESSIONS = """
start: sum
sum: sum ("+" | "*") one | one
one: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""


@pytest.mark.parametrize("check", [fits_quoted, fits_bounded])
def test_a_rewritten_grammar_describes_the_same_texts(check: object) -> None:
    """As Lark reads it: llguidance misses some that begin as a longer terminal does."""
    assert callable(check)
    texts = ['k".py\nb', "xb", "ab\n", "abc", 'abq"a7', "aae+\n", "k\nb", "a", "ab7\n\n", "\\.py\nb", ".pyb", "abE"]
    expected = [True, True, True, True, True, True, False, False, False, True, False, False]
    assert [check(RULES, text) for text in texts] == expected


@pytest.mark.parametrize("check", [fits_quoted, fits_bounded])
@pytest.mark.parametrize(
    "ignored",
    [
        r"%ignore /[ \n]+/",
        *slowly("W: /\\s+/\n%ignore W", "%import common.WS -> W\n%ignore W", '%ignore " "+\n%ignore "\\n"'),
    ],
)
def test_what_a_recursive_grammar_ignores_is_ignored(check: object, ignored: str) -> None:
    assert callable(check)
    for text in ("1+2 * (3\n  +4) ", "((1))", "1\n\n+\n2"):
        compile(f"({text})", "", "eval")
        assert check(EXPRESSIONS + ignored, text)
    for text in ("1+", "(1", "1 2", "+1"):
        assert not check(EXPRESSIONS + ignored, text)
    flat = 'start: "select" NAME ("," NAME)*\nNAME: /[a-z]+/\n' + ignored
    assert check(flat, "select a, b\n ,c")
    assert not check(flat, "select a b")
    assert not check(flat, "sel ect a")


def test_a_text_in_front_of_a_tag_does_not_hold_it() -> None:
    grammar = "start: /(?s:.*)/"
    assert fits_bounded(grammar, "a\nb <p>\n")
    assert not fits_bounded(grammar, "a</p>b")


def test_names_of_a_clients_own_do_not_clash() -> None:
    grammar = 'start: held | HELD-WHOLE\nheld: "a"\nHELD-WHOLE: "b"'
    assert fits_quoted(grammar, "a")
    assert fits_quoted(grammar, "b")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: %json {"type": "object"}', "%json cannot be kept to"),
        ('start: "a" %regex {"substring_chars": "ab"}', "%regex cannot be kept to"),
        ("start: <|end|>", "<|end|> cannot be kept to"),
        ("start: @other", "@other cannot be kept to"),
        ('start: A\nA: ~"a"', "the operator ~ for what does not match"),
        ("start[lazy]: /a+/", "start has attributes or parameters"),
        ('start: a::1\na::_: "x"', "a has attributes or parameters|:: cannot be kept to"),
        ("start: /a b/x", "the flag 'x' of a regular expression"),
        ("start: /(?-u:a)/", "the flag 'u' of a regular expression"),
        ("start: A\n%import other.A", "it imports other.A"),
        ("start: ;", "its line 1 cannot be read"),
        ("start: /[a/", "has a class without an end"),
        ('start: "(" start ")" | ESCAPED_STRING\n%import common.ESCAPED_STRING', "and ESCAPED_STRING need not"),
        ('start: "(" start ")" | "x"\n%ignore /[ "]{2}/', "and what it ignores need not"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_by_name(grammar: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", r"\(")):
        quoted(grammar, "<", '"')


def test_what_may_go_on_behind_a_line_break_is_refused_in_front_of_a_tag() -> None:
    with pytest.raises(ValueError, match=r"/\[a\\n\]\+/ need not"):
        bounded('start: "(" start ")" | /[a\\n]+/', "<", "\\n<", "</p>")


def test_a_recursive_grammar_has_no_terminal_from_which_a_tag_might_begin() -> None:
    """The tag might end in another terminal."""
    for terminals in ('"<" | ">" | "/p"', '/[a-z<]/ | "/p>"', '/[^"]/'):
        with pytest.raises(ValueError, match=r"no terminal may hold '<', with which </p> begins .* may$"):
            bounded(f'start: ("(" start ")" | {terminals})+', "<", r"\n<\/p>", "</p>")
    plain = 'start: ("(" start ")" | /[^<]/)+'
    assert fits(bounded(plain, "", "", "</p>"), "(a\n/p>)\n")
    assert not fits(bounded(plain, "", "", "</p>"), "(a</p>)")
    assert fits(bounded("start: /.*/", "", "", "</p>"), "")


@pytest.mark.parametrize("check", [fits_quoted, fits_bounded])
def test_what_is_ignored_may_also_stand_at_the_end_in_a_call(check: object) -> None:
    """And, in a recursive grammar, at its beginning. llguidance itself lets it stand between terminals alone."""
    assert callable(check)
    for grammar, begins in (('start: "a" "b"', False), ('start: "a" s? "b"\ns: "(" start ")"', True)):
        for ignored in (r"%ignore /\n+/", '%ignore " "'):
            space = "\n" if "n+" in ignored else " "
            whole = f"{grammar}\n{ignored}"
            assert fits(whole, f"a{space}{space}b")
            assert check(whole, f"a{space}{space}b")
            assert [check(whole, text) for text in (f"ab{space}", f"{space}ab")] == [True, begins]
            assert not fits(whole, f"{space}ab")
    assert not fits('start: "a" "b"\n%ignore /\\n+/', "ab\n")


@pytest.mark.parametrize("seed", [0, *slowly(1, 2, 3, 4)])
def test_what_is_drawn_from_a_quoted_grammar_is_in_the_grammar(seed: int) -> None:
    """Byte by byte, with Python's own parser to tell."""
    rng = random.Random(seed)
    matcher = start(quoted(EXPRESSIONS + r"%ignore /[ \n]+/", "<", '"')).deep_copy()
    matcher.consume_token(ord("<"))
    drawn = bytearray()
    while not matcher.is_accepting() or not drawn.endswith(b'"'):
        allowed = [byte for byte in b'0123+*()\\n"     ' if matcher.validate_tokens([byte])]
        enough = [byte for byte in allowed if len(drawn) > 40 and byte in b')1"n']
        drawn.append(rng.choice(enough or allowed))
        matcher.consume_token(drawn[-1])
    text = json.loads(b'"' + drawn)
    compile(re.sub(r"\b0+(?=[0-9])", "", f"({text})"), "", "eval")
