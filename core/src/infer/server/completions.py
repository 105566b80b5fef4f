"""POST /v1/completions, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from infer.assemble import Served
from infer.engine.loop import AsyncDoor
from infer.errors import EngineDeadError, InferError, RequestError
from infer.llm import Completion
from infer.request import Event, FinishReason, Request, TokenLogprobs
from infer.server.errors import REQUEST_ID, NotFoundError, error_body
from infer.server.schemas import CompletionRequest, parse

SHUTTING_DOWN = "The server is shutting down; send the request again."
ENCODE = json.JSONEncoder(ensure_ascii=False).encode
"""Made once: json.dumps would make an encoder for every token."""
INLINE_CHARS = 4096
"""Longer prompts are tokenised in a thread, so that other streams go on meanwhile."""


class Completions:
    """The handler and what it needs."""

    def __init__(self, served: Served, door: AsyncDoor, body_timeout_s: float, stall_timeout_s: float) -> None:
        self._served = served
        self._door = door
        self._body_timeout_s = body_timeout_s
        self._stall_timeout_s = stall_timeout_s

    async def handle(self, http: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await http.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="The request's body did not arrive in time.") from None
        asked = parse(body)
        if asked.model is not None and asked.model != self._served.name:
            raise NotFoundError(
                f"The model {asked.model!r} is not served here; this server has {self._served.name!r}.",
                param="model",
                code="model_not_found",
            )
        request = await self._request(asked, f"cmpl-{http[REQUEST_ID]}")
        async with aclosing(self._door.stream(request)) as events:
            # The first event decides between an answer and an error status; headers wait for it.
            first = await anext(events)
            _raise_if_failed(first.finish_reason, first.error)
            if asked.stream:
                return await self._stream(http, asked, request, first, events)
            answer = Completion(request.prompt_token_ids)
            answer.add(first)
            async for event in events:
                answer.add(event)
        _raise_if_failed(answer.finish_reason, answer.error)
        choice = _choice(answer.text, answer.finish_reason)
        if answer.logprobs is not None:
            choice["logprobs"] = self._logprobs(answer.logprobs, 0)
        if answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [self._prompt_logprob(p) for p in answer.prompt_logprobs]
        usage = _usage(request, len(answer.token_ids), answer.num_cached)
        return web.json_response(self._frame(request) | {"choices": [choice], "usage": usage})

    async def _request(self, asked: CompletionRequest, id: str) -> Request:
        prompt = asked.prompt
        if isinstance(prompt, str):
            if self._served.tokenizer is None:
                raise RequestError("This model has no tokenizer; send the prompt as token ids.", param="prompt")
            encode = self._served.tokenizer.encode
            encoding = encode(prompt) if len(prompt) <= INLINE_CHARS else await asyncio.to_thread(encode, prompt)
            prompt = tuple(encoding.ids)
        return Request.make(
            prompt,
            asked.sampling(),
            vocab_size=self._served.vocab_size,
            max_seq_len=self._served.max_seq_len,
            id=id,
            cache_salt=asked.cache_salt,
        )

    async def _stream(
        self,
        http: web.Request,
        asked: CompletionRequest,
        request: Request,
        first: Event,
        events: AsyncGenerator[Event],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Request-Id": http[REQUEST_ID]})
        response.content_type = "text/event-stream"
        await response.prepare(http)
        frame = self._frame(request)
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        if with_usage:
            frame["usage"] = None
        num_tokens = offset = 0
        event: Event | None = first
        while event is not None:
            num_tokens += len(event.token_ids)
            if event.finish_reason in ("error", "abort"):
                error = error_body(event.error or SHUTTING_DOWN, "server_error")
                await self._send(response, error)
                break
            if event.text or event.logprobs or event.finish_reason or event.prompt_logprobs:
                choice = _choice(event.text, event.finish_reason)
                if event.logprobs:
                    choice["logprobs"] = self._logprobs(event.logprobs, offset)
                if event.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [self._prompt_logprob(p) for p in event.prompt_logprobs]
                offset += len(event.text)
                await self._send(response, frame | {"choices": [choice]})
            if event.finish_reason and with_usage:
                usage = _usage(request, num_tokens, event.num_cached)
                await self._send(response, frame | {"choices": [], "usage": usage})
            event = await anext(events, None)
        await self._write(response, b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, data: object) -> None:
        await self._write(response, b"data: " + ENCODE(data).encode() + b"\n\n")

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """A client that does not read for so long is taken to have left."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await response.write(data)
        except TimeoutError:
            raise ConnectionResetError("the client does not read") from None

    def _frame(self, request: Request) -> dict[str, Any]:
        return {
            "id": request.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._served.name,
        }

    def _token(self, token_id: int) -> str:
        tokenizer: Tokenizer | None = self._served.tokenizer
        return "" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    def _logprobs(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        tokens = [self._token(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token(t): p for t, p in reversed(entry.top)} for entry in entries],
            "text_offset": offsets,
        }

    def _prompt_logprob(self, entry: TokenLogprobs | None) -> dict[str, Any] | None:
        """Keyed by token id, as vLLM reports them."""
        if entry is None:
            return None
        ranked = {t: (p, rank) for rank, (t, p) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
        return {
            str(t): {"logprob": p, "rank": rank, "decoded_token": self._token(t)} for t, (p, rank) in ranked.items()
        }


def _raise_if_failed(reason: FinishReason | None, error: str | None) -> None:
    if reason == "error":
        raise InferError(error)
    if reason == "abort":
        raise EngineDeadError(SHUTTING_DOWN)


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(request: Request, num_tokens: int, num_cached: int) -> dict[str, Any]:
    prompt = len(request.prompt_token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_tokens,
        "total_tokens": prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
