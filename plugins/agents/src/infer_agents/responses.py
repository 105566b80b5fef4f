"""/v1/responses: reasoning, text and calls, whole, streamed as typed events or computed in the background, and what is
kept of them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeVar

from aiohttp import web
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, FinishReason, Request
from infer.contracts.server import Route
from infer.errors import InferError, QueueFullError, RequestError
from infer.server.events import Events, Json, TokenCount, raise_if_failed
from infer.server.http.access import INSIDE
from infer.server.http.errors import REQUEST_ID, NotFoundError, error_of
from infer.server.http.wire import NamedEvents
from infer.server.replies import Reply
from infer.server.shapes import CachedTokens, ChosenLogprob, ReasoningTokens
from infer.text.encoding import TooLongError
from infer_agents.continuing import Turns, following, packed, unpacked
from infer_agents.messages import MAX_COUNTED
from infer_agents.output import Output
from infer_agents.response_bodies import Continuation, ResponsesRequest
from infer_agents.response_tools import CloudTool
from infer_agents.store import OPEN, Record, Store, StoreError, TooLargeError

if TYPE_CHECKING:
    from infer.assemble.served import Served
    from infer.server.service import Service
    from infer_agents.seal import Seal

log = logging.getLogger(__name__)
T = TypeVar("T")

Status = Literal["in_progress", "completed", "incomplete"]
MOST_BACKGROUND = 256
"""How many responses a process computes in the background, or has waiting, at once."""
WATCH_S = 1.0
"""How often a process looks whether others have cancelled what it computes."""
# Why a response has failed that nobody computes any more.
LEFT = "The server ended before the response was complete; ask again."
UNKEPT = "The response could not be stored; ask again."
LIST_ITEMS = 20, 100
"""How many items a page of input items has, and at most."""


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
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
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


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    object: Literal["list"]
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    body: ResponsesRequest
    reply: Reply
    prompt: str | Sequence[int]
    past: bytes
    """The items of the earlier responses, in JSON."""
    form: bytes


Save = Callable[[Json, Sequence[int], FinishReason | None, int | str | None], Awaitable[None]]
"""Keeps a response that has ended: with the answer's tokens, and why it ended."""


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
        self._store = store
        self._store_default = store_default
        self._logged: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "infer-store")
        self._background: dict[str, asyncio.Task[None]] = {}
        # Further ones would take the engine's places from those who wait for their answers.
        self._running = asyncio.Semaphore(service.settings.engine.max_batch_size)
        self._unfinished: dict[str, Record] = {}
        """Those that could not be kept when they ended. They are to be kept as failed."""
        self._watching: asyncio.Task[None] | None = None
        if store is not None:
            self._thread.submit(self._bury, store)
            self._vocabulary = self._thread.submit(_vocabulary, service.served)

    async def close(self) -> None:
        """End what is computed in the background, and close the store."""
        tasks = [*self._background.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        if self._store is not None:
            self._store.close()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        asked = await self._asked(http, place=True)
        body, reply = asked.body, asked.reply
        requests = await self._service.requests(
            http,
            [asked.prompt],
            reply.params,
            body,
            prefix="resp",
            special=False,
            grammar_after=reply.grammar_after,
            thinking=reply.thinking_tokens,
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
        save = self._saving(http, asked, requests[0].prompt_token_ids) if response["store"] else None
        if body.background:
            return await self._begin(http, asked, response, output, requests)
        frames = functools.partial(_frames, http, output, save)
        if body.stream:
            return await self._service.stream(http, requests, frames)
        ended = await self._service.last(http, requests, frames)
        return await self._service.answer(http, ended["response"])

    async def get(self, http: web.Request) -> web.StreamResponse:
        query(http, include=None, include_obfuscation=None, stream=("false",))
        record = await self._found(http, http.match_info["response_id"])
        return web.Response(body=record.response, content_type="application/json", charset="utf-8")

    async def delete(self, http: web.Request) -> web.StreamResponse:
        id = http.match_info["response_id"]
        store, owner = self._owned(http, id)
        if not await self._for_client(store.delete, owner, id):
            raise unknown(id)
        if (task := self._background.get(id)) is not None:
            task.cancel()
        return await self._service.answer(http, {"id": id, "object": "response", "deleted": True})

    async def cancel(self, http: web.Request) -> web.StreamResponse:
        id = http.match_info["response_id"]
        record = await self._found(http, id)
        if not record.background:
            raise RequestError(f"The response {id!r} cannot be cancelled: it does not run in the background.")
        if record.status in OPEN:
            store, _ = self._owned(http, id)
            await self._for_client(_finish, store, record, "cancelled")
            if (task := self._background.get(id)) is not None:
                task.cancel()
            record = await self._found(http, id)
        return web.Response(body=record.response, content_type="application/json", charset="utf-8")

    async def list_items(self, http: web.Request) -> web.StreamResponse:
        asked = query(http, include=None, limit=None, order=("asc", "desc"), after=None)
        few, most = LIST_ITEMS
        limit = asked.get("limit", str(few))
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most):
            raise RequestError(f"limit = {limit[:100]!r} must be a number from 1 to {most}.", param="limit")
        id = http.match_info["response_id"]
        record = await self._found(http, id)
        items = await asyncio.to_thread(_shown_items, id, record.items)
        if asked.get("order", "desc") == "desc":
            items.reverse()
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError(f"after = {after!r} is no item of the response {id!r}.", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
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
        form = await self._form(body)
        if body.previous_response_id is None:
            reply = await self._reply(body)
            return Asked(body, reply, reply.prompt, b"[]", form)
        record = await self._found(http, body.previous_response_id, "previous_response_id")
        if record.status not in ("completed", "incomplete"):
            raise RequestError(
                f"The response {record.id!r} cannot be gone on from: its status is {record.status}.",
                param="previous_response_id",
            )
        past = _joined(record.items, record.output)
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

    async def _form(self, body: ResponsesRequest) -> bytes:
        """A digest of what a prompt depends on besides the items and the chat template; empty without a store."""
        if self._store is None:
            return b""
        vocabulary = await asyncio.wrap_future(self._vocabulary)
        parts = [vocabulary, body.instructions, body.tool_use().offered, body.hints, body.chat_template_kwargs]
        return hashlib.sha256(to_json(parts, inf_nan_mode="constants")).digest()

    # What is kept

    async def _in_thread(self, call: Callable[..., T], *given: Any) -> T:
        """The store's own thread, in which calls follow each other. It is for the store alone: answers wait for it
        before they end."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)

    async def _for_client(self, call: Callable[..., T], *given: Any) -> T:
        """``_in_thread``, with errors that tell clients nothing of the server's files. Raises RequestError, or
        QueueFullError."""
        try:
            return await self._in_thread(call, *given)
        except StoreError as error:
            raise _told(error) from None

    def _owned(self, http: web.Request, id: str, param: str | None = None) -> tuple[Store, bytes]:
        """The store, and whose records the client may see. Raises RequestError if there can be none."""
        if self._store is None:
            raise unknown(id, param)
        return self._store, self._store.owner(self._service.keys.owner(http))

    async def _found(self, http: web.Request, id: str, param: str | None = None) -> Record:
        """Raises RequestError."""
        store, owner = self._owned(http, id, param)

        def found() -> Record | None:
            record = store.get(owner, id)
            if record is not None and record.status in OPEN and store.is_gone(record.runner):
                _finish(store, record, "failed")
                record = store.get(owner, id)
            return record

        if (record := await self._for_client(found)) is None:
            raise unknown(id, param)
        return record

    def _bury(self, store: Store) -> None:
        """Say of responses whose server has ended that they have failed."""
        try:
            left = store.in_progress()
        except StoreError as error:
            log.warning("%s", error)
            return
        for owner, id, runner in left:
            try:
                if store.is_gone(runner) and (record := store.get(owner, id)) is not None:
                    _finish(store, record, "failed")
            except Exception:
                log.exception("the response %s remains in progress", id)

    def _record(self, asked: Asked, response: Json, **more: Any) -> Record:
        write = self._service.writer.pieces
        return Record(
            str(response["id"]),
            str(response["status"]),
            response=b"".join(write(response)),
            items=_joined(asked.past, asked.body.listed),
            output=b"".join(write([_unmeasured(item) for item in response["output"]])),
            **more,
        )

    def _saving(self, http: web.Request, asked: Asked, prompt: Sequence[int]) -> Save:
        assert self._store is not None
        store, owner = self._store, self._store.owner(self._service.keys.owner(http))

        async def save(
            response: Json, tokens: Sequence[int], reason: FinishReason | None, stop: int | str | None
        ) -> None:
            record = self._record(asked, response, **self._said(asked, response, prompt, tokens, reason, stop))
            try:
                await self._in_thread(store.put, owner, record)
            except StoreError as error:  # the answer itself is whole
                response["store"] = False
                if (said := type(error).__name__) not in self._logged:
                    self._logged.add(said)
                    log.error("%s The answer says store: false; further ones of the kind are not logged", error)

        return save

    def _said(
        self,
        asked: Asked,
        response: Json,
        prompt: Sequence[int],
        tokens: Sequence[int],
        reason: FinishReason | None,
        stop: int | str | None,
    ) -> dict[str, Any]:
        """What a record holds of an answer that has ended, to go on from."""
        if response["status"] not in ("completed", "incomplete") or response["output"][-1]["type"] == "reasoning":
            return {"form": asked.form}
        text, said = "", list(tokens)
        if reason == "stop" and not isinstance(stop, str) and said:
            text = self._service.served.tokenizer.decode([said.pop()], skip_special_tokens=False)
        return {"form": asked.form, "tokens": packed([*prompt, *said]), "stop": text}

    # What is computed in the background

    async def _begin(
        self, http: web.Request, asked: Asked, response: Json, output: Output, requests: Sequence[Request]
    ) -> web.StreamResponse:
        """Keep the response as queued, have a task compute it, and answer at once."""
        if self._store is None:
            raise RequestError(
                "background needs a store, and this server has none: see server.agents.store.", param="background"
            )
        if len(self._background) >= MOST_BACKGROUND:
            raise QueueFullError(f"{MOST_BACKGROUND} responses are computed in the background. Try again.")
        store, owner = self._store, self._store.owner(self._service.keys.owner(http))
        queued = response | {"status": "queued"}
        record = self._record(asked, queued, background=True, runner=store.runner)
        kept = asyncio.create_task(self._for_client(store.put, owner, record))
        task = self._background[record.id] = asyncio.create_task(
            self._compute(http, asked, output, requests, store, record, kept)
        )
        task.add_done_callback(lambda _: self._background.pop(record.id, None))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(store))
        await asyncio.shield(kept)  # a client that leaves now leaves a response that is computed
        return await self._service.answer(http, queued)

    async def _compute(
        self,
        http: web.Request,
        asked: Asked,
        output: Output,
        requests: Sequence[Request],
        store: Store,
        record: Record,
        kept: asyncio.Task[None],
    ) -> None:
        """Compute a response as soon as its ``record`` is ``kept``."""
        prompt = requests[0].prompt_token_ids

        async def save(
            response: Json, tokens: Sequence[int], reason: FinishReason | None, stop: int | str | None
        ) -> None:
            more = self._said(asked, response, prompt, tokens, reason, stop)
            await self._in_thread(store.update, self._record(asked, response, background=True, **more))

        count = TokenCount(requests)
        with http.app[INSIDE].stay():
            try:
                await kept
                async with self._running, aclosing(self._service.run(requests, patient=True)) as events:

                    async def counted() -> Events:
                        async for event in events:
                            raise_if_failed(event)
                            yield count.add(event), event

                    async with aclosing(_frames(http, output, save, counted(), count.usage, failures=True)) as frames:
                        async for frame in frames:
                            if frame["type"] == "response.in_progress":
                                started = self._record(asked, frame["response"], background=True)
                                await self._in_thread(store.update, started)
            except StoreError as error:
                log.error("the response %s is lost: %s", record.id, error)
                self._unfinished[record.id] = record
            except InferError:
                pass  # the client has been told, or the record has it
            except Exception:
                log.exception("the response %s failed", record.id)

    async def _watch(self, store: Store) -> None:
        """End what others have cancelled or deleted, and what could not be kept, as long as there is anything to
        end."""
        while self._background or self._unfinished:
            await asyncio.sleep(WATCH_S)
            running = [*self._background]
            try:
                for id, record in [*self._unfinished.items()]:
                    await self._in_thread(_finish, store, record, "failed", UNKEPT)
                    del self._unfinished[id]
                left = await self._in_thread(store.still_open, running)
            except StoreError as error:
                log.warning("%s", error)
                continue
            for id in running:
                if id not in left and (task := self._background.get(id)) is not None:
                    task.cancel()

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
            "store": self._store is not None
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


async def _frames(
    http: web.Request,
    output: Output,
    save: Save | None,
    events: Events,
    usage: Callable[[], Json],
    *,
    failures: bool = False,
) -> AsyncGenerator[Json]:
    """The events of a response. Before its last one, ``save`` keeps it, and also if it fails, if ``failures``."""
    for frame in output.begin():
        yield frame
    last: Event | None = None
    tokens: list[int] = []
    try:
        async for _, news in events:
            last = news
            tokens += news.token_ids
            for frame in output.push(news):
                yield frame
        reason, stop = (None, None) if last is None else (last.finish_reason, last.stop_reason)
        for frame in output.end(reason, usage()):
            if save is not None and "response" in frame:
                await save(frame["response"], tokens, reason, stop)
            yield frame
    except Exception as error:
        frame = output.failed(error_of(http, error))
        if failures and save is not None:
            await save(frame["response"], tokens, "error", None)
        else:
            frame["response"]["store"] = False
        yield frame
        raise


def _vocabulary(served: Served) -> str:
    """A digest of which tokens there are. Of a large vocabulary, it takes long."""
    tokens = sorted(served.tokenizer.get_vocab().items())
    return hashlib.sha256(repr((served.name, tokens)).encode(errors="surrogatepass")).hexdigest()


def unknown(id: str, param: str | None = None) -> RequestError:
    """The error for an id of which nothing is stored, or that belongs to another key. As in OpenAI's API, it is a 404
    for an id in a URL, and a 400 for one in a body, whose ``param`` it is."""
    if param is None:
        return NotFoundError(f"Response with id '{id[:100]}' not found.")
    return RequestError(
        f"Previous response with id '{id[:100]}' not found.", param=param, code="previous_response_not_found"
    )


def _told(error: StoreError) -> InferError:
    """What a client is told of an error whose message names the server's file. The log has that."""
    if isinstance(error, TooLargeError):
        return RequestError(f"{error} Ask for less, without background, or begin a new conversation.")
    log.error("%s", error)
    return QueueFullError("Responses cannot be stored or read at the moment. Try again later.")


def query(http: web.Request, **known: Sequence[str] | None) -> dict[str, str]:
    """The parameters of a URL. ``known`` has the values that each may have; None is any. Raises RequestError."""
    asked: dict[str, str] = {}
    for name, value in http.query.items():
        name = name.removesuffix("[]")
        if name not in known:
            raise RequestError(f"The parameter {name[:100]!r} is not supported; leave it out.", param=name)
        if (values := known[name]) is not None and value not in values:
            raise RequestError(
                f"{name} = {value[:100]!r} is not supported; it may be {' or '.join(values)}.", param=name
            )
        asked[name] = value
    return asked


def _joined(*lists: bytes) -> bytes:
    """JSON lists as one."""
    return b"[" + b",".join(inner for each in lists if (inner := each.strip()[1:-1].strip())) + b"]"


def _unmeasured(item: Json) -> Json:
    """An output item without log-probabilities, of which there may be more than of all else."""
    if item["type"] != "message":
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return item | {"content": parts}


def _finish(store: Store, record: Record, status: Literal["cancelled", "failed"], why: str = LEFT) -> bool:
    """End a record that nobody computes any more; ``why``, if it has failed. Returns False if it has ended already."""
    error = {"code": "server_error", "message": why} if status == "failed" else None
    response = from_json(record.response) | {"status": status, "error": error}
    return store.finish(record, status, to_json(response, inf_nan_mode="constants"))


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
