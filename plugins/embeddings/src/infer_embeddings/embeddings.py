"""POST /v1/embeddings: the final hidden states of texts, pooled and normalized."""

from __future__ import annotations

import base64
import functools
import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from infer.contracts.params import SamplingParams
from infer.contracts.request import Pooling, Request
from infer.contracts.server import Route
from infer.errors import RequestError
from infer_embeddings import many
from infer_server.events import Json, RequestFields, TokenCount
from infer_server.http.body import Body, Many, TokenIds, one_or_many
from infer_server.http.streams import Array

if TYPE_CHECKING:
    from infer_server.service import Service


class EmbeddingRequest(Body):
    """The body of POST /v1/embeddings."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    input: str | TokenIds | Many[str | TokenIds] = Field(
        union_mode="left_to_right", description="Text or token ids, or a list of up to 2,048 of these."
    )
    model: str | None = Field(None, description="The served model's name, or nothing.")
    encoding_format: Literal["float", "base64"] = Field("float", description="Numbers, or fp32 values in base64.")
    dimensions: int | None = Field(None, ge=1, description="Keep so many leading values, and normalize again.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens, such as EOS, to a text.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests with lower numbers are served earlier.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )
    user: str | None = Field(None, max_length=512, description="The end user's id.")
    safety_identifier: str | None = Field(None, max_length=512, description="As user, over which it takes precedence.")

    @property
    def prompts(self) -> list[str | TokenIds]:
        return one_or_many(self.input)


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def routes(service: Service) -> list[Route]:
    own = Embedder(service)
    return [
        Route("POST", "/v1/embeddings", own.handle, "Embed texts.", Embeddings, EmbeddingRequest),
    ]


class Embedder:
    """The handler of POST /v1/embeddings."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        body = await service.read(http, EmbeddingRequest, place=True)
        rows, usage = await self.pooled(
            http, body.prompts, body, "input", special=body.add_special_tokens, dimensions=body.dimensions
        )
        made = functools.partial(written, body.dimensions, body.encoding_format == "base64")
        data = Array(await service.writer.each(lambda row: made(*row), rows, len(rows)))
        frame: Json = {"object": "list", "data": data, "model": service.model_name(http), "usage": usage}
        return await service.answer(http, frame)

    async def pooled(
        self,
        http: web.Request,
        inputs: Sequence[str | TokenIds],
        fields: RequestFields,
        field: str,
        *,
        special: bool = True,
        dimensions: int | None = None,
    ) -> tuple[list[tuple[int, bytes]], Json]:
        """The index and the pooled hidden state, as fp32 values, of each input, and the usage. ``field`` is the body's
        name for the inputs. Raises RequestError, also if the model has fewer than ``dimensions``."""
        service, pooling = self._service, self._service.served.pooling
        if pooling not in ("last", "mean"):
            raise RequestError(
                f"This checkpoint makes embeddings by {pooling!r}; only 'last' and 'mean' are supported."
            )
        many.check_count(len(inputs), field)
        size = service.served.hidden_size
        if dimensions is not None and (size is None or dimensions > size):
            have = "an unknown number" if size is None else size
            raise RequestError(
                f"dimensions is {dimensions}, but this model's embeddings have {have}.", param="dimensions"
            )
        params = SamplingParams(max_tokens=1, temperature=0)
        how = {"special": special, "pooling": cast(Pooling, pooling)}
        requests, usage = await many.make(service, http, inputs, _itself, params, fields, field, **how)
        return await self._run(requests), usage

    async def _run(self, requests: list[Request]) -> list[tuple[int, bytes]]:
        """Each request's index, and its pooled hidden state."""
        count, found = TokenCount(requests), dict[int, bytes]()
        async with aclosing(many.run(self._service, requests)) as events:
            async for event in events:
                index = count.add(event)
                if event.embedding is not None:
                    found[index] = event.embedding
        return [(index, found[index]) for index in range(len(requests))]


async def _itself(prompt: str | TokenIds) -> str | TokenIds:
    return prompt


def written(dimensions: int | None, packed: bool, index: int, pooled: bytes) -> bytes:
    """An embedding as JSON."""
    values = array("f", pooled)
    vector = normalized(values[:dimensions])
    if packed:
        text = f'"{base64.b64encode(vector.tobytes()).decode()}"'
    else:
        text = f"[{', '.join([f'{x:.9g}' for x in vector])}]"
    return f'{{"object": "embedding", "index": {index}, "embedding": {text}}}'.encode()


def normalized(values: array[float]) -> array[float]:
    """Of length 1. The sum of squares is rounded once, so that it does not depend on the order of its terms."""
    length = max(math.sqrt(math.fsum([x * x for x in values])), 1e-12)
    return array("f", [x / length for x in values])
