"""Structured outputs compiled for a tokenizer into grammars, which say which tokens may come next. llguidance does the
work."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import queue
import re
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from infer.contracts.params import CallOutputs, StructuredOutputs
from infer.errors import RequestError
from infer.text import call_grammars
from infer.text.call_grammars import WHITESPACE, ToolGrammarError

Bits = np.ndarray[tuple[int], np.dtype[np.int32]]
FORCED = 64
"""A new grammar is checked by following it through at most this many tokens, as long as only one token is allowed. It
is refused if that leads to a point where none is."""
MAX_CHARS = 1 << 20
"""The most characters that a grammar's source may have."""
KEPT, KEPT_BYTES = 128, 1 << 30
"""How many compiled grammars are cached, and how many bytes they may take together."""
LIMITS = LLParserLimits(verbose_errors=False)
MASK_SECONDS = 0.025
"""The CPU time that one mask may take. Usual grammars take at most a tenth of it, with a vocabulary of 150,000."""


class Matcher:
    """One answer's state in its grammar. It gives up on a grammar that is far too complex; from then on no token is
    allowed."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        self.allowed: Bits = np.zeros((grammar.vocab_size + 31) // 32, dtype=np.int32)
        """One bit per token of the vocabulary, the first in the lowest bit: whether the token may come next. ``settle``
        brings it up to date."""
        self._computed: Bits = np.zeros_like(self.allowed)
        self._raised: str | None = None
        self._forked = False
        self.fault: str | None = None
        """Why the matcher has given up; None if it has not."""

    def fork(self) -> Matcher:
        """A copy in the same state, which goes on by itself. If it gives up, that is no fault of the grammar."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other.allowed, other._computed = np.zeros_like(self.allowed), np.zeros_like(self.allowed)
        other._forked = True
        return other

    def accepts(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens, from the first one on, may come next."""
        return 0 if self.fault is not None else int(self._matcher.validate_tokens(list(token_ids)))

    def allows(self, token_id: int) -> bool:
        """Whether the token may come next, by ``allowed``."""
        return bool(self.allowed[token_id >> 5] >> (token_id & 31) & 1)

    def compute(self) -> None:
        """Compute which tokens are allowed next, without holding the GIL."""
        try:
            self._matcher.unsafe_compute_mask_ptr(self._computed.ctypes.data, self._computed.nbytes)
        except BaseException as error:  # a panic in Rust does not arrive as an Exception
            self._raised = f"{type(error).__name__}: {error}"

    def settle(self) -> None:
        """Take over the result of ``compute``."""
        if self._raised is not None:
            self._give_up(self._raised)
        elif self._matcher.is_error():
            self._give_up(_short(self._matcher.get_error()))
        else:
            self.allowed = self._computed

    def abandon(self) -> None:
        """Give up a matcher that is still computing in another thread. Nobody uses what that thread finds."""
        self._give_up(TOO_SLOW)
        if not self._forked:
            self._grammar.fault = TOO_SLOW

    def accept(self, token_id: int) -> None:
        if self.fault is None:
            self._matcher.consume_token(token_id)

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        self.allowed = np.zeros_like(self.allowed)


TOO_SLOW = f"what may come next took more than {MASK_SECONDS * 1e3:g} ms to find; give a simpler or less ambiguous one"


class Masks:
    """Computes masks in a thread of its own, so that a mask that takes too long can be abandoned. An abandoned thread
    ends by itself after some seconds, because llguidance limits the work for a mask. Not thread-safe."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def compute(self, matchers: Sequence[Matcher]) -> None:
        """Bring each matcher's ``allowed`` up to date. A matcher that takes longer than ``MASK_SECONDS`` gives up."""
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
        """The index of the matcher that is being computed, and the thread's CPU time when it began."""
        self._left = False
        self._thread = threading.Thread(target=self._work, name="infer-masks", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def run(self, matchers: Sequence[Matcher]) -> int:
        """Compute the matchers' masks, and return how many are done. If these are not all, the next one took too long,
        and this worker cannot be used any more."""
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
                    # Count the thread's own CPU time: on a busy machine it may not have run at all.
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
        """A matcher at the beginning of an answer, from which answers' matchers are copied."""
        self.vocab_size = vocab_size
        self.num_bytes = num_bytes
        self.fault: str | None = None
        """Why further requests with this grammar are refused; None if they are not."""

    def matcher(self) -> Matcher:
        return Matcher(self)


class Grammars:
    """Compiles grammars for one tokenizer, and caches them with the reasons of those it refused. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar | Fault] = OrderedDict()
        """Per source the compiled grammar, or the reason why it cannot be compiled; the least recently used first."""

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Compile ``outputs``, which may take very long. Raises RequestError if they are invalid, or if llguidance does
        not support them."""
        source = self.source(outputs)
        return self.known(source) or self.make(source)

    def source(self, outputs: StructuredOutputs) -> str:
        """The grammar's source as llguidance reads it. Raises RequestError."""
        if not self._eos_token_ids:
            raise RequestError(
                "Structured output needs an end-of-sequence token, and this checkpoint names none (eos_token_id).",
                param="structured_outputs",
            )
        try:
            source = "" if _long(outputs) else _source(outputs)
        except ValueError as error:
            raise refused(str(error)) from None
        if not source or len(source) > MAX_CHARS:
            raise refused(f"it has more than {MAX_CHARS} characters")
        return source

    def known(self, source: str) -> Grammar | None:
        """The cached grammar; None if the source is new. Raises RequestError if it was refused before."""
        with self._lock:
            kept = self._kept.get(source)
            if kept is None:
                return None
            self._kept.move_to_end(source)
        fault = kept if isinstance(kept, Fault) else None if kept.fault is None else Fault(kept.fault)
        if fault is not None:
            raise fault.error()
        assert isinstance(kept, Grammar)
        return kept

    def make(self, source: str, checked: Checked | None = None) -> Grammar:
        """Compile and cache a grammar, which may have been ``checked`` already. Raises RequestError."""
        if checked is None:
            checked = check(self.tokenizer, source, self._eos_token_ids)
        if checked.fault is not None:
            raise self.refuse(source, checked.fault)
        matcher = LLMatcher(self.tokenizer, checked.text or source, log_level=0, limits=LIMITS)
        grammar = Grammar(matcher, self.tokenizer.vocab_size, checked.num_bytes)
        self._keep(source, grammar)
        return grammar

    def refuse(self, source: str, fault: Fault) -> RequestError:
        """Cache the reason why ``source`` cannot be compiled, and return the error to raise."""
        self._keep(source, fault)
        return fault.error()

    def _keep(self, source: str, result: Grammar | Fault) -> None:
        with self._lock:
            self._kept[source] = result
            sizes = [g.num_bytes if isinstance(g, Grammar) else 0 for g in self._kept.values()]
            while len(sizes) > KEPT or (sum(sizes) > KEPT_BYTES and len(sizes) > 1):
                self._kept.popitem(last=False)
                del sizes[0]

    def prepare(self) -> None:
        """Make now what would delay the first request."""
        if self._eos_token_ids:
            self.tokenizer  # noqa: B018

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer. Making it takes about a second with a large vocabulary, and holds the GIL."""
        return LLTokenizer(*self.vocabulary)

    @functools.cached_property
    def vocabulary(self) -> tuple[str, int, list[int]]:
        """The arguments of ``LLTokenizer``: the tokenizer as JSON, the number of token ids, and the end-of-sequence
        ids."""
        plain = self._source
        if plain.padding is not None or plain.truncation is not None:
            plain = Tokenizer.from_str(plain.to_str())
            plain.no_padding()
            plain.no_truncation()
        return plain.to_str(), max(self._vocab_size, plain.get_vocab_size()), self._eos_token_ids


class Fault(NamedTuple):
    """Why a grammar cannot be used."""

    text: str
    param: str | None = None
    """Where the request has what is wrong; None if it is the whole grammar, and ``text`` no sentence then."""

    def error(self) -> RequestError:
        return refused(self.text) if self.param is None else RequestError(f"{_short(self.text)}.", param=self.param)


class Checked(NamedTuple):
    """What is known of a source before it is compiled."""

    text: str | None
    """The grammar as llguidance reads it; None if it is the source."""
    fault: Fault | None = None
    num_bytes: int = 0
    """About its size in memory."""


def check(tokenizer: LLTokenizer, source: str, stops: Collection[int]) -> Checked:
    """Find out whether a source can be compiled. ``stops`` are the tokens that end answers."""

    def fault_of(text: str) -> str | None:
        return first_fault(LLMatcher(tokenizer, text, log_level=0, limits=LIMITS))

    text = None
    if source.startswith(call_grammars.PREFIX):
        try:
            text = call_grammars.compiled(source, lambda own: (fault := fault_of(own)) and _short(fault), stops)
        except ToolGrammarError as error:
            return Checked(None, Fault(str(error), error.param))
        if len(text) > MAX_CHARS:
            return Checked(None, Fault(f"the grammars of its tools become more than {MAX_CHARS} characters"))
    before = _resident()
    fault = fault_of(text or source)
    return Checked(text, None if fault is None else Fault(fault), max(0, _resident() - before))


def refused(fault: str) -> RequestError:
    return RequestError(f"The structured output cannot be compiled: {_short(fault)}.", param="structured_outputs")


def first_fault(matcher: LLMatcher) -> str | None:
    """Why no answer can fit the grammar, or why its masks take too long; None if nothing is wrong at its beginning."""
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
    """The work of a child process (see ``server/http/children.py``): ``check`` a grammar's source. The answer is what
    ``told`` reads. ``first`` is the vocabulary as JSON."""
    vocabulary = json.loads(first)
    tokenizer = LLTokenizer(*vocabulary)
    return lambda source: json.dumps(check(tokenizer, source.decode(), vocabulary[-1])).encode()


def told(answer: bytes) -> Checked:
    """What a child process has found out."""
    text, fault, num_bytes = json.loads(answer)
    return Checked(text, None if fault is None else Fault(*fault), num_bytes)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _long(outputs: StructuredOutputs) -> bool:
    """Whether the source will have more than ``MAX_CHARS`` for certain, at a fraction of what making it costs."""
    unseen: list[Any] = [value for _, value in outputs]
    left = MAX_CHARS
    while unseen and left >= 0:
        value = unseen.pop()
        if isinstance(value, (str, list, tuple, dict)):
            left -= len(value)
        if isinstance(value, (list, tuple, dict)) and left >= 0:
            parts = chain(value, value.values()) if isinstance(value, dict) else value
            unseen += [part for part in parts if isinstance(part, (str, list, tuple, dict))]
    return left < 0


def _source(outputs: StructuredOutputs) -> str:
    if isinstance(outputs, CallOutputs):
        return outputs.spec
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
    """The first part of an error of llguidance's, which may show the whole grammar or its own calls after it."""
    text = re.split(r"\n<(?:state|non-verbose/|backtrace)>", error)[0].strip().rstrip(".")
    return text if len(text) <= most else text[:most] + "..."
