"""What ``GrammarBackendProtocol`` promises, tried on a vocabulary of characters and words."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models

from infer.contracts.grammar import (
    GrammarBackendFactory,
    GrammarBackendProtocol,
    GrammarProtocol,
    MatcherProtocol,
    Vocabulary,
)
from infer.contracts.params import StructuredOutputs
from infer.contracts.registration import NoSettings
from infer_testing.suite import Skipped, Suite, Violation

WORDS = ("yes", "no", "ye", "true", "fal", "ab", "ba", '"a', '":', "12", "é")
"""Tokens of several characters. Of two bytes, é is a token, and so are its bytes."""
END = 256 + len(WORDS)
CHOICES = ("yes", "no", "yellow", "é")
REGEX = "(ab|b){1,3}c?"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [True, 12]}}, "required": ["a"], "additionalProperties": False}
LARK = 'start: "[" NAME ("," NAME)* "]"\nNAME: /[ab]{1,2}/'
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "json": ({"json": SCHEMA}, lambda text: json.loads(text) in ({"a": True}, {"a": 12})),
    "grammar": ({"grammar": LARK}, lambda text: re.fullmatch(r"\[[ab]{1,2}(,[ab]{1,2})*\]", text)),
}
"""Of each kind: a format, and whether a text has it."""
MOST = 60
"""The most tokens of an answer here."""


@dataclass
class Backends:
    """What makes a backend."""

    factory: GrammarBackendFactory
    settings: BaseModel

    @cached_property
    def tokens(self) -> list[bytes]:
        return [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), b""]

    @cached_property
    def backend(self) -> GrammarBackendProtocol:
        return self.factory(Vocabulary(tokenizer, END + 1, [END]), self.settings)

    def grammar(self, kind: str) -> GrammarProtocol:
        """Raises Skipped if the backend does not know the kind."""
        outputs = StructuredOutputs.model_validate(KINDS[kind][0])
        try:
            source = self.backend.source(outputs)
        except ValueError as error:
            raise Skipped(f"it refuses {kind}: {error}") from None
        if (checked := self.backend.check(source)).fault is not None:
            raise Violation(f"{KINDS[kind][0]} is refused: {checked.fault.text}")
        return self.backend.make(source, checked)

    @cached_property
    def known(self) -> list[str]:
        """The kinds that it knows."""
        found = []
        for kind in KINDS:
            try:
                self.grammar(kind)
            except Skipped:
                continue
            found.append(kind)
        if not found:
            raise Violation(f"it refuses each of {', '.join(KINDS)}")
        return found


def tokenizer() -> str:
    """One whose tokens are bytes and ``WORDS``, and the end of an answer, as JSON."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    shown |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    vocab = {shown[byte]: byte for byte in range(256)}
    vocab |= {"".join(shown[byte] for byte in word.encode()): 256 + i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.BPE(vocab, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made.to_str()


def allowed(matcher: MatcherProtocol) -> list[int]:
    """The tokens that may come next."""
    matcher.compute()
    matcher.settle()
    return [token for token in range(END + 1) if matcher.allowed[token >> 5] >> (token & 31) & 1]


SUITE: Suite[Backends] = Suite("check_grammar_backend")
check = SUITE.check


def check_grammar_backend(
    factory: GrammarBackendFactory,
    settings: BaseModel | None = None,
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that a grammar backend promises. ``only`` names checks, ``case`` one case of each. Raises
    ConformanceError."""
    SUITE.enforce(Backends(factory, settings or NoSettings()), only=only, seed=seed, case=case)


def walk(b: Backends, matcher: MatcherProtocol, draw: random.Random) -> Iterator[int]:
    """The tokens of an answer, drawn among those that are allowed; the end as soon as it is, in half of the cases."""
    for _ in range(MOST):
        may = allowed(matcher)
        if not may:
            raise Violation(f"no token may come next{f': {matcher.fault}' if matcher.fault else ''}")
        token = END if END in may and draw.random() < 0.5 else draw.choice(may)
        yield token
        if token == END:
            return
        matcher.accept(token)


def shown(b: Backends, tokens: Sequence[int]) -> str:
    return b"".join(b.tokens[token] for token in tokens).decode(errors="replace")


@check("An answer that takes none but allowed tokens, and ends where it may, has the format", 40)
def fits(b: Backends, draw: random.Random) -> None:
    kind = draw.choice(b.known)
    tokens = [*walk(b, b.grammar(kind).matcher(), draw)]
    text = shown(b, tokens)
    if tokens[-1] != END:
        return  # a list may go on
    try:
        good = KINDS[kind][1](text)
    except ValueError:
        good = False
    if not good:
        raise Violation(f"{text!r} may be an answer, and is not of {KINDS[kind][0]}")


@check("Every answer that has the format may come, in whichever tokens")
def complete(b: Backends, draw: random.Random) -> None:
    for kind, texts in (
        ("choice", CHOICES),
        ("regex", ("b", "abbc", "babab")),
        ("json", ('{"a":true}', '{"a":12}')),
        ("grammar", ("[a,ba]",)),
    ):
        if kind not in b.known:
            continue
        for text in texts:
            for whole in (True, False):
                matcher, data = b.grammar(kind).matcher(), text.encode()
                while True:
                    may = allowed(matcher)
                    fit = [token for token in may if token != END and data.startswith(b.tokens[token])]
                    if not data and END not in may:
                        raise Violation(f"{text!r} has the format {KINDS[kind][0]}, and may not end there")
                    if not data:
                        break
                    if not fit:
                        raise Violation(f"{text!r} has the format {KINDS[kind][0]}; {data.decode()!r} may not come")
                    token = max(fit, key=lambda token: len(b.tokens[token]) * (1 if whole else -1))
                    matcher.accept(token)
                    data = data[len(b.tokens[token]) :]


@check("A state depends on its own answer's tokens alone, whatever other answers and forks do", 30)
def alone(b: Backends, draw: random.Random) -> None:
    grammar = b.grammar(draw.choice(b.known))
    one, other, seen = grammar.matcher(), grammar.matcher(), []
    for token in walk(b, one, draw):
        before = one.allowed.tobytes()
        seen.append(token)
        fork = one.fork()
        for _ in walk(b, fork, draw):  # along draft tokens
            pass
        for _ in walk(b, other, draw):
            break
        allowed(one)
        if one.allowed.tobytes() != before:
            raise Violation(f"after {shown(b, seen[:-1])!r}, what may come next is something else once a fork went on")
    again = grammar.matcher()
    for token in seen[:-1]:
        again.accept(token)
    if seen[-1] == END and allowed(again) != allowed(one):
        raise Violation(f"after {shown(b, seen)!r}, what may come next depends on more than these tokens")


@check("``accepts`` counts the tokens that may come, and changes nothing", 30)
def accepts(b: Backends, draw: random.Random) -> None:
    matcher = b.grammar(draw.choice(b.known)).matcher()
    good = [*walk(b, matcher.fork(), draw)]
    good = good[:-1] if good[-1] == END else good
    bad = next(token for token in range(END) if b.tokens[token] == b"\x00")
    end = draw.randint(0, len(good))
    for tokens, count in ((good[:end], end), ([*good[:end], bad, *good[end:]], end)):
        for _ in range(2):
            if (found := matcher.accepts(tokens)) != count:
                raise Violation(f"of {shown(b, tokens)!r}, {found} tokens may come, and not {count}")


@check("Equal formats have equal sources, and others have others")
def sources(b: Backends, draw: random.Random) -> None:
    found = [b.backend.source(StructuredOutputs.model_validate(KINDS[kind][0])) for kind in b.known * 2]
    if found[: len(found) // 2] != found[len(found) // 2 :]:
        raise Violation("the same format has another source the second time")
    if "choice" in b.known:
        one, other = (b.backend.source(StructuredOutputs(choice=choice)) for choice in (("a", "b"), ("a", "c")))
        if one == other:
            raise Violation("the choices of a and b, and of a and c, have the same source")


@check("What is no grammar, and what no answer fits, is refused with a reason")
def refuses(b: Backends, draw: random.Random) -> None:
    for kind, outputs in (
        ("regex", {"regex": "(a"}),
        ("grammar", {"grammar": "nonsense"}),
        ("json", {"json": {"type": "what"}}),
        ("regex", {"regex": r"[^\s\S]"}),
        ("json", {"json": {"enum": []}}),
    ):
        if kind not in b.known:
            continue
        try:
            fault = b.backend.check(b.backend.source(StructuredOutputs.model_validate(outputs))).fault
        except ValueError:
            continue
        if fault is None or not fault.text:
            raise Violation(f"{outputs} is taken, though no answer can fit it")


@check("A state that is abandoned allows nothing, and says why; so does its grammar, unless it was a fork")
def abandoned(b: Backends, draw: random.Random) -> None:
    for forked in (True, False):
        grammar = b.grammar(b.known[0])
        other, matcher = grammar.matcher(), grammar.matcher()
        matcher = matcher.fork() if forked else matcher
        allowed(matcher)
        matcher.abandon("it took too long")
        matcher.accept(ord("a"))
        if matcher.fault != "it took too long" or matcher.allowed.any() or matcher.accepts([ord("a")]):
            raise Violation("a state that was abandoned goes on")
        if (grammar.fault is None) != forked:
            raise Violation(f"once {'a fork' if forked else 'a state'} was abandoned, its grammar says {grammar.fault}")
        if not allowed(other):
            raise Violation("another answer's state allows nothing once one was abandoned")


@check("A child process can import the factory")
def importable(b: Backends, draw: random.Random) -> None:
    module, name = getattr(b.factory, "__module__", ""), getattr(b.factory, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not b.factory:
        raise Violation(f"{name or b.factory!r} is no function or class of the module {module}")
