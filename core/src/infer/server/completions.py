"""POST /v1/completions, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from aiohttp import web

from infer.request import Request, TokenLogprobs
from infer.server.schemas import CompletionRequest, StreamOptions, checked
from infer.server.service import Events, Json, Service


class Completions:
    """The handler and what it needs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        asked = await self._service.read(http, CompletionRequest)
        more: Json = {"max_tokens": 1} if asked.max_tokens == 0 else {}
        if asked.echo and asked.logprobs is not None:
            more["prompt_logprobs"] = asked.logprobs
        params = checked(lambda: asked.sampling(**more), CompletionRequest)
        requests = await self._service.requests(
            http, asked.prompts, params, asked, n=asked.n, special=asked.add_special_tokens
        )
        frame = self._service.frame(requests[0].id.removesuffix("-0"), "text_completion")
        if asked.stream:
            frames = functools.partial(self._frames, frame, asked)
            return await self._service.stream(http, requests, frames)
        answers, usage = await self._service.whole(http, requests)
        choices = []
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            entries: list[TokenLogprobs | None] = list(answer.logprobs or ())
            text = answer.text
            if asked.max_tokens == 0:
                entries, text = [], ""
            choice = _choice(i, text, answer.finish_reason, answer.stop_reason)
            if asked.echo:
                echoed = self._echoed(request, asked.prompts[i // asked.n])
                choice["text"] = echoed + text
                entries = (answer.prompt_logprobs or []) + entries
            if asked.logprobs is not None or asked.logprob_token_ids is not None:
                tokens = list(request.prompt_token_ids) if asked.echo else []
                tokens += [entry.token_id for entry in answer.logprobs or ()]
                choice["logprobs"] = self._logprobs(tokens, entries, 0)
            if asked.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._service.prompt_logprobs(answer)
            choices.append(choice)
        return web.json_response(frame | {"choices": choices, "usage": usage})

    async def _frames(
        self, frame: Json, asked: CompletionRequest, events: Events, usage: Callable[[], Json]
    ) -> AsyncGenerator[Json]:
        options = asked.stream_options or StreamOptions()
        if options.include_usage:
            frame = frame | {"usage": None}
        offsets: dict[int, int] = {}
        async for i, event in events:
            if not (event.text or event.logprobs or event.finish_reason or event.prompt_logprobs):
                continue
            choice = _choice(i, event.text, event.finish_reason, event.stop_reason)
            if event.logprobs:
                tokens = [entry.token_id for entry in event.logprobs]
                choice["logprobs"] = self._logprobs(tokens, event.logprobs, offsets.get(i, 0))
            if event.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._service.prompt_logprobs(event)
            offsets[i] = offsets.get(i, 0) + len(event.text)
            yield frame | {"choices": [choice]} | ({"usage": usage()} if options.continuous_usage_stats else {})
        if options.include_usage:
            yield frame | {"choices": [], "usage": usage()}

    def _echoed(self, request: Request, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        text: str = self._service.served.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        return text

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int) -> Json:
        """In the legacy shape. The first token of a prompt has an entry of None."""
        text = self._service.tokens.text
        tokens = [text(token) for token in token_ids[: len(entries)]]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            # Tokens that read alike share a key; the likeliest has it.
            "top_logprobs": [
                None
                if entry is None
                else {text(entry.token_id): entry.logprob} | {text(t): p for t, p in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def _choice(index: int, text: str, finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
