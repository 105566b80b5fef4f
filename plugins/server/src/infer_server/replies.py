"""The reply to a conversation: the prompt that asks for it, how it is drawn, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from infer.contracts.params import CallOutputs, SamplingParams, StructuredOutputs, ToolGrammar
from infer.contracts.request import ThinkingTokens
from infer.contracts.text import PartProtocol, ReasoningTags
from infer.text.tool_formats import ToolFormat
from infer_server.calling import Whole, calls_schema, make_parser
from infer_server.thoughts import Thoughts
from infer_server.tokens import Tokens

Function = dict[str, Any]
"""A tool as chat templates take it: ``{"type": "function", "function": {...}}``."""


@dataclass(frozen=True)
class ToolUse:
    """The tools that a reply may call."""

    offered: Sequence[Function] = ()
    """Those that the model is shown."""
    forced: Sequence[Function] | None = None
    """Those of which the reply must call one; None requires no call."""
    parallel: bool = True
    """Whether the reply may hold more than one call."""
    custom: Collection[str] = ()
    """The names of those that take a text."""
    grammars: Mapping[str, ToolGrammar] = field(default_factory=dict)
    """The grammars of the texts that some of those take, by their names."""
    format: StructuredOutputs | None = None
    """The format of the reply that the body asks for, which comes before these grammars."""

    @property
    def whole(self) -> ToolGrammar | None:
        """The grammar of the whole reply, if that is the text which the one ``forced`` tool takes."""
        if self.forced is None or len(self.forced) != 1:
            return None
        return self.grammars.get(self.forced[0]["function"]["name"])

    @property
    def held(self) -> tuple[ToolGrammar, ...]:
        """The grammars of those that the reply may call."""
        may = self.offered if self.forced is None else self.forced
        names = [tool["function"]["name"] for tool in may]
        return tuple(self.grammars[name] for name in names if name in self.grammars)

    @property
    def either(self) -> bool:
        """Whether the reply is calls alone, or JSON of some schema."""
        json = self.format is not None and (self.format.json_object or self.format.json_schema is not None)
        return bool(json and self.offered and self.forced is None)

    @property
    def functions(self) -> tuple[tuple[str, Any], ...]:
        """The names of those that the reply may call, with the schemas of their arguments."""
        may = self.offered if self.forced is None else self.forced
        named = [(tool["function"]["name"], tool["function"].get("parameters")) for tool in may]
        return tuple((name, about or {"type": "object"}) for name, about in named)

    def outputs(self) -> StructuredOutputs | None:
        """The format of a reply that must call a tool."""
        if self.forced is None:
            return None
        if self.whole is not None:
            return CallOutputs(kind="whole", tools=(self.whole,))
        if self.held:
            functions = tuple(each for each in self.functions if each[0] not in self.grammars)
            return CallOutputs(kind="listed", tools=self.held, functions=functions, single=not self.parallel)
        return StructuredOutputs(json_schema=calls_schema(self.forced, None if self.parallel else 1))


class ReplyOptions(TypedDict):
    """Those arguments of ``Service.requests`` that a reply determines."""

    special: bool
    grammar_after: tuple[int, ...]
    thinking: ThinkingTokens | None
    forks: Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True)
class Reply:
    """What ``Conversation.reply`` has found out."""

    prompt: str
    params: SamplingParams
    tools: ToolUse
    tool_format: ToolFormat | None
    tags: ReasoningTags | None
    """What encloses the reply's reasoning, if it may contain any."""
    thinking: bool
    """Whether the prompt opens the reasoning."""
    grammar_after: tuple[int, ...]
    """The tokens after which the reply's format applies, if the prompt opens the reasoning and they are known."""
    thinking_tokens: ThinkingTokens | None = None
    """The tokens around the reasoning, if they are known."""
    opening: tuple[int, ...] = ()
    """The tokens with which an assistant's message begins, if they are known."""
    steps: int = 0
    """How many of the assistant's messages follow the last one of the user's."""

    @property
    def options(self) -> ReplyOptions:
        """What a request for this reply says besides its prompt and its parameters."""
        return {
            "special": False,
            "grammar_after": self.grammar_after,
            "thinking": self.thinking_tokens,
            "forks": self.forks,
        }

    def forks(self, ids: Sequence[int]) -> tuple[int, ...]:
        """``Request.forks`` of a prompt's tokens. Templates drop reasoning before the user's last message, or before
        the assistant's last one. In a later prompt, these are others: it leaves this one where the assistant's first
        message after the former begins, or the latter."""
        if not self.opening:
            return ()
        first, length, found = self.opening[0], len(self.opening), []
        for i in range(len(ids) - length, -1, -1):  # from the one that the prompt asks for
            if ids[i] == first and tuple(ids[i : i + length]) == self.opening:
                found.append(i + length)
                if len(found) > max(self.steps, 1):
                    return tuple({found[self.steps]: None, found[1]: None} if self.steps else [found[1]])
        return ()

    def parser(self) -> PartProtocol:
        """A parser of one answer's text."""
        if self.tools.whole is not None:
            part = make_parser({}, None, tags=self.tags, thinking=self.thinking, exact=True)
            return Whole(part, self.tools.whole.name)
        known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools.offered}
        return make_parser(
            known,
            self.tool_format,
            parallel=self.tools.parallel,
            forced=self.tools.forced is not None,
            alone=self.tools.either,
            tags=self.tags,
            thinking=self.thinking,
            custom=self.tools.custom,
            held=self.tools.grammars,
        )

    def thoughts(self, tokens: Tokens) -> Thoughts | None:
        """What tells which of one answer's tokens are reasoning; None if none are."""
        return None if self.tags is None else Thoughts(tokens, self.tags, self.thinking)
