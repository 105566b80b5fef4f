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
from collections.abc import Sequence
from contextlib import aclosing

from aiohttp import web
from pydantic_core import to_json

from infer.contracts.params import SamplingParams
from infer.contracts.server import Route
from infer.errors import RequestError
from infer.server import answers, many
from infer.server.decisions import TAIL_CHARS, label_ids
from infer.server.http.errors import REQUEST_ID
from infer.server.http.streams import Array
from infer.server.schemas import RerankRequest, ScoreRequest
from infer.server.service import Json, Service, TokenCount, raise_if_failed

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
LABELS = ("yes", "no")


def routes(service: Service, settings: object) -> list[Route]:
    own = Rerank(service)
    return [
        Route("POST", "/v1/rerank", own.rerank, "Rank documents by a query.", answers.Reranked, RerankRequest),
        Route("POST", "/v1/score", own.score, "Score pairs of texts.", answers.Scores, ScoreRequest),
    ]


class Rerank:
    """The handlers of POST /v1/rerank and POST /v1/score."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._label_ids = functools.lru_cache(16)(functools.partial(label_ids, service.served.tokenizer))

    async def rerank(self, http: web.Request) -> web.StreamResponse:
        asked = await self._service.read(http, RerankRequest)
        documents = asked.texts
        many.check_count(len(documents), "documents")
        pairs = [(asked.query, document) for document in documents]
        scores, usage = await self._scores(http, asked, pairs, asked.instruction, "documents")
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n or None]

        def written(i: int) -> bytes:
            shown = {"document": {"text": documents[i]}} if asked.return_documents else {}
            return json.dumps({"index": i, **shown, "relevance_score": scores[i]}, ensure_ascii=False).encode()

        results = Array(await self._service.writer.each(written, ranked, len(ranked)))
        frame: Json = {"id": f"rerank-{http[REQUEST_ID]}", "model": self._service.served.name}
        return await self._service.answer(http, frame | {"results": results, "usage": usage})

    async def score(self, http: web.Request) -> web.StreamResponse:
        asked = await self._service.read(http, ScoreRequest)
        first, second = asked.first, asked.second
        many.check_count(max(len(first), len(second)), "text_2")
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give one text_1 for all, or one for each.",
                param="text_1",
            )
        pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
        scores, usage = await self._scores(http, asked, pairs, asked.instruction, "text_2")
        data = Array([b'{"index": %d, "object": "score", "score": %.17g}' % each for each in enumerate(scores)])
        frame = self._service.frame(f"score-{http[REQUEST_ID]}", "list")
        return await self._service.answer(http, frame | {"data": data, "usage": usage})

    async def _scores(
        self,
        http: web.Request,
        asked: RerankRequest | ScoreRequest,
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
        requests, usage = await many.make(self._service, http, pairs, prompt, params, asked, field, special=special)
        count, scores = TokenCount(requests), [0.0] * len(requests)
        async with aclosing(many.run(self._service, requests)) as events:
            async for event in events:
                raise_if_failed(event)
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
