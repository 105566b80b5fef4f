"""POST /tokenize, POST /detokenize and GET /tokenizer_info, as in vLLM."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from aiohttp import web
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from infer.contracts.server import Route
from infer.errors import RequestError
from infer.text.encoding import TooLongError
from infer_server.events import Json
from infer_server.http.body import Body, Many, TokenIds
from infer_server.http.streams import Array
from infer_server.messages import Messages, turns
from infer_server.tools import MAX_TOOLS, Tool

if TYPE_CHECKING:
    from infer_server.service import Service

MAX_TOKENS = 1 << 18
"""The most tokens of an answer, unless the model takes more. Writing more of them would hold up other requests."""


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text, or messages to put through the chat template first."""

    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "messages"}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    @functools.cached_property
    def turns(self) -> bytes:
        return turns(self.messages or ())


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    special_tokens: dict[str, str]
    chat_template: str | None


def routes(service: Service, settings: object) -> list[Route]:
    own = Tokenization(service)
    return [
        Route("POST", "/tokenize", own.tokenize, "Text to token ids.", Tokenized, TokenizeRequest),
        Route("POST", "/detokenize", own.detokenize, "Token ids to text.", Detokenized, DetokenizeRequest),
        Route("GET", "/tokenizer_info", own.info, "What the tokenizer is.", TokenizerInfo),
    ]


class Tokenization:
    """The handlers, with what they share."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, TokenizeRequest)
        text, special = body.prompt, body.add_special_tokens
        if text is None:
            tools = [tool.shown() for tool in body.tools or ()]
            text, special = await self._service.conversation.prompt(body, tools), bool(special)
        served = self._service.served
        most = max(served.max_seq_len, MAX_TOKENS)

        def tokens() -> Json:
            ids = served.encoder(text, special=special is not False, most=most)
            strings = [served.tokenizer.id_to_token(id) for id in ids] if body.return_token_strs else None
            return {
                "count": len(ids),
                "max_model_len": served.max_seq_len,
                "tokens": Array.of(ids),
                "token_strs": strings and Array.of(strings),
            }

        try:
            answer = await self._service.tokenize([text], tokens)
        except TooLongError as error:
            raise RequestError(
                f"The text has {error.count} tokens; /tokenize takes {most} at most. Send it in parts.", param="prompt"
            ) from None
        return await self._service.answer(http, answer)

    async def detokenize(self, http: web.Request) -> web.Response:
        body = await self._service.read(http, DetokenizeRequest)
        served = self._service.served
        if bad := next((id for id in body.tokens if id >= served.vocab_size), None):
            raise RequestError(
                f"tokens holds token id {bad}, but this model's ids are 0 to {served.vocab_size - 1}.", param="tokens"
            )
        most = max(served.max_seq_len, MAX_TOKENS)
        if len(body.tokens) > most:
            raise RequestError(
                f"tokens holds {len(body.tokens)} ids; /detokenize takes {most} at most. Send them in parts.",
                param="tokens",
            )
        # ``decode`` would hold the GIL for as long as it takes.
        (text,) = await asyncio.to_thread(served.tokenizer.decode_batch, [body.tokens], skip_special_tokens=False)
        return web.json_response({"prompt": text})

    async def info(self, http: web.Request) -> web.Response:
        served = self._service.served
        template = served.template
        return web.json_response(
            {
                "tokenizer_class": type(served.tokenizer.model).__name__,
                "vocab_size": served.vocab_size,
                "max_model_len": served.max_seq_len,
                "special_tokens": template.tokens if template else {},
                "chat_template": template.source if template else None,
            }
        )
