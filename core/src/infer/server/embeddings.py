"""POST /v1/embeddings: the final hidden states of texts, pooled and normalised."""

from __future__ import annotations

import asyncio
import base64
import functools
import math
from array import array
from contextlib import aclosing
from typing import cast

from aiohttp import web

from infer.contracts.params import SamplingParams
from infer.contracts.protocols import Route
from infer.contracts.request import Pooling, Request
from infer.errors import RequestError
from infer.server import answers
from infer.server.schemas import EmbeddingRequest
from infer.server.service import CALLER, Json, Service, TokenCount, raise_if_failed
from infer.server.writing import Array

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs together."""


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
            raise RequestError(f"This checkpoint makes embeddings by {pooling!r}; infer knows 'last' and 'mean' only.")
        if len(inputs) > MAX_INPUTS:
            raise RequestError(f"This has {len(inputs)} inputs; at most {MAX_INPUTS} are allowed.", param="input")
        # In waves, so that one request does not take all places.
        size = min(service.settings.engine.max_batch_size, service.settings.server.max_choices)
        params, waves, tokens = SamplingParams(max_tokens=1, temperature=0), list[list[Request]](), 0
        for begin in range(0, len(inputs), size):
            await asyncio.sleep(0)  # short texts are tokenized here
            wave = inputs[begin : begin + size]
            prefix, special = f"embd-{begin}", asked.add_special_tokens
            waves.append(
                await service.requests(
                    http, wave, params, asked, prefix=prefix, special=special, pooling=cast(Pooling, pooling)
                )
            )
            tokens += sum(len(request.prompt_token_ids) for request in waves[-1])
            if tokens > MAX_TOKENS:
                raise RequestError(f"The inputs have more than {MAX_TOKENS} tokens in all.", param="input")
        usage: Json = {"prompt_tokens": tokens, "total_tokens": tokens}
        http[CALLER].usage = usage
        rows: list[tuple[int, bytes]] = []
        for wave_of in waves:
            rows += await self._run(wave_of, len(rows))
        made = functools.partial(written, asked.dimensions, asked.encoding_format == "base64")
        data = Array(await service.writer.each(lambda row: made(*row), rows, len(rows)))
        frame: Json = {"object": "list", "data": data, "model": service.served.name, "usage": usage}
        return await service.answer(http, frame)

    async def _run(self, requests: list[Request], first: int) -> list[tuple[int, bytes]]:
        """Each request's index, counted from ``first``, and its pooled hidden state."""
        count, found = TokenCount(requests), dict[int, bytes]()
        async with aclosing(self._service.run(requests)) as events:
            async for event in events:
                raise_if_failed(event)
                if event.embedding is not None:
                    found[count.add(event)] = event.embedding
        return [(first + index, found[index]) for index in range(len(requests))]


def written(dimensions: int | None, packed: bool, index: int, pooled: bytes) -> bytes:
    """An embedding as JSON. Raises RequestError if it has fewer dimensions than are wanted."""
    values = array("f", pooled)
    if dimensions is not None and dimensions > len(values):
        raise RequestError(
            f"dimensions is {dimensions}, but this model's embeddings have {len(values)}.", param="dimensions"
        )
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
