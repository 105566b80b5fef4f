"""Responses that are computed in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from infer.contracts.request import FinishReason, Request
from infer.errors import InferError, QueueFullError, RequestError
from infer_agents.output import Output, frames
from infer_agents.records import Asked, Records, finish
from infer_agents.store import Record, Store, StoreError
from infer_server.events import Events, Json, TokenCount
from infer_server.http.access import INSIDE

if TYPE_CHECKING:
    from infer_server.service import Service

log = logging.getLogger(__name__)

MOST_BACKGROUND = 256
"""How many responses a process computes in the background, or has waiting, at once."""
WATCH_S = 1.0
"""How often a process looks whether others have cancelled what it computes."""
UNKEPT = "The response could not be stored; ask again."
"""Why a response has failed that could not be kept when it ended."""


class Background:
    """Computes responses in tasks of its own, and keeps them in ``records``."""

    def __init__(self, service: Service, records: Records) -> None:
        self._service = service
        self._records = records
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Further ones would take the engine's places from those who wait for their answers.
        self._running = asyncio.Semaphore(service.settings.engine.max_batch_size)
        self._unfinished: dict[str, Record] = {}
        """Those that could not be kept when they ended. They are to be kept as failed."""
        self._watching: asyncio.Task[None] | None = None

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, id: str) -> None:
        """Compute no more of a response."""
        if (task := self._tasks.get(id)) is not None:
            task.cancel()

    async def begin(
        self, http: web.Request, asked: Asked, response: Json, output: Output, requests: Sequence[Request]
    ) -> web.StreamResponse:
        """Keep the response as queued, have a task compute it, and answer at once."""
        if not self._records.kept:
            raise RequestError(
                "background needs a store, and this server has none: see server.agents.store.", param="background"
            )
        if len(self._tasks) >= MOST_BACKGROUND:
            raise QueueFullError(f"{MOST_BACKGROUND} responses are computed in the background. Try again.")
        store, owner = self._records.owned(http, str(response["id"]))
        queued = response | {"status": "queued"}
        record = self._records.record(asked, queued, background=True, runner=store.runner)
        kept = asyncio.create_task(self._records.for_client(store.put, owner, record))
        task = self._tasks[record.id] = asyncio.create_task(
            self._compute(http, asked, output, requests, store, record, kept)
        )
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))
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
            more = self._records.said(asked, response, prompt, tokens, reason, stop)
            await self._records.in_thread(store.update, self._records.record(asked, response, background=True, **more))

        count = TokenCount(requests)
        with http.app[INSIDE].stay():
            try:
                await kept
                async with self._running, aclosing(self._service.door.stream(*requests, patient=True)) as events:

                    async def counted() -> Events:
                        async for event in events:
                            yield count.add(event), event

                    made = frames(http, output, save, counted(), count.usage, failures=True)
                    async with aclosing(made) as told:
                        async for frame in told:
                            if frame["type"] == "response.in_progress":
                                started = self._records.record(asked, frame["response"], background=True)
                                await self._records.in_thread(store.update, started)
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
        while self._tasks or self._unfinished:
            await asyncio.sleep(WATCH_S)
            running = [*self._tasks]
            try:
                for id, record in [*self._unfinished.items()]:
                    await self._records.in_thread(finish, store, record, "failed", UNKEPT)
                    del self._unfinished[id]
                left = await self._records.in_thread(store.still_open, running)
            except StoreError as error:
                log.warning("%s", error)
                continue
            for id in running:
                if id not in left:
                    self.end(id)
