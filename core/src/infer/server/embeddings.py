"""POST /v1/embeddings: the final hidden states of texts, pooled and normalised."""

from __future__ import annotations

import base64
import functools
import math
from array import array
from contextlib import aclosing
from typing import cast

from aiohttp import web

from infer.contracts.params import SamplingParams
from infer.contracts.request import Pooling, Request
from infer.contracts.server import Route
from infer.errors import RequestError
from infer.server import answers, many
from infer.server.http.body import TokenIds
from infer.server.http.streams import Array
from infer.server.schemas import EmbeddingRequest
from infer.server.service import Json, Service, TokenCount, raise_if_failed


def routes(service: Service, settings: object) -> list[Route]:
    own = Embeddings(service)
    return [
        Route("POST", "/v1/embeddings", own.handle, "Embed texts.", answers.Embeddings, EmbeddingRequest),
    ]


class Embeddings:
    """The handler of POST /v1/embeddings."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        asked = await service.read(http, EmbeddingRequest)
        pooling, inputs = service.served.pooling, asked.prompts
        if pooling not in ("last", "mean"):
            raise RequestError(
                f"This checkpoint makes embeddings by {pooling!r}; only 'last' and 'mean' are supported."
            )
        many.check_count(len(inputs), "input")
        size = service.served.hidden_size
        if asked.dimensions is not None and (size is None or asked.dimensions > size):
            have = "an unknown number" if size is None else size
            raise RequestError(
                f"dimensions is {asked.dimensions}, but this model's embeddings have {have}.", param="dimensions"
            )
        params, special = SamplingParams(max_tokens=1, temperature=0), asked.add_special_tokens
        how = {"special": special, "pooling": cast(Pooling, pooling)}
        requests, usage = await many.make(service, http, inputs, _itself, params, asked, "input", **how)
        rows = await self._run(requests)
        made = functools.partial(written, asked.dimensions, asked.encoding_format == "base64")
        data = Array(await service.writer.each(lambda row: made(*row), rows, len(rows)))
        frame: Json = {"object": "list", "data": data, "model": service.served.name, "usage": usage}
        return await service.answer(http, frame)

    async def _run(self, requests: list[Request]) -> list[tuple[int, bytes]]:
        """Each request's index, and its pooled hidden state."""
        count, found = TokenCount(requests), dict[int, bytes]()
        async with aclosing(many.run(self._service, requests)) as events:
            async for event in events:
                raise_if_failed(event)
                if event.embedding is not None:
                    found[count.add(event)] = event.embedding
        return [(index, found[index]) for index in range(len(requests))]


async def _itself(prompt: str | TokenIds) -> str | TokenIds:
    return prompt


def written(dimensions: int | None, packed: bool, index: int, pooled: bytes) -> bytes:
    """An embedding as JSON."""
    values = array("f", pooled)
    vector = normalised(values[:dimensions])
    if packed:
        text = f'"{base64.b64encode(vector.tobytes()).decode()}"'
    else:
        text = f"[{', '.join([f'{x:.9g}' for x in vector])}]"
    return f'{{"object": "embedding", "index": {index}, "embedding": {text}}}'.encode()


def normalised(values: array[float]) -> array[float]:
    """Of length 1. The sum of squares is rounded once, so that it does not depend on the order of its terms."""
    length = max(math.sqrt(math.fsum([x * x for x in values])), 1e-12)
    return array("f", [x / length for x in values])
