"""POST /v1/responses: reasoning and text, whole or streamed as typed events. Nothing is stored."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from aiohttp import web
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from infer.contracts.params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from infer.contracts.request import Event, FinishReason
from infer.contracts.server import Route
from infer.contracts.text import PartProtocol, Piece
from infer.server.events import Events, Json
from infer.server.http.body import Body, Many
from infer.server.http.errors import REQUEST_ID
from infer.server.http.streams import Array
from infer.server.http.wire import NamedEvents
from infer.server.input_items import Input, conversation
from infer.server.messages import Message, turns
from infer.server.sampling import Metadata, check_schema_and_type, format_outputs
from infer.server.shapes import CachedTokens, ChosenLogprob, ReasoningTokens
from infer.server.thoughts import Thoughts
from infer.server.tokens import Tokens

if TYPE_CHECKING:
    from infer.server.service import Service
    from infer_agents.seal import Seal


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        check_schema_and_type(self.type, "schema", self.schema_)
        return self

    def outputs(self) -> StructuredOutputs | None:
        return format_outputs(self.type, self.schema_)


class TextOptions(Body):
    format: TextFormat = TextFormat()
    verbosity: None = None


class NoObfuscation(Body):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Body):
    """The body of POST /v1/responses. Nothing is stored: ``input`` has to contain the whole conversation."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "structured_outputs": "text.format",
    }
    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "input"}
    add_generation_prompt: ClassVar = True
    continue_final_message: ClassVar = False

    model: str | None = Field(None, description="The served model's name, or nothing.")
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    stop: str | Many[str] = Field((), description="Texts that end the answer, which does not include them.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextOptions = TextOptions()
    stream: bool = False
    stream_options: NoObfuscation | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    include: Many[Literal["message.output_text.logprobs"]] | None = None
    metadata: Metadata | None = Field(None, description="Returned with the response.")
    parallel_tool_calls: bool | None = None
    tools: tuple[()] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )

    @functools.cached_property
    def turns(self) -> bytes:
        begin = () if self.instructions is None else (Message(role="system", content=self.instructions),)
        return turns((*begin, *conversation(self.input)))

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs or self.include)

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Of temperature, top_p and top_k, their ``model_fields_set`` has what was set
        explicitly."""
        names = ("temperature", "top_p", "top_k", "stop")
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            seed=self.seed,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured_outputs=self.text.format.outputs(),
            **given,
        )


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ReasoningText]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """One of OpenAI's ``response.*`` events. Its other fields depend on its type."""

    type: str
    sequence_number: int


def routes(service: Service, seal: Seal) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/responses",
            Responses(service).handle,
            "OpenAI's responses: reasoning and text, and nothing is stored.",
            Response,
            ResponsesRequest,
            ResponseEvent,
            wire_format=NamedEvents(),
        )
    ]


class Responses:
    """The handler of POST /v1/responses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, ResponsesRequest)
        reply = await self._service.conversation.reply(body, body.sampling)
        requests = await self._service.replies(http, reply, body, prefix="resp")
        tokens = self._service.tokens if body.wants_logprobs else None
        thoughts = reply.thoughts(self._service.tokens)
        output = _Output(self._response(http, body, reply.params), reply.parser(), thoughts, tokens)
        frames = functools.partial(_frames, output)
        if body.stream:
            return await self._service.stream(http, requests, frames)
        ended = await self._service.last(http, requests, frames)
        return await self._service.answer(http, ended["response"])

    def _response(self, http: web.Request, body: ResponsesRequest, params: SamplingParams) -> Json:
        return {
            "id": f"resp_{http[REQUEST_ID]}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.served.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


async def _frames(output: _Output, events: Events, usage: Callable[[], Json]) -> AsyncGenerator[Json]:
    for frame in output.begin():
        yield frame
    reason: FinishReason | None = None
    async for _, news in events:
        reason = news.finish_reason
        for frame in output.push(news):
            yield frame
    for frame in output.end(reason, usage()):
        yield frame


class _Output:
    """Builds an answer's output items as it arrives, and makes the stream's events. ``tokens`` encodes
    log-probabilities, if these are wanted."""

    def __init__(self, response: Json, parser: PartProtocol, thoughts: Thoughts | None, tokens: Tokens | None) -> None:
        self._response = response
        self._parser = parser
        self._thoughts = thoughts
        self._tokens = tokens
        self._number = 0
        self._done: list[Json] = []
        self._item: Json | None = None
        self._text = ""
        self._logprobs: list[bytes] = []
        self._unsent: list[bytes] = []
        """The log-probabilities of tokens that no delta has carried yet."""

    def begin(self) -> Iterator[Json]:
        yield self._event("created", response=self._response)
        yield self._event("in_progress", response=self._response)

    def push(self, news: Event) -> Iterator[Json]:
        thought = [self._thoughts is not None and self._thoughts.push(id) for id in news.token_ids]
        if self._tokens is not None:
            entries = zip(news.logprobs, thought, strict=True)
            self._unsent += [self._tokens.ranked(entry) for entry, hidden in entries if not hidden]
        yield from self._emit(self._parser.push(news.text))

    def end(self, reason: FinishReason | None, usage: Json) -> Iterator[Json]:
        yield from self._emit(self._parser.flush())
        whole = reason == "stop"
        status = "completed" if whole else "incomplete"
        if self._unsent or (self._item is None and not self._done):
            yield from self._emit([Piece("content", "")])
        yield from self._close(status)
        self._response = self._response | {
            "status": status,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": self._done,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._thoughts.count if self._thoughts else 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(status, response=self._response)

    def _event(self, type: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{type}", "sequence_number": self._number - 1, **fields}

    @property
    def _place(self) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._done), "content_index": 0}

    def _emit(self, pieces: Sequence[Piece] | Iterator[Piece]) -> Iterator[Json]:
        for kind, text in pieces:
            type = "reasoning" if kind == "reasoning" else "message"
            if self._item is not None and self._item["type"] != type:
                yield from self._close("completed")
            if self._item is None:
                yield from self._open(type)
            self._text += text
            if type == "reasoning":
                yield self._event("reasoning_text.delta", **self._place, delta=text)
                continue
            entries, self._unsent = self._unsent, []
            self._logprobs += entries
            if text or entries:
                yield self._event("output_text.delta", **self._place, delta=text, logprobs=Array(entries))

    def _open(self, type: str) -> Iterator[Json]:
        short = "rs" if type == "reasoning" else "msg"
        index = f"_{len(self._done)}" if any(item["type"] == type for item in self._done) else ""
        self._item = {
            "id": str(self._response["id"]).replace("resp", short, 1) + index,
            "type": type,
            **({"summary": []} if type == "reasoning" else {"role": "assistant"}),
            "status": "in_progress",
            "content": [],
        }
        self._text, self._logprobs = "", []
        yield self._event("output_item.added", output_index=len(self._done), item=self._item)
        yield self._event("content_part.added", **self._place, part=self._part())

    def _close(self, status: str) -> Iterator[Json]:
        if self._item is None:
            return
        if self._item["type"] == "reasoning":
            yield self._event("reasoning_text.done", **self._place, text=self._text)
        else:
            yield self._event("output_text.done", **self._place, text=self._text, logprobs=Array(self._logprobs))
        yield self._event("content_part.done", **self._place, part=self._part())
        item = self._item | {"status": status, "content": [self._part()]}
        yield self._event("output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._item = None

    def _part(self) -> Json:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": Array(self._logprobs)}
