"""POST /v1/responses: text, whole or as typed events. Nothing is stored."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from aiohttp import web

from infer.request import FinishReason
from infer.server.chat import Chat
from infer.server.errors import REQUEST_ID
from infer.server.schemas import ResponsesRequest, checked
from infer.server.service import Events, Json, Service


class Responses:
    """The handler and what it needs."""

    def __init__(self, service: Service, chat: Chat) -> None:
        self._service = service
        self._chat = chat

    async def handle(self, http: web.Request) -> web.StreamResponse:
        asked = await self._service.read(http, ResponsesRequest)
        params = checked(asked.sampling, ResponsesRequest)
        prompt = await self._service.render(asked.messages(), tools=None, add_generation_prompt=True)
        requests = await self._service.requests(http, [prompt], params, asked, prefix="resp", special=False)
        response = self._response(http, asked)
        if asked.stream:
            return await self._service.stream(
                http, requests, functools.partial(self._frames, response, asked), named=True
            )
        (answer,), usage = await self._service.whole(http, requests)
        content = _content(answer.text, self._chat.logprobs(answer.logprobs or ()) if asked.top_logprobs else [])
        return web.json_response(_ended(response, content, answer.finish_reason, usage))

    def _response(self, http: web.Request, asked: ResponsesRequest) -> Json:
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
            "temperature": asked.temperature,
            "text": {"format": asked.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    async def _frames(
        self, response: Json, asked: ResponsesRequest, events: Events, usage: Callable[[], Json]
    ) -> AsyncGenerator[Json]:
        number = 0

        def event(type: str, **more: Any) -> Json:
            nonlocal number
            number += 1
            return {"type": f"response.{type}", "sequence_number": number - 1, **more}

        place = {"item_id": _item_id(response), "output_index": 0, "content_index": 0}
        text, logprobs = "", []
        reason: FinishReason | None = None
        yield event("created", response=response)
        yield event("in_progress", response=response)
        yield event("output_item.added", output_index=0, item=_item(response, [], "in_progress"))
        yield event("content_part.added", **place, part=_content("", []))
        async for _, news in events:
            entries = self._chat.logprobs(news.logprobs) if asked.top_logprobs else []
            logprobs += entries
            text += news.text
            reason = news.finish_reason
            if news.text or entries:
                yield event("output_text.delta", **place, delta=news.text, logprobs=entries)
        yield event("output_text.done", **place, text=text, logprobs=logprobs)
        yield event("content_part.done", **place, part=_content(text, logprobs))
        ended = _ended(response, _content(text, logprobs), reason, usage())
        yield event("output_item.done", output_index=0, item=ended["output"][0])
        yield event(str(ended["status"]), response=ended)


def _content(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _item_id(response: Json) -> str:
    return str(response["id"]).replace("resp_", "msg_", 1)


def _item(response: Json, content: list[Json], status: str) -> Json:
    return {"id": _item_id(response), "type": "message", "role": "assistant", "status": status, "content": content}


def _ended(response: Json, content: Json, reason: FinishReason | None, usage: Json) -> Json:
    whole = reason == "stop"
    status = "completed" if whole else "incomplete"
    return response | {
        "status": status,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": [_item(response, [content], status)],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
