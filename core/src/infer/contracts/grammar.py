"""The contract of grammar backends. They do structured outputs: they compile the format that an answer must have into a
grammar, and say which tokens may come next in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from infer.contracts.params import StructuredOutputs

if TYPE_CHECKING:
    import numpy as np

    Bits = np.ndarray[tuple[int], np.dtype[np.int32]]
else:
    Bits = Any

MAX_CHARS = 1 << 20
"""The most characters that a grammar's source may have."""
MASK_SECONDS = 0.025
"""The CPU time that one mask may take. Usual grammars take at most a tenth of it, with a vocabulary of 150,000."""
TOO_SLOW = f"what may come next took more than {MASK_SECONDS * 1e3:g} ms to find; give a simpler or less ambiguous one"


class Vocabulary(NamedTuple):
    """The tokens for which grammars are compiled."""

    tokenizer: Callable[[], str]
    """Makes the tokenizer as JSON, in the format of the library tokenizers: no padding, no truncation. It takes a while
    where the vocabulary is large."""
    size: int
    """How many token ids there are, those of the model and of the tokenizer."""
    eos_token_ids: Sequence[int]
    """The tokens that end answers, in order; never empty."""


class MatcherProtocol(Protocol):
    """One answer's state in its grammar. Once it has given up, no token is allowed."""

    @property
    def fault(self) -> str | None:
        """Why it has given up; None if it has not."""
        ...

    @property
    def allowed(self) -> Bits:
        """One bit per token of the vocabulary, the first in the lowest bit: whether the token may come next. ``settle``
        brings it up to date."""
        ...

    def fork(self) -> Self:
        """A copy in the same state, which goes on by itself, along draft tokens. If it gives up, that is no fault of
        the grammar."""
        ...

    def accepts(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens, from the first one on, may come next. Does not change the state."""
        ...

    def compute(self) -> None:
        """Find out which tokens may come next, for ``settle``. It runs in a thread of its own, releases the GIL for all
        but short moments, and ends by itself within seconds, since nobody may wait for it any more."""
        ...

    def settle(self) -> None:
        """Take over what ``compute`` has found, or give up if that failed."""
        ...

    def abandon(self, why: str) -> None:
        """Give up, since ``compute`` has raised, or runs on in its thread. Unless this is a fork, further requests with
        this grammar are refused."""
        ...

    def accept(self, token_id: int) -> None:
        """The answer goes on with a token."""
        ...


class GrammarProtocol(Protocol):
    """A compiled grammar. Its matchers are used in one thread; it is made in another."""

    @property
    def num_bytes(self) -> int:
        """About its size in memory."""
        ...

    @property
    def fault(self) -> str | None:
        """Why further requests with this grammar are refused; None if they are not."""
        ...

    def matcher(self) -> MatcherProtocol:
        """The state at the beginning of an answer."""
        ...


class Fault(NamedTuple):
    """Why a grammar cannot be used."""

    text: str
    param: str | None = None
    """Where the request has what is wrong, and ``text`` is a sentence. None: it is the whole grammar, and ``text``
    stands behind a colon."""


class Checked(NamedTuple):
    """What a child process has found out about a grammar's source."""

    text: str | None
    """The source in the form that ``make`` takes, if it is another one."""
    fault: Fault | None = None
    num_bytes: int = 0
    """About the grammar's size in memory."""


class GrammarBackendProtocol(Protocol):
    """Compiles grammars for one vocabulary. Several threads may call its methods at a time."""

    def source(self, outputs: StructuredOutputs) -> str:
        """All that a grammar is made of, as a text: equal formats have equal ones. It takes no longer than ``outputs``
        is long. Raises ValueError, whose text says what is wrong with ``outputs``."""
        ...

    def prepare(self) -> None:
        """Make what would delay the first request."""
        ...

    def check(self, source: str) -> Checked:
        """Find out whether a source can be compiled, and whether an answer can fit it. Strangers write sources, so this
        runs in a child process, which ends if it takes too long or too much memory."""
        ...

    def make(self, source: str, checked: Checked) -> GrammarProtocol:
        """Compile a source that has been checked and has no fault."""
        ...


class GrammarBackendFactory(Protocol):
    """Makes a backend; ``settings`` is its own table, ``[engine.NAME]``. A child process imports the factory, too: it
    is a function or a class of a module."""

    def __call__(self, vocabulary: Vocabulary, settings: Any, /) -> GrammarBackendProtocol: ...
