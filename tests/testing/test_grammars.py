"""``check_grammar_backend``: ours passes, and it names the bugs that are planted in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Self

import numpy as np
import pytest
from pydantic import BaseModel
from tests.core.engine.test_schedulers import documented
from tests.examples import seeded
from tests.testing.planted import Bug, Bugs, caught

from infer.contracts.grammar import Bits, Checked, Vocabulary
from infer.contracts.params import StructuredOutputs
from infer_llguidance import make
from infer_llguidance.backend import Grammar, LLGuidance, Matcher
from infer_testing import check_grammar_backend
from infer_testing.grammars import CHOICES, END

planted: Bugs[type[LLGuidance]] = Bugs([])


@pytest.mark.draws
@seeded()
def test_ours_passes(seed: int) -> None:
    check_grammar_backend(make, seed=seed)


def test_the_documented_one_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = documented("ChoiceGrammar")
    module = ModuleType(names["__name__"])
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (registration,) = names["infer_grammar_backends"]()
    check_grammar_backend(registration.factory)


@planted.each
def test_a_planted_bug_is_named(bug: Bug[Any]) -> None:
    made: Callable[[Vocabulary, BaseModel], LLGuidance] = lambda vocabulary, settings: bug.make(vocabulary)  # noqa: E731
    caught(bug, lambda **keys: check_grammar_backend(made, **keys))


def test_who_refuses_every_format_is_named() -> None:
    class Refuses(LLGuidance):
        def source(self, outputs: StructuredOutputs) -> str:
            raise ValueError("it is Tuesday")

    bug = Bug("", Refuses, "fits", "it refuses each of choice, regex")
    test_a_planted_bug_is_named(bug)


class Changed(LLGuidance):
    """Makes matchers of a kind of its own."""

    kind: type[Matcher] = Matcher

    def make(self, source: str, checked: Checked) -> Grammar:
        made, kind = super().make(source, checked), self.kind
        made.matcher = lambda: kind(made)  # type: ignore[method-assign]
        return made


@planted("any token may come", "fits", "may be an answer, and is not of")
class AllowsAll(Changed):
    class kind(Matcher):  # noqa: N801
        def settle(self) -> None:
            super().settle()
            self.allowed = self.allowed | np.int32(-1)


@planted("only one token may ever come", "complete", "may not come")
class AllowsOne(Changed):
    class kind(Matcher):  # noqa: N801
        def settle(self) -> None:
            super().settle()
            bits = np.unpackbits(self.allowed.view(np.uint8), bitorder="little")
            bits[int(bits.argmax()) + 1 :] = 0
            self.allowed = np.packbits(bits, bitorder="little").view(np.int32)


@planted("the end may never come where more may", "complete", "may not end there")
class Greedy(Changed):
    class kind(Matcher):  # noqa: N801
        def settle(self) -> None:
            super().settle()
            if np.unpackbits(self.allowed.view(np.uint8)).sum() > 1:
                self.allowed[END >> 5] &= ~(1 << (END & 31))


@planted("a fork is the state itself", "alone", "once a fork went on")
class NoFork(Changed):
    class kind(Matcher):  # noqa: N801
        def fork(self) -> Self:
            return self


@planted("what was allowed before stays allowed", "alone", "depends on more than these tokens")
class Remembers(Changed):
    class kind(Matcher):  # noqa: N801
        past: Bits | None = None

        def settle(self) -> None:
            super().settle()
            self.past = self.allowed if self.past is None else self.past | self.allowed
            self.allowed = self.past


@planted("accepts takes the tokens", "accepts", "tokens may come, and not")
class Takes(Changed):
    class kind(Matcher):  # noqa: N801
        def accepts(self, token_ids: Sequence[int]) -> int:
            count = super().accepts(token_ids)
            for token in token_ids[:count]:
                self.accept(token)
            return count


@planted("choices are told apart by their number", "sources", "have the same source")
class Counts(LLGuidance):
    def source(self, outputs: StructuredOutputs) -> str:
        few = None if outputs.choice is None else CHOICES[: len(outputs.choice)]
        return super().source(outputs.model_copy(update={"choice": few}))


@planted("a source has a number of its own", "sources", "another source the second time")
class Numbers(LLGuidance):
    count = 0

    def source(self, outputs: StructuredOutputs) -> str:
        self.count += 1
        return super().source(outputs) + " " * self.count


@planted("nothing is checked", "refuses", "is taken, though no answer can fit it")
class Trusts(LLGuidance):
    def _fault_of(self, text: str) -> str | None:
        return None


@planted("one that is abandoned goes on", "abandoned", "goes on")
class GoesOn(Changed):
    class kind(Matcher):  # noqa: N801
        def _give_up(self, fault: str) -> None:
            self.fault = fault


@planted("a fork that is abandoned spoils its grammar", "abandoned", "once a fork was abandoned, its grammar says")
class Spoils(Changed):
    class kind(Matcher):  # noqa: N801
        def abandon(self, why: str) -> None:
            super().abandon(why)
            self._grammar.fault = why


@planted("the factory is a lambda", "importable", "is no function or class of the module")
class Lambda(LLGuidance):
    pass
