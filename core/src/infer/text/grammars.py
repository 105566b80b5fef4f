"""The grammars of structured outputs, which a backend compiles: those that are kept, and why others are refused."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

from pydantic import BaseModel
from tokenizers import Tokenizer

from infer.contracts.grammar import (
    MAX_CHARS,
    Checked,
    Fault,
    GrammarBackendFactory,
    GrammarBackendProtocol,
    GrammarProtocol,
    Vocabulary,
)
from infer.contracts.params import CallOutputs, StructuredOutputs
from infer.errors import RequestError

KEPT, KEPT_BYTES = 128, 1 << 30
"""How many compiled grammars are kept, and how many bytes they may take together."""
MOST_FAULT = 500
"""How many characters of what is wrong with a grammar are said."""
PARAM = "structured_outputs"


class Grammars:
    """Compiles grammars, and keeps them with the reasons of those it refused. Thread-safe. Without a ``backend`` it
    refuses all, with the sentence ``lacking``; with one, ``first`` makes the first message of a ``worker``."""

    def __init__(
        self, backend: GrammarBackendProtocol | None, first: Callable[[], bytes] = bytes, *, lacking: str = ""
    ) -> None:
        self._backend, self.first, self._lacking = backend, first, lacking
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, GrammarProtocol | Fault] = OrderedDict()
        """Per source the compiled grammar, or the reason why it cannot be compiled; the least recently used first."""

    def compile(self, outputs: StructuredOutputs) -> GrammarProtocol:
        """Compile ``outputs``, which may take very long. Raises RequestError if they are invalid, or if the backend
        does not support them."""
        source = self.source(outputs)
        return self.known(source) or self.make(source, self._made.check(source))

    def source(self, outputs: StructuredOutputs) -> str:
        """The grammar's source, as the backend writes it. Raises RequestError."""
        if self._backend is None:
            raise RequestError(self._lacking, param=PARAM)
        try:
            source = "" if _long(outputs) else self._backend.source(outputs)
        except ValueError as error:
            raise refused(str(error)) from None
        if not source or len(source) > MAX_CHARS:
            raise refused(f"it has more than {MAX_CHARS} characters")
        return source

    def known(self, source: str) -> GrammarProtocol | None:
        """The grammar that is kept; None if the source is new. Raises RequestError if it was refused before."""
        with self._lock:
            kept = self._kept.get(source)
            if kept is None:
                return None
            self._kept.move_to_end(source)
        if isinstance(kept, Fault):
            raise error_of(kept)
        if kept.fault is not None:
            raise refused(kept.fault)
        return kept

    def make(self, source: str, checked: Checked) -> GrammarProtocol:
        """Compile and keep a grammar that was ``checked``. Raises RequestError."""
        if checked.fault is not None:
            raise self.refuse(source, checked.fault)
        grammar = self._made.make(source, checked)
        self._keep(source, grammar)
        return grammar

    def refuse(self, source: str, fault: Fault) -> RequestError:
        """Keep the reason why ``source`` cannot be compiled, and return the error to raise."""
        self._keep(source, fault)
        return error_of(fault)

    def prepare(self) -> None:
        """Make what would delay the first request."""
        if self._backend is not None:
            self._backend.prepare()

    @property
    def _made(self) -> GrammarBackendProtocol:
        assert self._backend is not None
        return self._backend

    def _keep(self, source: str, result: GrammarProtocol | Fault) -> None:
        with self._lock:
            self._kept[source] = result
            sizes = [0 if isinstance(kept, Fault) else kept.num_bytes for kept in self._kept.values()]
            while len(sizes) > KEPT or (sum(sizes) > KEPT_BYTES and len(sizes) > 1):
                self._kept.popitem(last=False)
                del sizes[0]


def refused(fault: str) -> RequestError:
    return RequestError(f"The structured output cannot be compiled: {_short(fault)}.", param=PARAM)


def error_of(fault: Fault) -> RequestError:
    """What a client is told."""
    return refused(fault.text) if fault.param is None else RequestError(f"{_short(fault.text)}.", param=fault.param)


def vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    """What grammars are compiled for."""

    @cache
    def to_json() -> str:
        plain = tokenizer
        if plain.padding is not None or plain.truncation is not None:
            plain = Tokenizer.from_str(plain.to_str())
            plain.no_padding()
            plain.no_truncation()
        return plain.to_str()

    return Vocabulary(to_json, max(vocab_size, tokenizer.get_vocab_size()), sorted(eos_token_ids))


def order(factory: GrammarBackendFactory, settings: BaseModel, vocabulary: Vocabulary) -> Callable[[], bytes]:
    """What makes the first message of a ``worker``, of which that makes its backend. Raises TypeError if another
    process cannot import the ``factory``."""
    if (made_by := _named(factory)) is None:
        raise TypeError("its factory is no function or class of a module, which a child process could import")
    kind = next(named for each in type(settings).__mro__ if (named := _named(each)))

    def first() -> bytes:
        tokens = [vocabulary.tokenizer(), vocabulary.size, [*vocabulary.eos_token_ids]]
        given = {"factory": made_by, "settings": [kind, settings.model_dump(mode="json")], "vocabulary": tokens}
        return json.dumps(given).encode()

    return first


def worker(first: bytes) -> Callable[[bytes], bytes]:
    """The work of a child process (see ``server/http/children.py``): to check a grammar's source. The answer is what
    ``told`` reads; ``first`` is an ``order``."""
    given = json.loads(first)
    (kind, values), (tokenizer, size, eos_token_ids) = given["settings"], given["vocabulary"]
    made: GrammarBackendProtocol = _imported(given["factory"])(
        Vocabulary(lambda: tokenizer, size, eos_token_ids), _imported(kind).model_validate(values)
    )
    made.prepare()
    return lambda source: json.dumps(made.check(source.decode())).encode()


def told(answer: bytes) -> Checked:
    """What a child process has found out."""
    text, fault, num_bytes = json.loads(answer)
    return Checked(text, None if fault is None else Fault(*fault), num_bytes)


def _named(what: Any) -> list[str] | None:
    """The module and the name of a function or a class; None if another process cannot import it."""
    module, name = getattr(what, "__module__", ""), getattr(what, "__qualname__", "")
    there = getattr(sys.modules.get(module), name, None) is what and module != "__main__"
    return [module, name] if there else None


def _imported(named: list[str]) -> Any:
    module, name = named
    return getattr(importlib.import_module(module), name)


def _long(outputs: StructuredOutputs) -> bool:
    """Whether the source will have more than ``MAX_CHARS`` for certain, at a fraction of what making it costs."""
    unseen: list[Any] = [value for _, value in outputs]
    if isinstance(outputs, CallOutputs):
        unseen += [value for _, value in outputs.answer or ()]
    left = MAX_CHARS
    while unseen and left >= 0:
        value = unseen.pop()
        if isinstance(value, (str, list, tuple, dict)):
            left -= len(value)
        if isinstance(value, (list, tuple, dict)) and left >= 0:
            parts = chain(value, value.values()) if isinstance(value, dict) else value
            unseen += [part for part in parts if isinstance(part, (str, list, tuple, dict))]
    return left < 0


def _short(fault: str) -> str:
    text = fault.strip().rstrip(".")
    return text if len(text) <= MOST_FAULT else text[:MOST_FAULT] + "..."
