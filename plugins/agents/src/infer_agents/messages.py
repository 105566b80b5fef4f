"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's API, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from aiohttp import web
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from infer.contracts.request import Event
from infer.contracts.server import Route
from infer.contracts.text import Piece
from infer.errors import RequestError
from infer.text.encoding import TooLongError
from infer_agents.message_bodies import ID_PREFIX, MessagesRequest, Thought
from infer_server.calling import call_id
from infer_server.events import Events, Json
from infer_server.http.errors import REQUEST_ID
from infer_server.http.parsing import checked
from infer_server.http.wire import Anthropic
from infer_server.replies import Reply
from infer_server.thoughts import Thoughts

if TYPE_CHECKING:
    from infer_agents.seal import Seal
    from infer_server.service import Service

MAX_COUNTED = 1 << 18
"""The most tokens that are counted, unless the model takes more."""
BETAS = "anthropic-beta"
NO_THREADS = "thread_unsupported_request"
"""By which the runners of tools in Anthropic's clients know that they have to send whole conversations."""


class ThinkingAnswer(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextAnswer(TypedDict):
    type: Literal["text"]
    text: str


class ToolUseAnswer(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingAnswer | TextAnswer | ToolUseAnswer]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """One of Anthropic's events. Its other fields depend on its type."""

    type: str
    index: NotRequired[int]


class TokensCounted(TypedDict):
    input_tokens: int


def routes(service: Service, seal: Seal, *, billing_header: bool) -> list[Route]:
    own = Messages(service, seal, billing_header=billing_header)
    return [
        Route(
            "POST",
            "/v1/messages",
            own.create,
            "Anthropic's messages: reasoning, text and calls of tools.",
            MessageAnswer,
            MessagesRequest,
            MessageEvent,
            wire_format=Anthropic(),
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            own.count,
            "How many tokens the prompt of /v1/messages has.",
            TokensCounted,
            MessagesRequest,
            wire_format=Anthropic(),
        ),
    ]


@dataclass(frozen=True)
class _Chat:
    """What a prompt is made of: ``infer_server.conversation.ConversationBody``."""

    turns: bytes
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None
    hints: dict[str, Any]
    add_generation_prompt: bool = True


class Messages:
    """The handlers."""

    def __init__(self, service: Service, seal: Seal, *, billing_header: bool) -> None:
        self._service = service
        self._seal = seal
        self._billing_header = billing_header

    async def create(self, http: web.Request) -> web.StreamResponse:
        body = await self._read(http, place=True)
        reply = await self._reply(body)
        try:
            requests = await self._service.requests(
                http, [reply.prompt], reply.params, body, prefix="msg", **reply.options
            )
        except RequestError as error:
            if error.code == "context_length_exceeded":
                await self._count(reply, self._service.served.max_seq_len - 1)  # one is needed for the answer
            raise
        message: Json = {
            "id": f"msg_{http[REQUEST_ID]}",
            "type": "message",
            "role": "assistant",
            "model": body.model or self._service.served.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        omitted = body.thinking is not None and body.thinking.display == "omitted"
        output = _Output(message, reply, reply.thoughts(self._service.tokens), self._seal, omitted=omitted)
        frames = functools.partial(_frames, output)
        if body.stream:
            return await self._service.stream(http, requests, frames)
        await self._service.last(http, requests, frames)
        return await self._service.answer(http, output.message)

    async def count(self, http: web.Request) -> web.StreamResponse:
        body = await self._read(http, place=False)
        reply = await self._reply(body)
        count = await self._count(reply, max(self._service.served.max_seq_len, MAX_COUNTED))
        return await self._service.answer(http, {"input_tokens": count})

    async def _read(self, http: web.Request, *, place: bool) -> MessagesRequest:
        body = await self._service.read(http, MessagesRequest, place=place)
        if body.thread is not None:
            raise RequestError(
                "thread is not supported: no conversation is kept here. Send all its messages, and leave thread out.",
                param="thread",
                code=NO_THREADS,
            )
        if BETAS in http.headers:
            self._service.tell_ignored(http, f"the header {BETAS}", "Ignored: no beta changes an answer.")
        if body.hidden:
            self._service.tell_ignored(http, "a tool of Anthropic's own", "Ignored: the model is not shown it.")
        return body

    async def _reply(self, body: MessagesRequest) -> Reply:
        """The reply that a body asks for. Raises RequestError."""
        pieces, continues = body.history
        instructions = body.instructions(billing_header=self._billing_header)
        system = to_json({"role": "system", "content": instructions}) + b"," if instructions else b""
        history = b"".join(each if isinstance(each, bytes) else to_json(self._own(each)) for each in pieces)
        chat = _Chat(b"[%b%b]" % (system, history), continues, body.chat_template_kwargs, body.hints)
        sampling = lambda **overrides: checked(lambda: body.sampling(**overrides), MessagesRequest)  # noqa: E731
        reply = await self._service.conversation.reply(chat, sampling, body.tool_use())
        budget = None if body.thinking is None else body.thinking.budget()
        if budget is None or reply.thinking_tokens is None:
            return reply
        return replace(reply, params=reply.params.model_copy(update={"thinking_token_budget": budget}))

    def _own(self, thoughts: Iterable[Thought]) -> str:
        """The reasoning of one message. Raises RequestError if any has been altered."""
        return "\n\n".join(map(self._opened, thoughts))

    def _opened(self, thought: Thought) -> str:
        if thought.signature and not thought.text:
            try:
                return self._seal.opened(thought.signature)
            except ValueError as error:
                raise _altered(thought, str(error)) from None
        if thought.signature and not self._seal.signed(thought.text, thought.signature):
            raise _altered(thought, "it is not this server's for this text; see server.agents.key")
        return thought.text

    async def _count(self, reply: Reply, most: int) -> int:
        """How many tokens the prompt has. If they are too many, this raises RequestError in words by which clients know
        that they have to shorten the conversation."""
        encoder = self._service.served.encoder
        try:
            return len(
                await self._service.tokenize([reply.prompt], lambda: encoder(reply.prompt, special=False, most=most))
            )
        except TooLongError as error:
            raise RequestError(
                f"prompt is too long: {error.count} tokens > {most} maximum", code="context_length_exceeded"
            ) from None


def _altered(thought: Thought, why: str) -> RequestError:
    return RequestError(
        # Clients look for Anthropic's words, and leave the block out then.
        f"{thought.param}: Invalid `signature` in `thinking` block: {why}. Send the block as it came, with an empty "
        "signature, or not at all.",
        param=thought.param,
    )


async def _frames(output: _Output, events: Events, usage: Callable[[], Json]) -> AsyncGenerator[Json]:
    async for _, news in events:
        for frame in output.push(news, usage):
            yield frame


class _Output:
    """Builds ``message`` from an answer as it arrives, and makes the stream's events. ``omitted`` means that the client
    gets reasoning sealed."""

    def __init__(self, message: Json, reply: Reply, thoughts: Thoughts | None, seal: Seal, *, omitted: bool) -> None:
        self.message = message
        self._parser = reply.parser()
        self._thoughts = thoughts
        self._seal = seal
        self._omitted = omitted
        self._begun = False
        self._block: Json | None = None
        self._texts: list[str] = []

    def push(self, news: Event, usage: Callable[[], Json]) -> Iterator[Json]:
        if self._thoughts is not None:
            for id in news.token_ids:
                self._thoughts.push(id)
        if not self._begun:
            self._begun = True
            self.message = self.message | {"usage": self._usage(usage())}
            yield {"type": "message_start", "message": self.message}
        for piece in self._parser.push(news.text):
            yield from self._emit(piece)
        if news.finish_reason is not None:
            for piece in self._parser.flush():
                yield from self._emit(piece)
            yield from self._close()
            yield from self._end(news, self._usage(usage()))

    def _end(self, news: Event, usage: Json) -> Iterator[Json]:
        stop = news.stop_reason if isinstance(news.stop_reason, str) else None
        called = any(block["type"] == "tool_use" for block in self.message["content"])
        reason = "tool_use" if called else "end_turn"
        if news.finish_reason == "length":
            reason = "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": stop}
        self.message = self.message | ended | {"usage": usage}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    def _usage(self, usage: Json) -> Json:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._thoughts.count if self._thoughts else 0},
        }

    def _emit(self, piece: Piece) -> Iterator[Json]:
        kind, text = piece
        match kind:
            case "call":
                yield from self._open({"type": "tool_use", "id": ID_PREFIX + call_id(), "name": text, "input": {}})
            case "arguments":
                yield from self._more(text, {"type": "input_json_delta", "partial_json": text})
            case "reasoning" if text:
                if self._block is None or self._block["type"] != "thinking":
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                yield from self._more(text, None if self._omitted else {"type": "thinking_delta", "thinking": text})
            case "content" if text:
                if self._block is None or self._block["type"] != "text":
                    yield from self._open({"type": "text", "text": ""})
                yield from self._more(text, {"type": "text_delta", "text": text})

    @property
    def _index(self) -> int:
        return len(self.message["content"])

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._block, self._texts = block, []
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _more(self, text: str, delta: Json | None) -> Iterator[Json]:
        self._texts.append(text)
        if delta is not None:
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._block is None:
            return
        block, text = self._block, "".join(self._texts)
        match block["type"]:
            case "text":
                block = block | {"text": text}
            case "thinking":
                signature = self._seal.seal(text) if self._omitted else self._seal.signature(text)
                yield from self._more("", {"type": "signature_delta", "signature": signature})
                block = block | {"thinking": "" if self._omitted else text, "signature": signature}
            case _:
                block = block | {"input": _input(text)}
        yield {"type": "content_block_stop", "index": self._index}
        self.message = self.message | {"content": [*self.message["content"], block]}
        self._block = None


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments, as far as they go. What a model wrote in their place, if that is no object, is a member of
    it, so that the client's complaint about it reaches the model."""
    try:
        found = from_json(arguments, allow_partial=True, allow_inf_nan=False) if arguments.strip() else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
