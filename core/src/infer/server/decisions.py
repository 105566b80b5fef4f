"""POST /v1/decisions and /v1/systemone: answer typed questions about a state by the model's probability of each label.

Requests and answers have the formats of OpenAI's decisions and of TypeSafe's System One. No text is generated: each
question becomes a prompt whose next token is the label of an answer. All prompts begin with the state, so a pool that
shares prefixes holds the state once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Mapping, Sequence
from itertools import product, repeat
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

from aiohttp import web
from pydantic_core import to_json
from tokenizers import Tokenizer

from infer.contracts.params import SamplingParams
from infer.contracts.server import Route
from infer.errors import RequestError
from infer.llm import Completion
from infer.server import answers, many
from infer.server.decision_schemas import (
    ChoiceQuestion,
    Choices,
    DecisionsRequest,
    Levels,
    Predicate,
    Questions,
    ScoreQuestion,
    SystemOneRequest,
    YesNoQuestion,
)
from infer.server.http.access import CALLER
from infer.server.http.errors import REQUEST_ID
from infer.server.http.streams import Array
from infer.server.schemas import shown
from infer.server.service import Json, Service

Question = YesNoQuestion | ChoiceQuestion | ScoreQuestion | Predicate | Choices | Levels
SYSTEM = (
    "Judge the state you are given. Answer the question with the label of the answer that fits best, and nothing else."
)
TAIL_CHARS = 32
LETTERS = [*ascii_uppercase, *ascii_lowercase, *map("".join, product(ascii_uppercase, repeat=2))]


def routes(service: Service, settings: object) -> list[Route]:
    own = Decisions(service)
    return [
        Route(
            "POST",
            "/v1/decisions",
            own.handle,
            "Answer typed questions on an input, as OpenAI asks them.",
            answers.Decision,
            DecisionsRequest,
        ),
        Route(
            "POST",
            "/v1/systemone",
            functools.partial(own.handle, model=SystemOneRequest),
            "Answer typed questions on a state, as TypeSafe's System One asks them.",
            answers.SystemOne,
            SystemOneRequest,
        ),
    ]


class Asked(NamedTuple):
    """A question as the model is asked it, with the label and the meaning of each possible answer."""

    text: str
    labels: tuple[str, ...]
    meanings: Sequence[str | None]


class Decisions:
    """The handler of POST /v1/decisions and POST /v1/systemone."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._letters = functools.cache(self._letters_of_one_token)
        self._label_ids = functools.lru_cache(256)(functools.partial(label_ids, service.served.tokenizer))

    async def handle(self, http: web.Request, model: type[Questions] = Questions) -> web.StreamResponse:
        """Answer a request. ``model`` is the kind of body that the route takes; ``Questions`` stands for all kinds."""
        asked = await self._service.read(http, model)
        match asked:
            case SystemOneRequest():
                questions: list[Question] = list(asked.questions.values())
            case DecisionsRequest():
                questions = list(asked.questions)
            case _:
                raise AssertionError(type(asked))
        service = self._service
        service.check_choices(len(questions), "questions")
        puts = [await asyncio.to_thread(self._put, question) for question in questions]
        # The first request puts the state into the cache, where the others find it. Of these, only as many as run at a
        # time are made together, since each has all of the state's tokens.
        size = many.at_once(service)
        answers, labels, tokens, cached = list[Completion](), list[tuple[int, ...]](), 0, 0
        for group in (puts[:1], *(puts[at : at + size] for at in range(1, len(puts), size))):
            requests = []
            for put in group:
                prompt, special = await self._prompt(asked.subject, put)
                ids = await asyncio.to_thread(self._label_ids, prompt[-TAIL_CHARS:], put.labels)
                params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids)
                prefix = f"decision-{len(labels)}"
                requests += await service.requests(http, [prompt], params, asked, prefix=prefix, special=special)
                labels.append(ids)
            found, used = await service.whole(http, requests, patient=bool(answers))
            answers += found
            tokens += used["prompt_tokens"]
            cached += used["prompt_tokens_details"]["cached_tokens"]
        usage: Json = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
        http[CALLER].usage = usage
        names = [_quoted(name) + b": " for name in asked.questions] if isinstance(asked, SystemOneRequest) else []

        def decide(question: Question, ids: Sequence[int], answer: Completion, name: bytes) -> bytes:
            assert answer.logprobs is not None
            return name + _quoted(_answer(question, _normalized(dict(answer.logprobs[0].top), ids)))

        rows = zip(questions, labels, answers, names or repeat(b""), strict=False)
        decided = await self._service.writer.each(lambda row: decide(*row), rows, len(questions))
        frame: Json = {"id": f"decision-{http[REQUEST_ID]}", "object": "decision", "model": self._service.served.name}
        if isinstance(asked, SystemOneRequest):
            return await self._service.answer(http, frame | {"answers": Array(decided, (b"{", b"}")), "usage": usage})
        more = {
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return await self._service.answer(http, frame | {"answers": Array(decided), "usage": usage | more})

    def _put(self, question: Question) -> Asked:
        """The question's text, labels and meanings. Raises RequestError."""
        match question:
            case YesNoQuestion():
                criteria = question.criteria
                meanings: Sequence[str | None] = [criteria.true, criteria.false] if criteria else [None, None]
                return Asked(f"Question: {question.instructions}", ("yes", "no"), meanings)
            case Predicate():
                text = f"Statement: {shown(question.instructions)}\nIs it true?"
                return Asked(text, ("yes", "no"), [None, None])
            case ChoiceQuestion():
                meanings = [_meaning(*option) for option in question.criteria.items()]
                return Asked(f"Question: {question.instructions}", self._letters(len(meanings)), meanings)
            case Choices():
                meanings = [_meaning(_word(option.value), option.description) for option in question.choices]
                return Asked(f"Question: {shown(question.instructions)}", self._letters(len(meanings)), meanings)
            case ScoreQuestion():
                labels = tuple(map(str, range(len(question.criteria))))
                return Asked(f"Question: {question.instructions}", labels, question.criteria)
            case Levels():
                meanings = [_meaning(level.label, level.description) for level in question.levels]
                labels = tuple(map(str, range(len(meanings))))
                return Asked(f"Question: {shown(question.instructions)}", labels, meanings)

    async def _prompt(self, state: str, asked: Asked) -> tuple[str, bool]:
        """The prompt, and whether the tokenizer has to add special tokens to it."""
        text = f"State:\n{state}\n\n{asked.text}\nAnswers:\n" + "".join(
            f"{label}: {meaning}\n" if meaning else f"{label}\n"
            for label, meaning in zip(asked.labels, asked.meanings, strict=True)
        )
        if self._service.served.template is None:
            return f"{SYSTEM}\n\n{text}Label:\n", True
        messages = [{"role": "user", "content": f"{SYSTEM}\n\n{text}"}]
        return await self._service.conversation.render(
            to_json(messages), tools=None, add_generation_prompt=True, enable_thinking=False
        ), False

    def _letters_of_one_token(self, count: int) -> tuple[str, ...]:
        """``count`` labels, each a single letter or a single token, no two of which end in the same token. Raises
        RequestError."""
        found: dict[int, str] = {}
        for letters in LETTERS:
            ids = self._service.served.tokenizer.encode(letters, add_special_tokens=False).ids
            if len(ids) == 1 or len(letters) == 1:
                found.setdefault(ids[-1], letters)
            if len(found) == count:
                return tuple(found.values())
        raise RequestError(
            f"A question has {count} choices, but this model's tokenizer has labels for {len(found)} only.",
            param="questions",
        )


def label_ids(tokenizer: Tokenizer, tail: str, labels: tuple[str, ...]) -> tuple[int, ...]:
    """The first token of each label when it follows a text. Raises RequestError if two labels share one."""
    before = tokenizer.encode(tail, add_special_tokens=False).ids
    ids = []
    for label in labels:
        after = tokenizer.encode(tail + label, add_special_tokens=False).ids
        goes_on = after[: len(before)] == before and len(after) > len(before)
        ids.append(after[len(before)] if goes_on else tokenizer.encode(label, add_special_tokens=False).ids[0])
    if len(set(ids)) < len(ids):
        raise RequestError(f"This model's tokenizer begins several of the labels {', '.join(labels)} with one token.")
    return tuple(ids)


def _quoted(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _meaning(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def _normalized(logprobs: Mapping[int, float], ids: Sequence[int]) -> list[float]:
    """The probabilities of the labels, normalized to a sum of 1."""
    most = max(logprobs[id] for id in ids)
    weights = [math.exp(logprobs[id] - most) for id in ids]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def _answer(question: Question, probabilities: Sequence[float]) -> Json:
    best = max(range(len(probabilities)), key=lambda i: probabilities[i])
    score = sum(level * p for level, p in enumerate(probabilities))
    answer: dict[str, Any] = {"type": question.type, "confidence": _confidence(probabilities)}
    match question:
        case YesNoQuestion():
            return {"type": question.type, "noul": probabilities[0]}
        case Predicate():
            return {"type": question.type, "name": question.name, "probability": probabilities[0]}
        case ChoiceQuestion():
            names = list(question.criteria)
            return answer | {"choice": names[best], "probabilities": dict(zip(names, probabilities, strict=True))}
        case ScoreQuestion():
            levels = [str(level) for level in range(len(probabilities))]
            return answer | {
                "score": score,
                "probabilities": dict(zip(levels, probabilities, strict=True)),
                "legend": dict(zip(levels, question.criteria, strict=True)),
            }
        case Choices():
            values = [option.value for option in question.choices]
            each = [{"value": value, "probability": p} for value, p in zip(values, probabilities, strict=True)]
            return answer | {"name": question.name, "choice": values[best], "probabilities": each}
        case Levels():
            each = [
                {"value": value, "label": level.label, "probability": p}
                for value, (level, p) in enumerate(zip(question.levels, probabilities, strict=True))
            ]
            return answer | {"name": question.name, "score": score, "probabilities": each}


def _confidence(probabilities: Sequence[float]) -> float:
    """One minus the entropy as a fraction of its maximum: 1 if one answer is certain, 0 if all are equally likely."""
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return 1 - entropy / math.log(len(probabilities))
