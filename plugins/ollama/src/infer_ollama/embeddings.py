"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from infer.contracts.server import Route
from infer_embeddings.embeddings import Embedder, normalized
from infer_ollama.bodies import EmbedBody, OldEmbedBody
from infer_ollama.models import check_served
from infer_server.events import Json
from infer_server.http.streams import Array
from infer_server.http.wire import Ollama

if TYPE_CHECKING:
    from infer_server.service import Service


class Embedded(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]


class OldEmbedded(TypedDict):
    embedding: list[float]


def routes(service: Service) -> list[Route]:
    own = Embeddings(service)
    return [
        Route("POST", "/api/embed", own.embed, "Embed texts.", Embedded, EmbedBody, wire_format=Ollama()),
        Route("POST", "/api/embeddings", own.old, "Embed a text.", OldEmbedded, OldEmbedBody, wire_format=Ollama()),
    ]


class Embeddings:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._embedder = Embedder(service)

    async def embed(self, http: web.Request) -> web.StreamResponse:
        began = time.perf_counter_ns()
        body = await self._service.read(http, EmbedBody, place=True)
        check_served(self._service, http, body)
        answer: Json = {"model": body.model_name, "embeddings": []}
        if not body.input:  # as Ollama does for a model that is to be loaded
            return await self._service.answer(http, answer)
        inputs = [body.input] if isinstance(body.input, str) else list(body.input)
        asked = time.perf_counter_ns()
        vectors, count = await self._vectors(http, inputs, body, "input", body.dimensions)
        return await self._service.answer(
            http,
            answer
            | {
                "embeddings": Array(vectors),
                "total_duration": time.perf_counter_ns() - began,
                "load_duration": asked - began,
                "prompt_eval_count": count,
            },
        )

    async def old(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, OldEmbedBody, place=True)
        check_served(self._service, http, body)
        if not body.prompt:
            return await self._service.answer(http, {"embedding": []})
        (vector,), _ = await self._vectors(http, [body.prompt], body, "prompt", None)
        return web.Response(body=b'{"embedding": %b}' % vector, content_type="application/json", charset="utf-8")

    async def _vectors(
        self,
        http: web.Request,
        inputs: Sequence[str],
        body: EmbedBody | OldEmbedBody,
        field: str,
        dimensions: int | None,
    ) -> tuple[list[bytes], int]:
        """The embedding of each input as JSON, and how many tokens they have in all."""
        rows, usage = await self._embedder.pooled(http, inputs, body, field, dimensions=dimensions)

        def written(row: tuple[int, bytes]) -> bytes:
            return f"[{', '.join([f'{x:.9g}' for x in normalized(array('f', row[1])[:dimensions])])}]".encode()

        return await self._service.writer.each(written, rows, len(rows)), usage["prompt_tokens"]
