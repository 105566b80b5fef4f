"""POST /api/chat and /api/generate, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from aiohttp import web
from pydantic_core import from_json
from typing_extensions import TypedDict

from infer.contracts.request import Event, Request
from infer.contracts.server import Route
from infer.contracts.text import PartProtocol
from infer.errors import RequestError
from infer_ollama.bodies import Answered, ChatBody, GenerateBody
from infer_ollama.models import check_served, now
from infer_server.calling import call_id
from infer_server.events import Events, Json
from infer_server.http.parsing import checked
from infer_server.http.streams import Array
from infer_server.http.wire import Ollama
from infer_server.replies import Reply, ToolUse
from infer_server.shapes import ChosenLogprob

if TYPE_CHECKING:
    from infer_server.service import Service


class CalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class Called(TypedDict):
    id: str
    function: CalledFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Called]]


class _Answer(TypedDict):
    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    logprobs: NotRequired[list[ChosenLogprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatAnswer(_Answer):
    """An answer, or a line of a streamed one."""

    message: AnswerMessage


class GenerateAnswer(_Answer):
    """An answer, or a line of a streamed one."""

    response: str
    thinking: NotRequired[str]


def routes(service: Service) -> list[Route]:
    own = Answers(service)
    return [
        Route(
            *("POST", "/api/chat", own.chat, "Ollama's chats: reasoning, text and calls of tools."),
            *(ChatAnswer, ChatBody, ChatAnswer),
            wire_format=Ollama(),
        ),
        Route(
            *("POST", "/api/generate", own.generate, "Ollama's answers to a prompt."),
            *(GenerateAnswer, GenerateBody, GenerateAnswer),
            wire_format=Ollama(),
        ),
    ]


@dataclass(frozen=True)
class _Chat:
    """What a prompt is made of: ``infer_server.conversation.ConversationBody``."""

    turns: bytes
    hints: dict[str, Any]
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: None = None


@dataclass
class _Delta:
    """What an answer has, or what is new about it."""

    content: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)


def _message(delta: _Delta) -> Json:
    message: Json = {"role": "assistant", "content": delta.content}
    if delta.thinking:
        message["thinking"] = delta.thinking
    if delta.calls:
        message["tool_calls"] = delta.calls
    return {"message": message}


def _response(delta: _Delta) -> Json:
    return {"response": delta.content} | ({"thinking": delta.thinking} if delta.thinking else {})


class Answers:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, http: web.Request) -> web.StreamResponse:
        began = time.perf_counter_ns()
        body = await self._service.read(http, ChatBody, place=True)
        self._check(http, body)
        turns, continues = body.history
        if not turns:
            return await self._nothing(http, body, _message)
        reply = await self._reply(body, _Chat(turns, body.hints, continues), body.tool_use())
        return await self._replied(http, body, reply, _message, began)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        began = time.perf_counter_ns()
        body = await self._service.read(http, GenerateBody, place=True)
        self._check(http, body)
        if not body.prompt:
            return await self._nothing(http, body, _response)
        # Without a chat template, Ollama's is the prompt alone.
        if not body.raw and (self._service.served.template is not None or body.system):
            reply = await self._reply(body, _Chat(body.turns, body.hints), ToolUse())
            return await self._replied(http, body, reply, _response, began)
        params = self._service.served.defaulted(checked(body.sampling, GenerateBody))
        requests = await self._service.requests(http, [body.prompt], params, body, prefix="ollama")
        return await self._answered(http, body, requests, _Output(self._service, body, _response, None, began))

    def _check(self, http: web.Request, body: Answered) -> None:
        """Raise RequestError if a body is about another model, or asks this one for what it does not do."""
        check_served(self._service, http, body)
        if body.think and self._service.served.reasoning is None:
            raise RequestError(f"{body.model_name[:200]!r} does not support thinking; leave think out.", param="think")

    async def _reply(self, body: Answered, chat: _Chat, tools: ToolUse) -> Reply:
        sampling = lambda **overrides: checked(lambda: body.sampling(**overrides), type(body))  # noqa: E731
        return await self._service.conversation.reply(chat, sampling, tools)

    async def _nothing(self, http: web.Request, body: Answered, show: Callable[[_Delta], Json]) -> web.StreamResponse:
        """The answer to what loads or unloads the model, if this were Ollama."""
        reason = "unload" if body.unloads else "load"
        frame: Json = {"model": body.model_name, "created_at": now()}
        return await self._service.answer(http, frame | show(_Delta()) | {"done": True, "done_reason": reason})

    async def _replied(
        self, http: web.Request, body: Answered, reply: Reply, show: Callable[[_Delta], Json], began: int
    ) -> web.StreamResponse:
        requests = await self._service.requests(
            http, [reply.prompt], reply.params, body, prefix="ollama", **reply.options
        )
        return await self._answered(http, body, requests, _Output(self._service, body, show, reply.parser(), began))

    async def _answered(
        self, http: web.Request, body: Answered, requests: Sequence[Request], output: _Output
    ) -> web.StreamResponse:
        if body.stream:
            return await self._service.stream(http, requests, output.frames)
        last = await self._service.last(http, requests, output.frames)
        return await self._service.answer(http, last | output.whole())


class _Output:
    """Makes the lines of a stream from an answer as it arrives, and collects the answer. ``show`` gives it the shape of
    the route; without a ``parser`` it is text alone. ``began`` is when the request came, in ns."""

    def __init__(
        self,
        service: Service,
        body: Answered,
        show: Callable[[_Delta], Json],
        parser: PartProtocol | None,
        began: int,
    ) -> None:
        self._service = service
        self._model = body.model_name
        self._show = show
        self._parser = parser
        self._began = began
        self._asked = time.perf_counter_ns()
        self._deltas: list[_Delta] = []
        self._call: tuple[str, list[str]] | None = None
        """The name and the arguments of the call that is being written."""
        self._calls = 0

    async def frames(self, events: Events, usage: Callable[[], Json]) -> AsyncGenerator[Json]:
        first = None
        async for _, event in events:
            first = time.perf_counter_ns() if first is None else first
            delta = await self._delta(event)
            if delta != _Delta():
                self._deltas.append(delta)
                yield self._frame(delta) | {"done": False}
            if event.finish_reason is not None:
                reason = "length" if event.finish_reason == "length" else "stop"
                counted, ended = usage(), time.perf_counter_ns()
                yield self._frame(_Delta()) | {
                    "done": True,
                    "done_reason": reason,
                    "total_duration": ended - self._began,
                    "load_duration": self._asked - self._began,
                    "prompt_eval_count": counted["prompt_tokens"],
                    "prompt_eval_duration": first - self._asked,
                    "eval_count": counted["completion_tokens"],
                    "eval_duration": ended - first,
                }

    def whole(self) -> Json:
        """What the route shows of all of the answer."""
        return self._shown(
            _Delta(
                "".join(delta.content for delta in self._deltas),
                "".join(delta.thinking for delta in self._deltas),
                [call for delta in self._deltas for call in delta.calls],
                [entry for delta in self._deltas for entry in delta.logprobs],
            )
        )

    def _frame(self, delta: _Delta) -> Json:
        return {"model": self._model, "created_at": now()} | self._shown(delta)

    def _shown(self, delta: _Delta) -> Json:
        return self._show(delta) | ({"logprobs": Array(delta.logprobs)} if delta.logprobs else {})

    async def _delta(self, event: Event) -> _Delta:
        delta = _Delta()
        if event.logprobs:
            entries = event.logprobs
            delta.logprobs = await self._service.writer.each(self._service.tokens.ranked, entries, len(entries))
        if self._parser is None:
            delta.content = event.text
            return delta
        pieces = list(self._parser.push(event.text))
        if event.finish_reason is not None:
            pieces += self._parser.flush()
        for kind, text in pieces:
            if kind == "arguments":
                if self._call is not None:
                    self._call[1].append(text)
                continue
            self._close(delta)
            match kind:
                case "call":
                    self._call = (text, [])
                case "reasoning":
                    delta.thinking += text
                case "content":
                    delta.content += text
        if event.finish_reason is not None:
            self._close(delta)
        return delta

    def _close(self, delta: _Delta) -> None:
        """Show the call that has been written to its end."""
        if self._call is None:
            return
        name, texts = self._call
        function = {"index": self._calls, "name": name, "arguments": _arguments("".join(texts))}
        delta.calls.append({"id": f"call_{call_id()}", "function": function})
        self._call = None
        self._calls += 1


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments, as far as they go. What a model wrote in their place, if that is no object, is a member of
    it, so that the client's complaint about it reaches the model."""
    try:
        found = from_json(text, allow_partial=True, allow_inf_nan=False) if text.strip() else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}
