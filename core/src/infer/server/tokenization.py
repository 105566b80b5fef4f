"""POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from infer.errors import RequestError
from infer.server.chat import Chat
from infer.server.schemas import DetokenizeRequest, TokenizeRequest
from infer.server.service import INLINE_CHARS, Service


class Tokenization:
    """The handlers and what they need."""

    def __init__(self, service: Service, chat: Chat) -> None:
        self._service = service
        self._chat = chat

    async def tokenize(self, http: web.Request) -> web.Response:
        asked = await self._service.read(http, TokenizeRequest)
        text, special = asked.prompt, asked.add_special_tokens
        if text is None:
            tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
            text, special = await self._chat.prompt(asked, tools), bool(special)
        served = self._service.served

        def encode() -> list[int]:
            ids: list[int] = served.tokenizer.encode(text, add_special_tokens=special is not False).ids
            return ids

        ids = encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)
        answer = {"count": len(ids), "max_model_len": served.max_seq_len, "tokens": ids, "token_strs": None}
        if asked.return_token_strs:
            answer["token_strs"] = [served.tokenizer.id_to_token(id) for id in ids]
        return web.json_response(answer)

    async def detokenize(self, http: web.Request) -> web.Response:
        asked = await self._service.read(http, DetokenizeRequest)
        served = self._service.served
        if bad := next((id for id in asked.tokens if id >= served.vocab_size), None):
            raise RequestError(
                f"tokens holds token id {bad}, but this model's ids are 0 to {served.vocab_size - 1}.", param="tokens"
            )
        text = await asyncio.to_thread(served.tokenizer.decode, list(asked.tokens), skip_special_tokens=False)
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
