"""What an answer has to look like, compiled for a tokenizer: which tokens may come next. The work is llguidance's."""

from __future__ import annotations

import functools
import json
import math
import os
import queue
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from infer.contracts.params import StructuredOutputs
from infer.errors import RequestError

Bits = np.ndarray[tuple[int], np.dtype[np.int32]]
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of a JSON text: enough to indent it, and an end to it."""
FORCED = 64
"""Tokens without an alternative that a new grammar is followed through, to see whether it ends in nothing."""
MAX_CHARS = 1 << 20
"""Of a grammar."""
KEPT, KEPT_BYTES = 128, 1 << 30
"""Compiled grammars that are remembered, and the memory that all of them may take."""
LIMITS = LLParserLimits(verbose_errors=False)
MASK_SECONDS = 0.025
"""Of a processor's time, for one mask. What people ask for takes a tenth of it at most, with 150,000 tokens."""


class Matcher:
    """How far one answer has come. It may give up, on an input far too complex: then no token is allowed any more."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        self.allowed: Bits = np.zeros((grammar.vocab_size + 31) // 32, dtype=np.int32)
        """A bit per token of the vocabulary, the first in the lowest bit: whether it may come next, as of the last
        ``compute``."""
        self._found: Bits = np.zeros_like(self.allowed)
        self._raised: str | None = None
        self.fault: str | None = None
        """Why it has given up, if it has."""

    def compute(self) -> None:
        """Find out what is allowed next. Other threads go on meanwhile."""
        try:
            self._matcher.unsafe_compute_mask_ptr(self._found.ctypes.data, self._found.nbytes)
        except BaseException as error:  # a panic of Rust's is no Exception
            self._raised = f"{type(error).__name__}: {error}"

    def settle(self) -> None:
        """Take over what ``compute`` has found."""
        if self._raised is not None:
            self._give_up(self._raised)
        elif self._matcher.is_error():
            self._give_up(_short(self._matcher.get_error()))
        else:
            self.allowed = self._found

    def abandon(self) -> None:
        """Of one that still computes, in another thread: from now on it is left alone there."""
        self._give_up(TOO_SLOW)
        self._grammar.fault = TOO_SLOW

    def accept(self, token_id: int) -> None:
        if self.fault is None:
            self._matcher.consume_token(token_id)

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        self.allowed = np.zeros_like(self.allowed)


TOO_SLOW = f"what may come next took more than {MASK_SECONDS * 1e3:g} ms to find; give a simpler or less ambiguous one"


class Masks:
    """Computes masks in a thread, so that one that takes too long can be left behind. A thread that was left ends by
    itself: llguidance bounds what a mask may take, by seconds. Use it from one thread."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def compute(self, matchers: Sequence[Matcher]) -> None:
        """Bring ``allowed`` up to date. A matcher that takes longer than ``MASK_SECONDS`` gives up."""
        left = [matcher for matcher in matchers if matcher.fault is None]
        while left:
            worker = self._worker = self._worker or _Worker()
            done = worker.run(left)
            for matcher in left[:done]:
                matcher.settle()
            if done < len(left):
                self._worker = None
                left[done].abandon()
            left = left[done + 1 :]

    def __del__(self) -> None:
        if self._worker is not None:
            self._worker.end()


class _Worker:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Sequence[Matcher] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._at = 0, 0.0
        """Which matcher of the job is computed, and the thread's time when it began."""
        self._left = False
        self._thread = threading.Thread(target=self._work, name="infer-masks", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def run(self, matchers: Sequence[Matcher]) -> int:
        """How many are done; where it is not all, the next one took too long, and the thread is lost."""
        self._at = 0, math.inf
        self._jobs.put(matchers)
        patience = MASK_SECONDS
        while True:
            try:
                self._done.get(timeout=patience)
                return len(matchers)
            except queue.Empty:
                with self._lock:
                    index, began = self._at
                    # By its own clock: on a busy machine it may not have had its turn.
                    patience = max(began + MASK_SECONDS - time.clock_gettime(self._clock), 0.001)
                    if patience > 0.001 or not self._done.empty():
                        patience = min(patience, MASK_SECONDS)
                        continue
                    self._left = True
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, 19)
                return index

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            for index, matcher in enumerate(job):
                with self._lock:
                    if self._left:
                        return
                    self._at = index, time.thread_time()
                matcher.compute()
            with self._lock:
                if self._left:
                    return
                self._done.put(None)
            del job, matcher


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher, vocab_size: int, num_bytes: int = 0) -> None:
        self.start = start
        """At its beginning."""
        self.vocab_size = vocab_size
        self.num_bytes = num_bytes
        self.fault: str | None = None
        """Why it is not compiled again."""

    def matcher(self) -> Matcher:
        return Matcher(self)


