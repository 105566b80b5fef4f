"""POST /v1/responses: reasoning, text and calls, whole or streamed as typed events. Nothing is stored."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from infer.contracts.params import SamplingParams
from infer.contracts.request import FinishReason
from infer.contracts.server import Route
from infer.errors import RequestError
from infer.server.events import Events, Json
from infer.server.http.errors import REQUEST_ID, error_of
from infer.server.http.wire import NamedEvents
from infer.server.replies import Reply
from infer.server.shapes import CachedTokens, ChosenLogprob, ReasoningTokens
from infer.text.encoding import TooLongError
from infer_agents.messages import MAX_COUNTED
from infer_agents.output import Output
from infer_agents.response_bodies import ResponsesRequest
from infer_agents.response_tools import CloudTool

if TYPE_CHECKING:
    from infer.server.service import Service
    from infer_agents.seal import Seal

log = logging.getLogger(__name__)

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[SummaryText]
    status: Status
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    namespace: NotRequired[str]
    name: str
    arguments: str


class OutputCustomCall(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    namespace: NotRequired[str]
    name: str
    input: str


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: str
    message: str


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
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


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


def routes(service: Service, seal: Seal) -> list[Route]:
    own = Responses(service, seal)
    return [
        Route(
            "POST",
            "/v1/responses",
            own.handle,
            "OpenAI's responses: reasoning, text and calls of tools, and nothing is stored.",
            Response,
            ResponsesRequest,
            ResponseEvent,
            wire_format=NamedEvents(),
        ),
        Route(
            "POST",
            "/v1/responses/input_tokens",
            own.count,
            "How many tokens the input of a response takes.",
            InputTokens,
            ResponsesRequest,
        ),
    ]


class Responses:
    """The handlers of POST /v1/responses and /v1/responses/input_tokens."""

    def __init__(self, service: Service, seal: Seal) -> None:
        self._service = service
        self._seal = seal
        self._logged: set[str] = set()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body, reply = await self._reply(http)
        requests = await self._service.replies(http, reply, body, prefix="resp")
        output = Output(
            self._response(http, body, reply.params),
            reply.parser(),
            {offer.name: offer for offer in body.offers},
            reply.thoughts(self._service.tokens),
            self._service.tokens if body.wants_logprobs else None,
            encrypt=self._seal.seal if body.wants_encrypted else None,
            summary=body.wants_summary,
        )
        frames = functools.partial(_frames, http, output)
        if body.stream:
            return await self._service.stream(http, requests, frames)
        ended = await self._service.last(http, requests, frames)
        return await self._service.answer(http, ended["response"])

    async def count(self, http: web.Request) -> web.StreamResponse:
        _, reply = await self._reply(http)
        served = self._service.served
        most = max(served.max_seq_len, MAX_COUNTED)
        try:
            count = await self._service.tokenize(
                [reply.prompt], lambda: len(served.encoder(reply.prompt, special=False, most=most))
            )
        except TooLongError as error:
            raise RequestError(
                f"The input has {error.count} tokens; at most {most} are counted.", param="input"
            ) from None
        return await self._service.answer(http, {"object": "response.input_tokens", "input_tokens": count})

    async def _reply(self, http: web.Request) -> tuple[ResponsesRequest, Reply]:
        """The body, and the reply that it asks for. Raises RequestError."""
        body = await self._service.read(http, ResponsesRequest)
        for kind in sorted(body.cloud_kinds - self._logged):
            self._logged.add(kind)
            log.info("the model is not shown tools of the type %s, because only a cloud has them", kind)
        for path, sealed in body.sealed:
            try:
                self._seal.opened(sealed)
            except ValueError as error:
                raise RequestError(f"{path} cannot be taken: {error}.", param=path) from None
        reply, use = self._service.conversation.reply, body.tool_use()
        try:
            return body, await reply(body, body.sampling, use)
        except RequestError as error:
            if error.param != "messages" or (other := body.gathered()) is None:
                raise
            try:  # agents send several instructions, and many templates know one
                return body, await reply(other, body.sampling, use)
            except RequestError:
                raise error from None

    def _response(self, http: web.Request, body: ResponsesRequest, params: SamplingParams) -> Json:
        choice = body.tool_choice or "auto"
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
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [
                tool.model_dump(exclude_none=True) for tool in body.tools or () if not isinstance(tool, CloudTool)
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


async def _frames(http: web.Request, output: Output, events: Events, usage: Callable[[], Json]) -> AsyncGenerator[Json]:
    for frame in output.begin():
        yield frame
    reason: FinishReason | None = None
    try:
        async for _, news in events:
            reason = news.finish_reason
            for frame in output.push(news):
                yield frame
        for frame in output.end(reason, usage()):
            yield frame
    except Exception as error:
        yield output.failed(error_of(http, error))
        raise
