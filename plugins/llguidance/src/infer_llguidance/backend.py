"""Structured outputs compiled by llguidance: JSON schemas, regular expressions, grammars in its dialect of Lark, and
calls of tools whose inputs have grammars."""

from __future__ import annotations

import copy
import functools
import json
import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from infer.contracts.grammar import MASK_SECONDS, MAX_CHARS, TOO_SLOW, Bits, Checked, Fault, Vocabulary
from infer.contracts.params import CallOutputs, StructuredOutputs
from infer_llguidance import calls
from infer_llguidance.calls import ToolGrammarError
from infer_llguidance.schemas import WHITESPACE

FORCED = 64
"""A new grammar is checked by following it through at most this many tokens, as long as only one token is allowed. It
is refused if that leads to a point where none is."""
LIMITS = LLParserLimits(verbose_errors=False)


class Matcher:
    """``MatcherProtocol``. llguidance limits the work for a mask, so that ``compute`` ends by itself after some
    seconds."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        self.allowed: Bits = np.zeros((grammar.vocab_size + 31) // 32, dtype=np.int32)
        self._computed: Bits = np.zeros_like(self.allowed)
        self._forked = False
        self.fault: str | None = None

    def fork(self) -> Self:
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other.allowed, other._computed = np.zeros_like(self.allowed), np.zeros_like(self.allowed)
        other._forked = True
        return other

    def accepts(self, token_ids: Sequence[int]) -> int:
        return 0 if self.fault is not None else int(self._matcher.validate_tokens(list(token_ids)))

    def compute(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._computed.ctypes.data, self._computed.nbytes)

    def settle(self) -> None:
        if self._matcher.is_error():
            self._give_up(_short(self._matcher.get_error()))
        else:
            self.allowed = self._computed

    def abandon(self, why: str) -> None:
        self._give_up(why)
        if not self._forked:
            self._grammar.fault = why

    def accept(self, token_id: int) -> None:
        if self.fault is None:
            self._matcher.consume_token(token_id)

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        self.allowed = np.zeros_like(self.allowed)


class Grammar:
    """``GrammarProtocol``."""

    def __init__(self, start: LLMatcher, vocab_size: int, num_bytes: int = 0) -> None:
        self.start = start
        """A matcher at the beginning of an answer, from which answers' matchers are copied."""
        self.vocab_size = vocab_size
        self.num_bytes = num_bytes
        self.fault: str | None = None

    def matcher(self) -> Matcher:
        return Matcher(self)


class LLGuidance:
    """``GrammarBackendProtocol``."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def source(self, outputs: StructuredOutputs) -> str:
        if isinstance(outputs, CallOutputs):
            return calls.source(outputs, None if outputs.answer is None else self.source(outputs.answer))
        if outputs.regex is not None:
            return str(LLMatcher.grammar_from_regex(outputs.regex))
        if outputs.grammar is not None:
            return str(LLMatcher.grammar_from_lark(outputs.grammar))
        if outputs.choice is not None:
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, outputs.choice))))
        schema: Any = {"type": "object"} if outputs.json_object else outputs.json_schema
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}))

    def prepare(self) -> None:
        self.tokenizer  # noqa: B018

    def check(self, source: str) -> Checked:
        text = None
        if source.startswith(calls.PREFIX):
            try:
                text = calls.compiled(source, self._fault_of, lambda: self._added)
            except ToolGrammarError as error:
                return Checked(None, Fault(str(error), error.param))
            if len(text) > MAX_CHARS:
                return Checked(None, Fault(f"the grammars of its tools become more than {MAX_CHARS} characters"))
        before = _resident()
        found = self._fault_of(text or source)
        fault = None if found is None else calls.blamed(source, found, self._fault_of)
        return Checked(text, fault, max(0, _resident() - before))

    def make(self, source: str, checked: Checked) -> Grammar:
        return Grammar(self._start(checked.text or source), self.tokenizer.vocab_size, checked.num_bytes)

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer. Making it takes about a second with a large vocabulary, and holds the GIL."""
        to_json, size, eos_token_ids = self._vocabulary
        return LLTokenizer(to_json(), size, list(eos_token_ids))

    @functools.cached_property
    def _added(self) -> calls.Added:
        return calls.added(self._vocabulary.tokenizer(), self._vocabulary.eos_token_ids)

    def _start(self, text: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, text, log_level=0, limits=LIMITS)

    def _fault_of(self, text: str) -> str | None:
        """Why no answer can fit a grammar, or why its masks take too long; None if nothing is wrong at its
        beginning."""
        matcher = self._start(text)
        if matcher.is_error():
            return _short(matcher.get_error())
        for _ in range(FORCED):
            began = time.thread_time()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            if time.thread_time() - began > MASK_SECONDS:
                return TOO_SLOW
            if matcher.is_error() or not bits.any():
                return "no text fits it"
            if bits.sum() > 1 or matcher.is_accepting():
                return None
            matcher.consume_token(int(bits.argmax()))
        return None


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _short(error: str) -> str:
    """The first part of an error of llguidance's, which may show the whole grammar or its own calls after it."""
    return re.split(r"\n<(?:state|non-verbose/|backtrace)>", error)[0].strip()
