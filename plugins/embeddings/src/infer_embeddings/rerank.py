"""POST /v1/rerank and /v1/score: how relevant documents are to a query, by the model's probability of "yes".

The model is asked as Qwen3-Reranker was trained to be, in its chat template, and the answer's first token is compared:
a score is the probability of "yes" beside that of "no". No text is generated. All prompts of a query begin alike, so a
pool that shares prefixes computes that part once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar, Literal, NotRequired, Self

from aiohttp import web
from pydantic import Field, model_validator
from pydantic_core import to_json
from typing_extensions import TypedDict

from infer.contracts.params import SamplingParams
from infer.contracts.server import Route
from infer.errors import RequestError
from infer_embeddings import many
from infer_embeddings.embeddings import EmbeddingUsage
from infer_embeddings.labels import TAIL_CHARS, label_ids
from infer_server.events import Json, TokenCount
from infer_server.http.body import Body, Many
from infer_server.http.errors import REQUEST_ID
from infer_server.http.streams import Array

if TYPE_CHECKING:
    from infer_server.service import Service

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
LABELS = ("yes", "no")


class Document(Body):
    text: str


class Compared(Body):
    """What the bodies of POST /v1/rerank and POST /v1/score share."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    instruction: str | None = Field(None, description="What to judge by; by default, whether it answers a search.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests with lower numbers are served earlier.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )
    user: str | None = Field(None, max_length=512, description="The end user's id.")
    safety_identifier: str | None = Field(None, max_length=512, description="As user, over which it takes precedence.")


class RerankRequest(Compared):
    """The body of POST /v1/rerank."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "documents", "messages": "documents"}

    query: str
    documents: Many[str | Document] = Field(min_length=1, description="Up to 2,048 texts, or objects with a text.")
    top_n: int | None = Field(None, ge=0, description="Return so many of the best; 0 or nothing: all.")
    return_documents: bool = Field(True, description="Repeat the documents in the answer.")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(Compared):
    """The body of POST /v1/score."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "text_2", "messages": "text_2"}

    text_1: str | Many[str] = Field(description="The query, or one for each of text_2.")
    text_2: str | Many[str] = Field(description="A document, or up to 2,048 of them.")

    @model_validator(mode="after")
    def _some(self) -> Self:
        if (not self.text_1 and self.text_1 != "") or (not self.text_2 and self.text_2 != ""):
            raise ValueError("text_1 and text_2 must not be empty lists")
        return self

    @property
    def first(self) -> list[str]:
        return [self.text_1] if isinstance(self.text_1, str) else list(self.text_1)

    @property
    def second(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)


class RankedDocument(TypedDict):
    index: int
    document: NotRequired[dict[str, str]]
    relevance_score: float


class Reranked(TypedDict):
    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


def routes(service: Service) -> list[Route]:
    own = Rerank(service)
    return [
        Route("POST", "/v1/rerank", own.rerank, "Rank documents by a query.", Reranked, RerankRequest),
        Route("POST", "/v1/score", own.score, "Score pairs of texts.", Scores, ScoreRequest),
    ]


class Rerank:
    """The handlers of POST /v1/rerank and POST /v1/score."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._label_ids = functools.lru_cache(16)(functools.partial(label_ids, service.served.tokenizer))

    async def rerank(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, RerankRequest, place=True)
        documents = body.texts
        many.check_count(len(documents), "documents")
        pairs = [(body.query, document) for document in documents]
        scores, usage = await self._scores(http, body, pairs, body.instruction, "documents")
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]

        def written(i: int) -> bytes:
            shown = {"document": {"text": documents[i]}} if body.return_documents else {}
            return json.dumps({"index": i, **shown, "relevance_score": scores[i]}, ensure_ascii=False).encode()

        results = Array(await self._service.writer.each(written, ranked, len(ranked)))
        frame: Json = {"id": f"rerank-{http[REQUEST_ID]}", "model": self._service.model_name(http)}
        return await self._service.answer(http, frame | {"results": results, "usage": usage})

    async def score(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, ScoreRequest, place=True)
        first, second = body.first, body.second
        many.check_count(max(len(first), len(second)), "text_2")
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give one text_1 for all, or one for each.",
                param="text_1",
            )
        pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
        scores, usage = await self._scores(http, body, pairs, body.instruction, "text_2")
        data = Array([b'{"index": %d, "object": "score", "score": %.17g}' % each for each in enumerate(scores)])
        frame = self._service.frame(http, f"score-{http[REQUEST_ID]}", "list")
        return await self._service.answer(http, frame | {"data": data, "usage": usage})

    async def _scores(
        self,
        http: web.Request,
        body: RerankRequest | ScoreRequest,
        pairs: Sequence[tuple[str, str]],
        instruction: str | None,
        field: str,
    ) -> tuple[list[float], Json]:
        """The probability of "yes" for each (query, document), and the usage. Raises RequestError."""

        async def prompt(pair: tuple[str, str]) -> str:
            return await self._prompt(instruction or INSTRUCTION, *pair)

        first = await prompt(pairs[0])
        ids = await asyncio.to_thread(self._label_ids, first[-TAIL_CHARS:], LABELS)
        params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids)
        special = self._service.served.template is None
        requests, usage = await many.make(self._service, http, pairs, prompt, params, body, field, special=special)
        count, scores = TokenCount(requests), [0.0] * len(requests)
        async with aclosing(many.run(self._service, requests)) as events:
            async for event in events:
                index = count.add(event)
                for entry in event.logprobs:
                    found = dict(entry.top)
                    scores[index] = 1 / (1 + math.exp(min(found[ids[1]] - found[ids[0]], 700)))
        return scores, usage

    async def _prompt(self, instruction: str, query: str, document: str) -> str:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        if self._service.served.template is None:
            return f"{SYSTEM}\n\n{text}\n\nAnswer: "
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        return await self._service.conversation.render(
            to_json(messages), tools=None, add_generation_prompt=True, enable_thinking=False
        )
