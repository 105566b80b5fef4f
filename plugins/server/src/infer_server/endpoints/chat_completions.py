"""POST /v1/chat/completions, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NotRequired, Self

from aiohttp import web
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from infer.contracts.params import MAX_LOGPROBS, SamplingParams, ToolGrammar
from infer.contracts.request import Event, FinishReason, Request, TokenLogprobs
from infer.contracts.server import Route
from infer_server.calling import Calls
from infer_server.events import Events, Json
from infer_server.http.access import CALLER
from infer_server.http.body import Many
from infer_server.http.errors import REQUEST_ID
from infer_server.http.parsing import checked
from infer_server.http.streams import Array
from infer_server.messages import Messages, turns
from infer_server.replies import Reply, ToolUse
from infer_server.sampling import Metadata, SamplingBody, StreamOptions
from infer_server.shapes import ChosenLogprob, Finish, PromptLogprobs, Usage
from infer_server.thoughts import Thoughts
from infer_server.tools import (
    MAX_TOOLS,
    Allowed,
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedCustom,
    NamedFunction,
    Tool,
)

if TYPE_CHECKING:
    from infer.llm import Completion
    from infer_server.service import Service


class ChatRequest(SamplingBody):
    """The body of POST /v1/chat/completions."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages"}
    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "messages"}

    messages: Messages = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="The most tokens to generate; null: as many as fit.")
    max_completion_tokens: int | None = Field(None, ge=1, description="As max_tokens.")
    logprobs: bool = Field(False, description="Report each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Also report the log-probabilities of so many likeliest tokens."
    )
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | NamedCustom | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool = Field(True, description="false: at most one call.")
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Continue the last message instead of a new one.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    echo: Literal[False] | None = None
    store: Literal[False] | None = None
    metadata: Metadata | None = Field(None, description="Returned with the answer.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="For chat templates that know reasoning_effort, or enable_thinking (all but none); otherwise a "
        "bound on the reasoning, as model.effort_budgets has it.",
    )
    modalities: Many[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = Field(None, description="Ignored: there is one tier.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        names = {tool.name for tool in self.tools or ()}
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice asks for a tool, but tools is empty")
        if unknown := next((name for name in self._chosen or () if name not in names), None):
            raise ValueError(f"tool_choice names {unknown!r}, which is not among tools")
        if self._forced and self.outputs() is not None:
            raise ValueError(
                "a forced tool_choice cannot be combined with another format for the answer; leave one out"
            )
        return self

    @functools.cached_property
    def turns(self) -> bytes:
        return turns(self.messages)

    @property
    def _chosen(self) -> set[str] | None:
        """The names of the tools that ``tool_choice`` names, if it names any."""
        match self.tool_choice:
            case NamedFunction() | NamedCustom():
                return {self.tool_choice.name}
            case AllowedTools():
                return {tool.name for tool in self.tool_choice.allowed_tools.tools}
        return None

    @property
    def _possible_tools(self) -> tuple[FunctionTool | CustomTool, ...]:
        """The tools that ``tool_choice`` names, or all if it names none."""
        chosen = self._chosen
        return tuple(tool for tool in self.tools or () if chosen is None or tool.name in chosen)

    @property
    def _offered(self) -> tuple[FunctionTool | CustomTool, ...]:
        """The tools that the model is shown."""
        if self.tool_choice == "none":
            return ()
        if isinstance(self.tool_choice, AllowedTools):
            return self._possible_tools
        return self.tools or ()

    @property
    def _forced(self) -> bool:
        """Whether the answer has to call a tool."""
        match self.tool_choice:
            case None | "none" | "auto" | AllowedTools(allowed_tools=Allowed(mode="auto")):
                return False
        return True

    def tool_use(self) -> ToolUse:
        named = isinstance(self.tool_choice, NamedFunction | NamedCustom)
        return ToolUse(
            [tool.shown() for tool in self._offered],
            [tool.shown() for tool in self._possible_tools] if self._forced else None,
            self.parallel_tool_calls and not named,
            {tool.name for tool in self.tools or () if isinstance(tool, CustomTool)},
            self._grammars,
            checked(self.outputs, ChatRequest),
        )

    @property
    def _grammars(self) -> dict[str, ToolGrammar]:
        return {
            tool.name: tool.grammar.of(tool.name, f"tools[{i}].custom.format.grammar")
            for i, tool in enumerate(self.tools or ())
            if isinstance(tool, CustomTool) and tool.grammar is not None
        }

    def client_name(self, param: str) -> str:
        if param == "structured_outputs" and (self._forced or (self._grammars and self.outputs() is None)):
            return "tools"
        return (
            "max_completion_tokens" if param == "max_tokens" and self.max_tokens is None else super().client_name(param)
        )

    def sampling(self, **overrides: Any) -> SamplingParams:
        tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        count = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling(**{"max_tokens": tokens, "logprobs": count} | overrides)


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class Function(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class Custom(TypedDict):
    name: str
    input: str


class CustomToolCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: Custom


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall | CustomToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: NotRequired[dict[str, str]]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[int | str | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    metadata: NotRequired[dict[str, str]]
    """In the first chunk."""


def routes(service: Service, settings: object) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            Chat(service).handle,
            "Go on with a conversation.",
            ChatCompletion,
            ChatRequest,
            ChatChunk,
        )
    ]


class Chat:
    """The handler of POST /v1/chat/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, ChatRequest, place=True)
        reply = await self._service.conversation.reply(body, body.sampling, body.tool_use())
        requests = await self._service.requests(
            http, [reply.prompt], reply.params, body, n=body.n, prefix="chatcmpl", **reply.options
        )
        counted = [reply.thoughts(self._service.tokens) for _ in requests]
        thoughts = [each for each in counted if each is not None]
        id = f"chatcmpl-{http[REQUEST_ID]}"
        metadata = {} if body.metadata is None else {"metadata": body.metadata}
        if body.stream:
            frame = self._service.frame(http, id, "chat.completion.chunk")
            response = await self._service.stream(
                http, requests, functools.partial(self._frames, frame, body, reply, requests, thoughts)
            )
            http[CALLER].usage = _detailed(http[CALLER].usage or {}, thoughts)
            return response
        answers, usage = await self._service.whole(http, requests)
        for thought, answer in zip(thoughts, answers, strict=False):
            await self._service.writer.each(thought.push, answer.token_ids, len(answer.token_ids))
        http[CALLER].usage = usage = _detailed(usage, thoughts)
        choices = [await self._choice(i, body, reply, answer) for i, answer in enumerate(answers)]
        frame = self._service.frame(http, id, "chat.completion") | metadata
        return await self._service.answer(http, frame | {"choices": choices, "usage": usage})

    async def _choice(self, index: int, body: ChatRequest, reply: Reply, answer: Completion) -> Json:
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        calls: list[Json] = []
        parser, numbering = reply.parser(), Calls(reply.tools.custom)
        for piece in [*parser.push(answer.text), *parser.flush()]:
            delta = numbering.delta(piece)
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                elif "custom" in call:
                    calls[-1]["custom"]["input"] += call["custom"]["input"]
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        choice = {
            "index": index,
            "message": message,
            "logprobs": await self.logprobs(answer.logprobs or ()) if body.logprobs else None,
            "finish_reason": _reason(answer.finish_reason, calls),
            "stop_reason": answer.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await self._service.prompt_logprobs(answer)
        return choice

    async def _frames(
        self,
        frame: Json,
        body: ChatRequest,
        reply: Reply,
        requests: Sequence[Request],
        thoughts: Sequence[Thoughts],
        events: Events,
        usage: Callable[[], Json],
    ) -> AsyncGenerator[Json]:
        options = body.stream_options or StreamOptions()
        if options.include_usage:
            frame = frame | {"usage": None}

        def so_far() -> Json:
            return {"usage": _detailed(usage(), thoughts)} if options.continuous_usage_stats else {}

        choices = [_Streamed(reply) for _ in requests]
        for i in range(len(requests)):
            metadata = {"metadata": body.metadata} if body.metadata is not None and i == 0 else {}
            yield frame | metadata | {"choices": [_delta(i, {"role": "assistant"})]} | so_far()
        async for i, event in events:
            for token in event.token_ids if thoughts else ():
                thoughts[i].push(token)
            made = [_delta(i, delta) for delta in choices[i].deltas(event)]
            if event.logprobs:
                made[0]["logprobs"] = await self.logprobs(event.logprobs)
            if event.prompt_logprobs is not None:
                made[0]["prompt_logprobs"] = await self._service.prompt_logprobs(event)
            if event.finish_reason is not None:
                made[-1]["finish_reason"] = _reason(event.finish_reason, choices[i].calls)
                made[-1]["stop_reason"] = event.stop_reason
            for choice in made:
                yield frame | {"choices": [choice]} | so_far()
        if options.include_usage:
            yield frame | {"choices": [], "usage": _detailed(usage(), thoughts)}

    async def logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        made = await self._service.writer.each(self._service.tokens.ranked, entries, len(entries))
        return {"content": Array(made), "refusal": None}


class _Streamed:
    """Makes the deltas of one choice from its answer as it arrives."""

    def __init__(self, reply: Reply) -> None:
        self._parser = reply.parser()
        self._calls = Calls(reply.tools.custom)
        self._spoken = False

    @property
    def calls(self) -> int:
        """How many calls there have been."""
        return self._calls.count

    def deltas(self, event: Event) -> list[Json]:
        """What an event adds: at least one delta if the event has more to say than text, or is the last one."""
        pieces = [*self._parser.push(event.text), *(self._parser.flush() if event.finish_reason is not None else ())]
        deltas = [self._calls.delta(piece) for piece in pieces]
        if not deltas and (event.logprobs or event.finish_reason or event.prompt_logprobs is not None):
            deltas = [{}]
        self._spoken |= any("content" in delta for delta in deltas)
        if event.finish_reason is not None and not (self._spoken or self.calls):
            deltas[-1]["content"] = ""  # null would say that it has called a tool
        return deltas


def _detailed(usage: Json, thoughts: Sequence[Thoughts]) -> Json:
    """The usage, with the number of tokens that were reasoning, its tags included."""
    return usage | {"completion_tokens_details": {"reasoning_tokens": sum(thought.count for thought in thoughts)}}


def _reason(reason: FinishReason | None, calls: object) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _delta(index: int, delta: Json) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
