"""What an answer has to look like, compiled for a tokenizer: which tokens may come next. The work is llguidance's."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from infer.errors import RequestError
from infer.request import StructuredOutputs

Bits = np.ndarray[tuple[int], np.dtype[np.int32]]
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of a JSON text: enough to indent it, and an end to it."""
KEPT = 128
"""Compiled grammars that are remembered."""


class Matcher:
    """How far one answer has come. It may give up, on an input far too complex: then no token is allowed any more."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._allowed: Bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def allowed(self) -> Bits:
        """A bit per token of the vocabulary, the first in the lowest bit: whether it may come next. Overwritten by the
        next call."""
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        if self._matcher.is_error():
            self._allowed[:] = 0
        return self._allowed

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def fault(self) -> str | None:
        """Why it has given up, if it has."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else None


class Grammar:
    """A compiled grammar, at its beginning."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles for one tokenizer. May be called from any thread; the first call takes about a second with a large
    vocabulary, later ones from microseconds to a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compile = functools.lru_cache(KEPT)(self._compile_anew)

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Raises RequestError where it is no grammar, or one that llguidance does not know."""
        if not self._eos_token_ids:
            raise RequestError(
                "Structured output needs an end-of-sequence token, and this checkpoint names none (eos_token_id).",
                param="structured_outputs",
            )
        try:
            return self._compile(_source(outputs))
        except ValueError as error:
            raise RequestError(
                f"The structured output cannot be compiled: {_short(str(error))}", param="structured_outputs"
            ) from None

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        plain = Tokenizer.from_str(self._source.to_str())
        plain.no_padding()
        plain.no_truncation()
        size = max(self._vocab_size, plain.get_vocab_size())
        return LLTokenizer(plain.to_str(), n_vocab=size, eos_token=self._eos_token_ids)

    def _compile_anew(self, source: str) -> Grammar:
        with self._lock:
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return Grammar(matcher, tokenizer.vocab_size)


def _source(outputs: StructuredOutputs) -> str:
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


def _short(error: str, most: int = 500) -> str:
    """The sentence; llguidance may show the whole grammar after it."""
    text = error.partition("\n<state>")[0].strip()
    return text if len(text) <= most else text[:most] + "..."
