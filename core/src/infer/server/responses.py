"""POST /v1/responses: reasoning and text, whole or streamed as typed events. Nothing is stored."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, FinishReason
from infer.contracts.server import Route
from infer.contracts.text import PartProtocol, Piece
from infer.server import answers
from infer.server.http.errors import REQUEST_ID
from infer.server.http.parsing import checked
from infer.server.http.streams import Array
from infer.server.schemas import ResponsesRequest
from infer.server.service import Events, Json, Service
from infer.server.thoughts import Thoughts
from infer.server.tokens import Tokens
from infer.text.tools import make_parser


def routes(service: Service, settings: object) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/responses",
            Responses(service).handle,
            "OpenAI's responses: reasoning and text, and nothing is stored.",
            answers.Response,
            ResponsesRequest,
            answers.ResponseEvent,
        )
    ]


class Responses:
    """The handler of POST /v1/responses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        asked = await self._service.read(http, ResponsesRequest)
        params = self._service.served.defaulted(checked(asked.sampling, ResponsesRequest))
        prompt = await self._service.conversation.prompt(asked, ())
        tags, thinking, end = self._service.conversation.reasoning(prompt, params)
        requests = await self._service.requests(
            http, [prompt], params, asked, prefix="resp", special=False, grammar_after=end
        )
        parser = make_parser({}, None, tags=tags, thinking=thinking)
        thoughts = Thoughts(self._service.tokens, tags, thinking) if tags else None
        tokens = self._service.tokens if asked.wants_logprobs else None
        output = _Output(self._response(http, asked, params), parser, thoughts, tokens)
        frames = functools.partial(_frames, output)
        if asked.stream:
            return await self._service.stream(http, requests, frames, named=True)
        ended = await self._service.last(http, requests, frames)
        return await self._service.answer(http, ended["response"])

    def _response(self, http: web.Request, asked: ResponsesRequest, params: SamplingParams) -> Json:
        return {
            "id": f"resp_{http[REQUEST_ID]}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._service.served.name,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": asked.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
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
        yield from self._tell(self._parser.push(news.text))

    def end(self, reason: FinishReason | None, usage: Json) -> Iterator[Json]:
        yield from self._tell(self._parser.flush())
        whole = reason == "stop"
        status = "completed" if whole else "incomplete"
        if self._unsent or (self._item is None and not self._done):
            yield from self._tell([Piece("content", "")])
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

    def _tell(self, pieces: Sequence[Piece] | Iterator[Piece]) -> Iterator[Json]:
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
