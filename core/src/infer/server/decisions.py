"""POST /v1/decisions and /v1/systemone: typed questions on a state, answered by how likely the model finds each label.

The shapes are those of TypeSafe's System One API. Nothing is generated: a question is a prompt whose next token is the
label of an answer. All questions begin with the state, so a pool that shares prefixes holds it once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from aiohttp import web

from infer.errors import RequestError
from infer.request import Request, SamplingParams
from infer.server.errors import REQUEST_ID
from infer.server.schemas import ChoiceQuestion, DecisionsRequest, Question, ScoreQuestion
from infer.server.service import CALLER, Json, Service

SYSTEM = (
    "Judge the state you are given. Answer the question with the label of the answer that fits best, and nothing else."
)
TAIL_CHARS = 32


class Decisions:
    """The handler and what it needs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.Response:
        asked = await self._service.read(http, DecisionsRequest)
        state = asked.state if isinstance(asked.state, str) else json.dumps(asked.state, ensure_ascii=False, indent=1)
        made: dict[str, tuple[Request, list[int]]] = {}
        for name, question in asked.questions.items():
            prompt, special = await self._prompt(state, question)
            ids = self._label_ids(prompt, _labels(question))
            params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=tuple(ids))
            prefix = f"decision-{len(made)}"
            (request,) = await self._service.requests(http, [prompt], params, asked, prefix=prefix, special=special)
            made[name] = request, ids
        requests = [request for request, _ in made.values()]
        # The first puts the state into the cache, where the others find it.
        answers, tokens = [], 0
        for part in (requests[:1], requests[1:]):
            found, used = await self._service.whole(http, part)
            answers += found
            tokens += used["prompt_tokens"]
        http[CALLER].usage = usage = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
        decided = {}
        for (name, question), (_, ids), answer in zip(asked.questions.items(), made.values(), answers, strict=True):
            assert answer.logprobs is not None
            decided[name] = _answer(question, _normalized(dict(answer.logprobs[0].top), ids))
        return web.json_response(
            {
                "id": f"decision-{http[REQUEST_ID]}",
                "object": "decision",
                "model": self._service.served.name,
                "answers": decided,
                "usage": usage,
            }
        )

    async def _prompt(self, state: str, question: Question) -> tuple[str, bool]:
        """And whether special tokens are still to be added."""
        text = f"State:\n{state}\n\nQuestion: {question.instructions}\nAnswers:\n" + "".join(
            f"{label}: {meaning}\n" if meaning else f"{label}\n"
            for label, meaning in zip(_labels(question), _meanings(question), strict=True)
        )
        if self._service.served.template is None:
            return f"{SYSTEM}\n\n{text}Label:\n", True
        messages = [{"role": "user", "content": f"{SYSTEM}\n\n{text}"}]
        return await self._service.render(
            messages, tools=None, add_generation_prompt=True, enable_thinking=False
        ), False

    def _label_ids(self, prompt: str, labels: Sequence[str]) -> list[int]:
        """The token that each label begins with where the prompt ends."""
        encode = self._service.served.tokenizer.encode
        tail = prompt[-TAIL_CHARS:]
        before = encode(tail, add_special_tokens=False).ids
        ids = []
        for label in labels:
            after = encode(tail + label, add_special_tokens=False).ids
            goes_on = after[: len(before)] == before and len(after) > len(before)
            ids.append(after[len(before)] if goes_on else encode(label, add_special_tokens=False).ids[0])
        if len(set(ids)) < len(ids):
            raise RequestError("This model's tokenizer begins several of the labels with one token.", param="questions")
        return ids


def _labels(question: Question) -> list[str]:
    match question:
        case ChoiceQuestion():
            return list(ascii_uppercase[: len(question.criteria)])
        case ScoreQuestion():
            return [str(level) for level in range(len(question.criteria))]
    return ["yes", "no"]


def _meanings(question: Question) -> list[str | None]:
    match question:
        case ChoiceQuestion():
            return [f"{name}: {meaning}" if meaning else name for name, meaning in question.criteria.items()]
        case ScoreQuestion():
            return list(question.criteria)
    criteria = question.criteria
    return [criteria.true, criteria.false] if criteria else [None, None]


def _normalized(logprobs: Mapping[int, float], ids: Sequence[int]) -> list[float]:
    """Probabilities of the labels among themselves."""
    most = max(logprobs[id] for id in ids)
    weights = [math.exp(logprobs[id] - most) for id in ids]
    return [weight / sum(weights) for weight in weights]


def _answer(question: Question, probabilities: Sequence[float]) -> Json:
    answer: dict[str, Any]
    match question:
        case ChoiceQuestion():
            names = list(question.criteria)
            best = max(range(len(names)), key=lambda i: probabilities[i])
            answer = {"choice": names[best], "probabilities": dict(zip(names, probabilities, strict=True))}
        case ScoreQuestion():
            score = sum(level * p for level, p in enumerate(probabilities))
            answer = {"score": score, "probabilities": list(probabilities), "legend": list(question.criteria)}
        case _:
            return {"type": question.type, "noul": probabilities[0]}
    return {"type": question.type, **answer, "confidence": _confidence(probabilities)}


def _confidence(probabilities: Sequence[float]) -> float:
    """1 where one answer has it all, 0 where all are alike: one minus the entropy's share of its maximum."""
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return 1 - entropy / math.log(len(probabilities))