class Grammars:
    """Compiles for one tokenizer, and remembers. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar | str] = OrderedDict()
        """Of each text the grammar, or why it is none; the one asked for last is the last."""

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Raises RequestError where it is no grammar, or one that llguidance does not know. Some take for ever."""
        source = self.source(outputs)
        return self.known(source) or self.make(source)

    def source(self, outputs: StructuredOutputs) -> str:
        """As llguidance reads it. Raises RequestError."""
        if not self._eos_token_ids:
            raise RequestError(
                "Structured output needs an end-of-sequence token, and this checkpoint names none (eos_token_id).",
                param="structured_outputs",
            )
        try:
            source = _source(outputs)
        except ValueError as error:
            raise refused(str(error)) from None
        if len(source) > MAX_CHARS:
            raise refused(f"it has {len(source)} characters, and {MAX_CHARS} are allowed")
        return source

    def known(self, source: str) -> Grammar | None:
        """None where it is new. Raises RequestError where it is known not to work."""
        with self._lock:
            found = self._kept.get(source)
            if found is None:
                return None
            self._kept.move_to_end(source)
        fault = found if isinstance(found, str) else found.fault
        if fault is not None:
            raise refused(fault)
        assert isinstance(found, Grammar)
        return found

    def make(self, source: str, num_bytes: int | None = None) -> Grammar:
        """Compile, and remember. ``num_bytes``, where it has been tried already, is about what it takes. Raises
        RequestError."""
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=LIMITS)
        if num_bytes is None and (fault := first_fault(matcher)):
            raise self.refuse(source, fault)
        grammar = Grammar(matcher, self.tokenizer.vocab_size, num_bytes or 0)
        self._keep(source, grammar)
        return grammar

    def refuse(self, source: str, fault: str) -> RequestError:
        """Remember why it is not compiled; the error to raise."""
        self._keep(source, fault)
        return refused(fault)

    def _keep(self, source: str, found: Grammar | str) -> None:
        with self._lock:
            self._kept[source] = found
            sizes = [g.num_bytes if isinstance(g, Grammar) else 0 for g in self._kept.values()]
            while len(sizes) > KEPT or (sum(sizes) > KEPT_BYTES and len(sizes) > 1):
                self._kept.popitem(last=False)
                del sizes[0]

    def prepare(self) -> None:
        """Make what would hold up whoever asks first."""
        if self._eos_token_ids:
            self.tokenizer  # noqa: B018

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """Making it takes about a second with a large vocabulary, and holds the interpreter."""
        return LLTokenizer(*self.vocabulary)

    @functools.cached_property
    def vocabulary(self) -> tuple[str, int, list[int]]:
        """What llguidance makes its tokenizer of: the tokenizer as JSON, the number of ids, those that end a text."""
        plain = self._source
        if plain.padding is not None or plain.truncation is not None:
            plain = Tokenizer.from_str(plain.to_str())
            plain.no_padding()
            plain.no_truncation()
        return plain.to_str(), max(self._vocab_size, plain.get_vocab_size()), self._eos_token_ids


def refused(fault: str) -> RequestError:
    return RequestError(f"The structured output cannot be compiled: {_short(fault)}.", param="structured_outputs")


def first_fault(matcher: LLMatcher) -> str | None:
    """Why a grammar, at its beginning, is none that an answer could fit."""
    if matcher.is_error():
        return str(matcher.get_error())
    matcher = matcher.deep_copy()
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


def worker(first: bytes) -> Callable[[bytes], bytes]:
    """For ``server.child``: a grammar to whether it is one (``fault``), and what it takes (``num_bytes``)."""
    tokenizer = LLTokenizer(*json.loads(first))

    def answer(source: bytes) -> bytes:
        before = _resident()
        fault = first_fault(LLMatcher(tokenizer, source.decode(), log_level=0, limits=LIMITS))
        return json.dumps({"fault": fault, "num_bytes": max(0, _resident() - before)}).encode()

    return answer


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


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
    text = error.partition("\n<state>")[0].partition("\n<non-verbose/>")[0].strip().rstrip(".")
    return text if len(text) <= most else text[:most] + "..."
