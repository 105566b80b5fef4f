"""/v1/responses: reasoning, text and calls, whole, streamed as typed events or computed in the background, and what is
kept of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING

from aiohttp import web
from pydantic_core import from_json, to_json

from infer.contracts.params import SamplingParams
from infer.contracts.server import Route
from infer.errors import RequestError
from infer.text.encoding import TooLongError
from infer_agents.background import Background
from infer_agents.continuing import Turns, following, unpacked
from infer_agents.messages import MAX_COUNTED
from infer_agents.output import Output, frames
from infer_agents.records import Asked, Records, finish, joined, unknown
from infer_agents.response_bodies import Continuation, ResponsesRequest
from infer_agents.response_shapes import DeletedResponse, InputItems, InputTokens, Response, ResponseEvent
from infer_agents.response_tools import CloudTool
from infer_agents.store import OPEN, Store
from infer_server.events import Json
from infer_server.http.errors import REQUEST_ID
from infer_server.http.queries import limit, query
from infer_server.http.wire import NumberedEvents
from infer_server.replies import Reply

if TYPE_CHECKING:
    from infer_agents.seal import Seal
    from infer_server.service import Service

log = logging.getLogger(__name__)

LIST_ITEMS = 20, 100
"""How many items a page of input items has, and at most."""


def routes(service: Service, seal: Seal, store: Store | None, *, store_default: bool) -> list[Route]:
    own = Responses(service, seal, store, store_default=store_default)
    service.at_end(own.close)
    stored = "/v1/responses/{response_id}"
    return [
        Route(
            "POST",
            "/v1/responses",
            own.handle,
            "OpenAI's responses: reasoning, text and calls of tools, which later ones can go on from.",
            Response,
            ResponsesRequest,
            ResponseEvent,
            wire_format=NumberedEvents(),
        ),
        Route(
            "POST",
            "/v1/responses/input_tokens",
            own.count,
            "How many tokens the input of a response takes.",
            InputTokens,
            ResponsesRequest,
        ),
        Route("GET", stored, own.get, "A stored response.", Response),
        Route("DELETE", stored, own.delete, "Delete a stored response.", DeletedResponse),
        Route("GET", f"{stored}/input_items", own.list_items, "The items that a response was made of.", InputItems),
        Route("POST", f"{stored}/cancel", own.cancel, "Cancel a response in the background.", Response),
    ]


class Responses:
    """The handlers of /v1/responses and the routes below it. ``store`` is None if nothing can be kept."""

    def __init__(self, service: Service, seal: Seal, store: Store | None, *, store_default: bool) -> None:
        self._service = service
        self._seal = seal
        self._records = Records(service, store)
        self._background = Background(service, self._records)
        self._store_default = store_default
        self._logged: set[str] = set()

    async def close(self) -> None:
        """End what is computed in the background, and close the store."""
        await self._background.close()
        await self._records.close()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        asked = await self._asked(http, place=True)
        body, reply = asked.body, asked.reply
        requests = await self._service.requests(
            http, [asked.prompt], reply.params, body, prefix="resp", **reply.options
        )
        response = self._response(http, body, reply.params)
        output = Output(
            response,
            reply.parser(),
            {offer.name: offer for offer in body.offers},
            reply.thoughts(self._service.tokens),
            self._service.tokens if body.wants_logprobs else None,
            encrypt=self._seal.seal if body.wants_encrypted else None,
            summary=body.wants_summary,
        )
        save = self._records.saving(http, asked, requests[0].prompt_token_ids) if response["store"] else None
        if body.background:
            return await self._background.begin(http, asked, response, output, requests)
        told = functools.partial(frames, http, output, save)
        if body.stream:
            return await self._service.stream(http, requests, told, idle=output.idle())
        ended = await self._service.last(http, requests, told)
        return await self._service.answer(http, ended["response"])

    async def get(self, http: web.Request) -> web.StreamResponse:
        query(http, include=None, include_obfuscation=None, stream=("false",))
        record = await self._records.found(http, http.match_info["response_id"])
        return web.Response(body=record.response, content_type="application/json", charset="utf-8")

    async def delete(self, http: web.Request) -> web.StreamResponse:
        id = http.match_info["response_id"]
        store, owner = self._records.owned(http, id)
        if not await self._records.for_client(store.delete, owner, id):
            raise unknown(id)
        self._background.end(id)
        return await self._service.answer(http, {"id": id, "object": "response", "deleted": True})

    async def cancel(self, http: web.Request) -> web.StreamResponse:
        id = http.match_info["response_id"]
        record = await self._records.found(http, id)
        if not record.background:
            raise RequestError(f"The response {id!r} cannot be cancelled: it does not run in the background.")
        if record.status in OPEN:
            store, _ = self._records.owned(http, id)
            await self._records.for_client(finish, store, record, "cancelled")
            self._background.end(id)
            record = await self._records.found(http, id)
        return web.Response(body=record.response, content_type="application/json", charset="utf-8")

    async def list_items(self, http: web.Request) -> web.StreamResponse:
        asked = query(http, include=None, limit=None, order=("asc", "desc"), after=None)
        most = limit(asked, *LIST_ITEMS)
        id = http.match_info["response_id"]
        record = await self._records.found(http, id)
        items = await asyncio.to_thread(_shown_items, id, record.items)
        if asked.get("order", "desc") == "desc":
            items.reverse()
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError(f"after = {after!r} is no item of the response {id!r}.", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[:most]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return await self._service.answer(
            http, {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}
        )

    async def count(self, http: web.Request) -> web.StreamResponse:
        prompt = (await self._asked(http, place=False)).prompt
        served = self._service.served
        most = max(served.max_seq_len, MAX_COUNTED)
        try:
            count = (
                await self._service.tokenize([prompt], lambda: len(served.encoder(prompt, special=False, most=most)))
                if isinstance(prompt, str)
                else len(prompt)
            )
        except TooLongError as error:
            raise RequestError(
                f"The input has {error.count} tokens; at most {most} are counted.", param="input"
            ) from None
        return await self._service.answer(http, {"object": "response.input_tokens", "input_tokens": count})

    async def _asked(self, http: web.Request, *, place: bool) -> Asked:
        """What the body asks for; with ``place``, it needs a place in the engine. Raises RequestError or
        QueueFullError."""
        body = await self._service.read(http, ResponsesRequest, place=place)
        for kind in sorted(body.cloud_kinds - self._logged):
            self._logged.add(kind)
            log.info("the model is not shown tools of the type %s, because only a cloud has them", kind)
        for path, sealed in body.sealed:
            try:
                self._seal.opened(sealed)
            except ValueError as error:
                raise RequestError(f"{path} cannot be taken: {error}.", param=path) from None
        form = await self._records.form(body)
        if body.previous_response_id is None:
            reply = await self._reply(body)
            return Asked(body, reply, reply.prompt, b"[]", form)
        record = await self._records.found(http, body.previous_response_id, "previous_response_id")
        if record.status not in ("completed", "incomplete"):
            raise RequestError(
                f"The response {record.id!r} cannot be gone on from: its status is {record.status}.",
                param="previous_response_id",
            )
        past = joined(record.items, record.output)
        whole = await self._continued(body, past)
        body = body.model_copy(update={"turns": whole.turns})
        if record.tokens and record.form == form:
            prompt: str | None = None
            tail: Reply | None = None

            async def render(turns: Turns) -> str:
                nonlocal tail
                made = body.model_copy(update={"turns": to_json(turns, inf_nan_mode="constants")})
                tail = await self._reply(made)
                return tail.prompt

            prompt = await following(from_json(whole.turns), whole.answer, record.stop, render)
            if prompt is not None and tail is not None:
                text, known = prompt, unpacked(record.tokens)
                new = await self._service.tokenize([text], lambda: self._service.served.encode(text, special=False))
                return Asked(body, tail, [*known, *new], past, form)
        reply = await self._reply(body)
        return Asked(body, reply, reply.prompt, past, form)

    async def _continued(self, body: ResponsesRequest, past: bytes) -> Continuation:
        """The conversation that begins with ``past``. As a whole, it may be as large as a body. Raises RequestError."""
        whole, most = body.after(past), self._service.settings.server.max_body_bytes
        try:
            if len(whole) > most:
                raise RequestError(f"There are {len(whole)} bytes; server.max_body_bytes allows {most}.")
            return await self._service.parse(whole, Continuation)
        except RequestError as error:
            if error.param is not None:
                raise
            raise RequestError(
                f"With all its earlier turns, the conversation is too large: {error} Begin a new one.",
                param="previous_response_id",
            ) from None

    async def _reply(self, body: ResponsesRequest) -> Reply:
        """Raises RequestError."""
        reply, use = self._service.conversation.reply, body.tool_use()
        try:
            return await reply(body, body.sampling, use)
        except RequestError as error:
            if error.param != "messages" or (other := body.gathered()) is None:
                raise
            try:  # agents send several instructions, and many templates know one
                return await reply(other, body.sampling, use)
            except RequestError:
                raise error from None

    def _response(self, http: web.Request, body: ResponsesRequest, params: SamplingParams) -> Json:
        choice = body.tool_choice or "auto"
        return {
            "id": f"resp_{http[REQUEST_ID]}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": body.background is True,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.model_name(http),
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "store": self._records.kept
            and (body.background or self._store_default if body.store is None else body.store),
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


def _shown_items(id: str, items: bytes) -> list[Json]:
    """Input items as they are listed: each has an id, and texts are parts."""
    shown: list[Json] = []
    for i, item in enumerate(from_json(items)):
        made = {"id": f"{id.replace('resp', 'item', 1)}_{i}", "status": "completed"} | item
        if made["type"] == "message" and isinstance(made["content"], str):
            kind = "output_text" if made["role"] == "assistant" else "input_text"
            part: Json = {"type": kind, "text": made["content"]}
            made["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
        shown.append(made)
    return shown
