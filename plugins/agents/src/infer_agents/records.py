"""What is kept of responses, as their handlers see it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from aiohttp import web
from pydantic_core import from_json, to_json

from infer.contracts.request import FinishReason
from infer.errors import InferError, QueueFullError, RequestError
from infer_agents.continuing import packed
from infer_agents.response_bodies import ResponsesRequest
from infer_agents.store import OPEN, Record, Store, StoreError, TooLargeError
from infer_server.events import Json
from infer_server.http.errors import NotFoundError
from infer_server.replies import Reply

if TYPE_CHECKING:
    from infer.assemble.served import Served
    from infer_server.service import Service

log = logging.getLogger(__name__)
T = TypeVar("T")

LEFT = "The server ended before the response was complete; ask again."
"""Why a response has failed that nobody computes any more."""


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


class Records:
    """The records of a store. There may be none: ``store`` is None if nothing can be kept."""

    def __init__(self, service: Service, store: Store | None) -> None:
        self._service = service
        self._store = store
        self._logged: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "infer-store")
        self._vocabulary: Future[str] | None = None
        """It is asked for by the first request, not at the start: it would hold up the first answer of any API."""
        if store is not None:
            self._thread.submit(self._bury, store)

    @property
    def kept(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        if self._store is not None:
            self._store.close()

    async def form(self, body: ResponsesRequest) -> bytes:
        """A digest of what a prompt depends on besides the items and the chat template; empty without a store."""
        if self._store is None:
            return b""
        if self._vocabulary is None:
            self._vocabulary = self._thread.submit(_vocabulary, self._service.served)
        vocabulary = await asyncio.shield(asyncio.wrap_future(self._vocabulary))  # others wait for it, too
        parts = [vocabulary, body.instructions, body.tool_use().offered, body.hints, body.chat_template_kwargs]
        return hashlib.sha256(to_json(parts, inf_nan_mode="constants")).digest()

    async def in_thread(self, call: Callable[..., T], *given: Any) -> T:
        """The store's own thread, in which calls follow each other. It is for the store alone: answers wait for it
        before they end."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)

    async def for_client(self, call: Callable[..., T], *given: Any) -> T:
        """``in_thread``, with errors that tell clients nothing of the server's files. Raises RequestError, or
        QueueFullError."""
        try:
            return await self.in_thread(call, *given)
        except StoreError as error:
            raise told(error) from None

    def owned(self, http: web.Request, id: str, param: str | None = None) -> tuple[Store, bytes]:
        """The store, and whose records the client may see. Raises RequestError if there can be none."""
        if self._store is None:
            raise unknown(id, param)
        return self._store, self._store.owner(self._service.keys.owner(http))

    async def found(self, http: web.Request, id: str, param: str | None = None) -> Record:
        """Raises RequestError."""
        store, owner = self.owned(http, id, param)

        def stored() -> Record | None:
            record = store.get(owner, id)
            if record is not None and record.status in OPEN and store.is_gone(record.runner):
                finish(store, record, "failed")
                record = store.get(owner, id)
            return record

        if (record := await self.for_client(stored)) is None:
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
                    finish(store, record, "failed")
            except Exception:
                log.exception("the response %s remains in progress", id)

    def record(self, asked: Asked, response: Json, **more: Any) -> Record:
        write = self._service.writer.pieces
        return Record(
            str(response["id"]),
            str(response["status"]),
            response=b"".join(write(response)),
            items=joined(asked.past, asked.body.listed),
            output=b"".join(write([_unmeasured(item) for item in response["output"]])),
            **more,
        )

    def saving(self, http: web.Request, asked: Asked, prompt: Sequence[int]) -> Save:
        assert self._store is not None
        store, owner = self._store, self._store.owner(self._service.keys.owner(http))

        async def save(
            response: Json, tokens: Sequence[int], reason: FinishReason | None, stop: int | str | None
        ) -> None:
            record = self.record(asked, response, **self.said(asked, response, prompt, tokens, reason, stop))
            try:
                await self.in_thread(store.put, owner, record)
            except StoreError as error:  # the answer itself is whole
                response["store"] = False
                if (said := type(error).__name__) not in self._logged:
                    self._logged.add(said)
                    log.error("%s The answer says store: false; further ones of the kind are not logged", error)

        return save

    def said(
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


def told(error: StoreError) -> InferError:
    """What a client is told of an error whose message names the server's file. The log has that."""
    if isinstance(error, TooLargeError):
        return RequestError(f"{error} Ask for less, without background, or begin a new conversation.")
    log.error("%s", error)
    return QueueFullError("Responses cannot be stored or read at the moment. Try again later.")


def joined(*lists: bytes) -> bytes:
    """JSON lists as one."""
    return b"[" + b",".join(inner for each in lists if (inner := each.strip()[1:-1].strip())) + b"]"


def _unmeasured(item: Json) -> Json:
    """An output item without log-probabilities, of which there may be more than of all else."""
    if item["type"] != "message":
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return item | {"content": parts}


def finish(store: Store, record: Record, status: Literal["cancelled", "failed"], why: str = LEFT) -> bool:
    """End a record that nobody computes any more; ``why``, if it has failed. Returns False if it has ended already."""
    error = {"code": "server_error", "message": why} if status == "failed" else None
    response = from_json(record.response) | {"status": status, "error": error}
    return store.finish(record, status, to_json(response, inf_nan_mode="constants"))
