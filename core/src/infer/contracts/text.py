"""The contracts of text formats: how a model writes tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from infer.contracts.registration import Registration

Tools = Mapping[str, Mapping[str, Any]]
"""The functions that an answer may call, by name, with the JSON schema of their arguments."""
PieceKind = Literal["content", "reasoning", "call", "arguments"]


class Piece(NamedTuple):
    """A bit of an answer. A ``call`` begins one, ``text`` being the function's name, and ``arguments`` go on with its
    arguments, in JSON."""

    kind: PieceKind
    text: str


class PartProtocol(Protocol):
    """Reads one answer: takes its text as it comes, cut anywhere, and gives the same pieces however it is cut, as early
    as it can tell them.

    It runs in the server's event loop with every delta: it must take no longer than the text is long, and hold no more
    of it than a bounded look ahead. ``infer.text.tool_formats.reader`` has the means.
    """

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now that ``text`` has come behind what came before."""
        ...

    def flush(self) -> Iterator[Piece]:
        """What is left at the end."""
        ...


class CallForm(NamedTuple):
    """One way to write a call of a function with one argument, ``input``, so that a grammar can say what the input is.
    Regular expressions are Rust's, as they stand between slashes, and ``NAME`` is the function's name in them."""

    header: str
    """A regular expression for all of a call up to ``before``. If it begins with ``^``, the call stands at the
    beginning of the answer."""
    named: str
    """A regular expression for every other text by which the format's reader may take ``NAME`` to be called, or a part
    of it, and for all that follows it: no text of an answer ends so but in a ``header``. It may begin with ``^``, or
    with one of ``marks``, and hold no other mark."""
    before: str
    """A regular expression for what stands between the header and the input."""
    after: str
    """A regular expression for what stands behind the input."""
    closing: str | None
    """What the input does not hold, and ``after`` begins with, or with a line break and it. None: the input stands in a
    JSON string."""
    marks: tuple[str, ...] = ()
    """The parts of these regular expressions that are texts and no expressions, outside of all groups. A text that is
    an added token of the tokenizer has to come as that token."""
    following: tuple[str, ...] = ()
    """The marks of which one must follow a call, unless the answer ends; empty if anything may."""
    hidden: tuple[str, ...] = ()
    """Special tokens, left out of an answer's text, that may stand where no text follows."""


class CallSyntax(NamedTuple):
    """One way to write nothing but calls of any functions, so that a grammar can say which texts are calls: sections,
    with white space between them, of calls. Regular expressions are Rust's, ``NAME`` is a function's name in them, and
    ``KEY`` that of an argument. The format's reader must read every such text as its calls alone."""

    header: str
    """A regular expression for all of a call up to its arguments. Empty: the call is a JSON object of ``name`` and
    ``arguments`` or ``parameters``."""
    end: str = ""
    """A regular expression for what stands behind the arguments."""
    arguments: tuple[tuple[str, str], ...] = ()
    """The ways to write an argument: regular expressions for what stands before and after its text. If nothing stands
    after it, it is JSON. No ways: the arguments are a JSON object."""
    comma: str = ""
    """A regular expression for what stands between arguments."""
    opening: str = ""
    """A regular expression for how a section begins."""
    between: str = ""
    """A regular expression for what stands between a section's calls. Empty: white space."""
    closing: str = ""
    """A regular expression for how a section ends."""
    marks: tuple[str, ...] = ()
    """The parts of these regular expressions that are texts and no expressions, as in ``CallForm``."""


class ReasoningTags(NamedTuple):
    """What stands between these at the beginning of an answer is reasoning. A prompt that ends in the opening one
    leaves the model within it."""

    opening: str
    closing: str
    reader: Callable[[Tools], PartProtocol] | None = None
    """Reads a whole answer that may call these tools, if tags alone do not tell its parts."""
    forms: tuple[CallForm, ...] = ()
    """The ways to write a call that ``reader`` knows, as far as the model may be held to a grammar in it."""


class ToolFormatFactory(Protocol):
    """Called for each answer that may call functions. What looks like a call of any other function than ``tools`` is
    content."""

    def __call__(self, tools: Tools, settings: Any, /) -> PartProtocol: ...


class ReasoningFactory(Protocol):
    """Makes the tags of one way to write reasoning; ``settings`` is its own table, ``[model.NAME]``."""

    def __call__(self, settings: Any, /) -> ReasoningTags: ...


@dataclass(frozen=True)
class ToolFormatRegistration(Registration[ToolFormatFactory]):
    """A way in which a model family writes tool calls. ``auto`` tries formats in order of ``priority``: formats whose
    calls begin with a mark come before those without."""

    marks: tuple[str, ...] = ()
    """The complete tokens that mark calls, such as ``[TOOL_CALLS]``. If the tokenizer has them as special tokens, they
    are kept in an answer's text, which otherwise leaves special tokens out."""
    forms: tuple[CallForm, ...] = ()
    """The ways to write a call, as far as the model may be held to a grammar in it; none if it cannot be."""
    syntax: tuple[CallSyntax, ...] = ()
    """The ways to write an answer that consists of calls; none if no grammar says so."""
    unless: tuple[str, ...] = ()
    """Tokens of checkpoints that write calls in other ways, too, for which ``forms`` do not hold."""
