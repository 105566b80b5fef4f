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
from collections.abc import Iterable, Mapping, Sequence
from itertools import product, repeat
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from aiohttp import web
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import to_json
from typing_extensions import TypedDict

from infer.contracts.params import SamplingParams
from infer.contracts.server import Route
from infer.errors import RequestError
from infer_embeddings import many
from infer_embeddings.labels import TAIL_CHARS, label_ids
from infer_server.events import Json
from infer_server.http.access import CALLER
from infer_server.http.body import Body, Many, Text
from infer_server.http.errors import REQUEST_ID
from infer_server.http.streams import Array
from infer_server.input_items import Input, check_called, conversation
from infer_server.messages import JsonPart, Message, TextPart, shown
from infer_server.shapes import CachedTokens, ReasoningTokens

if TYPE_CHECKING:
    from infer.llm import Completion
    from infer_server.service import Service

SYSTEM = (
    "Judge the state you are given. Answer the question with the label of the answer that fits best, and nothing else."
)
LETTERS = [*ascii_uppercase, *ascii_lowercase, *map("".join, product(ascii_uppercase, repeat=2))]
MAX_QUESTIONS = 400
MAX_TOKENS = 2_000_000
"""Of the prompts of all questions together. What is computed is less, but each prompt has the whole state, which is
tokenized again for each."""
MAX_OPTIONS = 255
MAX_LEVELS = 10


class Truth(Body):
    true: str | None = None
    false: str | None = None


class YesNoQuestion(Body):
    type: Literal["noul", "yes_no"]
    instructions: Text
    criteria: Truth | None = Field(None, description="What yes and no mean.")


class ChoiceQuestion(Body):
    type: Literal["choice"]
    instructions: Text
    criteria: dict[Text, str | None] = Field(
        min_length=2, max_length=MAX_OPTIONS, description="Each option and its meaning."
    )


class ScoreQuestion(Body):
    type: Literal["score"]
    instructions: Text
    criteria: Many[Text] = Field(min_length=2, max_length=MAX_LEVELS, description="The levels, from 0 on.")


class Questions(Body):
    """The fields that both decision APIs have in common."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=512)

    @classmethod
    def form(cls, data: Mapping[str, Any]) -> type[Any]:
        if cls is not Questions:
            return cls
        return SystemOneRequest if "state" in data else DecisionsRequest


class SystemOneRequest(Questions):
    """The body of POST /v1/systemone: TypeSafe's System One."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "state", "messages": "state"}
    DERIVED: ClassVar[Mapping[str, str]] = {"subject": "state"}

    state: str | dict[str, Any] | list[Any] = Field(description="What the questions are about.")
    questions: dict[Text, Annotated[YesNoQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]] = (
        Field(min_length=1, max_length=MAX_QUESTIONS)
    )

    @functools.cached_property
    def subject(self) -> str:
        return self.state if isinstance(self.state, str) else json.dumps(self.state, ensure_ascii=False, indent=1)


Asking = str | Annotated[Many[Annotated[TextPart | JsonPart, Field(discriminator="type")]], Field(min_length=1)]


class _Named(Body):
    name: str | None = Field(None, description="Returned with the answer.")
    instructions: Asking


class Predicate(_Named):
    type: Literal["predicate"]


class Option(Body):
    value: bool | Text
    description: str | None = None


def _distinct(options: tuple[Option, ...]) -> tuple[Option, ...]:
    seen = set()
    for option in options:
        if (key := (type(option.value), option.value)) in seen:
            raise ValueError(f"it holds {option.value!r} twice")
        seen.add(key)
    return options


class Choices(_Named):
    type: Literal["choice"]
    choices: Annotated[Many[Option], Field(min_length=2, max_length=MAX_OPTIONS), AfterValidator(_distinct)]


class Level(Body):
    label: Text
    description: str | None = None


class Levels(_Named):
    type: Literal["score"]
    levels: Many[Level] = Field(min_length=2, max_length=MAX_LEVELS, description="From 0 on.")


Question = YesNoQuestion | ChoiceQuestion | ScoreQuestion | Predicate | Choices | Levels


class CacheOptions(Body):
    """Hints for a cache. They are ignored, because equal prefixes are shared anyway as long as there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class DecisionsRequest(Questions):
    """The body of POST /v1/decisions, as in OpenAI's API. A body with a ``state`` is a SystemOneRequest instead."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "input", "messages": "input"}
    DERIVED: ClassVar[Mapping[str, str]] = {"subject": "input"}

    input: Input = Field(description="What the questions are about.")
    questions: Many[Annotated[Predicate | Choices | Levels, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_QUESTIONS
    )
    cache_salt: str | None = Field(
        None,
        alias="prompt_cache_key",
        min_length=1,
        max_length=256,
        description="Share cached prefixes only with requests of the same key.",
    )
    prompt_cache_options: CacheOptions | None = Field(None, description="Ignored: equal prefixes are shared anyway.")
    user: str | None = Field(None, alias="safety_identifier", max_length=512, description="The end user's id.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_called(self.input)
        return self

    @functools.cached_property
    def subject(self) -> str:
        return self.input if isinstance(self.input, str) else _transcript(conversation(self.input))


class YesNo(TypedDict):
    type: Literal["noul", "yes_no"]
    noul: float


class Choice(TypedDict):
    type: Literal["choice"]
    choice: str
    probabilities: dict[str, float]
    confidence: float


class Score(TypedDict):
    """``probabilities`` and ``legend`` are keyed by the level's number."""

    type: Literal["score"]
    score: float
    probabilities: dict[str, float]
    legend: dict[str, str]
    confidence: float


class SystemOneUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SystemOne(TypedDict):
    id: str
    object: Literal["decision"]
    model: str
    answers: dict[str, YesNo | Choice | Score]
    usage: SystemOneUsage


class PredicateAnswer(TypedDict):
    type: Literal["predicate"]
    name: str | None
    probability: float


class OptionProbability(TypedDict):
    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    probabilities: list[OptionProbability]
    confidence: float


class LevelProbability(TypedDict):
    value: int
    label: str
    probability: float


class ScoreAnswer(TypedDict):
    type: Literal["score"]
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class CachedAndWrittenTokens(CachedTokens):
    cache_write_tokens: int


class DecisionUsage(SystemOneUsage):
    input_tokens_details: CachedAndWrittenTokens
    output_tokens_details: ReasoningTokens


class Decision(TypedDict):
    id: str
    object: Literal["decision"]
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


def routes(service: Service) -> list[Route]:
    own = Decisions(service)
    return [
        Route(
            "POST",
            "/v1/decisions",
            own.handle,
            "Answer typed questions on an input, as OpenAI asks them.",
            Decision,
            DecisionsRequest,
        ),
        Route(
            "POST",
            "/v1/systemone",
            functools.partial(own.handle, model=SystemOneRequest),
            "Answer typed questions on a state, as TypeSafe's System One asks them.",
            SystemOne,
            SystemOneRequest,
        ),
    ]


class Posed(NamedTuple):
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
        body = await self._service.read(http, model, place=True)
        match body:
            case SystemOneRequest():
                questions: list[Question] = list(body.questions.values())
            case DecisionsRequest():
                questions = list(body.questions)
            case _:
                raise AssertionError(type(body))
        service = self._service
        service.check_choices(len(questions), "questions")
        puts = [await asyncio.to_thread(self._put, question) for question in questions]
        # The first request puts the state into the cache, where the others find it. Of these, only as many as run at a
        # time are made together, since each has all of the state's tokens.
        size = many.at_once(service)
        answers: list[Mapping[int, float]] = []
        labels, tokens, cached = list[tuple[int, ...]](), 0, 0
        for group in (puts[:1], *(puts[at : at + size] for at in range(1, len(puts), size))):
            requests = []
            for put in group:
                prompt, special = await self._prompt(body.subject, put)
                ids = await asyncio.to_thread(self._label_ids, prompt[-TAIL_CHARS:], put.labels)
                params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids)
                prefix = f"decision-{len(labels)}"
                requests += await service.requests(http, [prompt], params, body, prefix=prefix, special=special)
                labels.append(ids)
            if not answers:
                _check_tokens(len(requests[0].prompt_token_ids), len(questions))
            found, used = await service.whole(http, requests, patient=bool(answers))
            answers += map(_top, found)  # without their prompts
            tokens += used["prompt_tokens"]
            cached += used["prompt_tokens_details"]["cached_tokens"]
        usage: Json = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
        http[CALLER].usage = usage
        names = [_quoted(name) + b": " for name in body.questions] if isinstance(body, SystemOneRequest) else []

        def decide(question: Question, ids: Sequence[int], top: Mapping[int, float], name: bytes) -> bytes:
            return name + _quoted(_answer(question, _normalized(top, ids)))

        rows = zip(questions, labels, answers, names or repeat(b""), strict=False)
        decided = await self._service.writer.each(lambda row: decide(*row), rows, len(questions))
        frame: Json = {
            "id": f"decision-{http[REQUEST_ID]}",
            "object": "decision",
            "model": self._service.model_name(http),
        }
        if isinstance(body, SystemOneRequest):
            return await self._service.answer(http, frame | {"answers": Array(decided, (b"{", b"}")), "usage": usage})
        more = {
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return await self._service.answer(http, frame | {"answers": Array(decided), "usage": usage | more})

    def _put(self, question: Question) -> Posed:
        """The question's text, labels and meanings. Raises RequestError."""
        match question:
            case YesNoQuestion():
                criteria = question.criteria
                meanings: Sequence[str | None] = [criteria.true, criteria.false] if criteria else [None, None]
                return Posed(f"Question: {question.instructions}", ("yes", "no"), meanings)
            case Predicate():
                text = f"Statement: {shown(question.instructions)}\nIs it true?"
                return Posed(text, ("yes", "no"), [None, None])
            case ChoiceQuestion():
                meanings = [_meaning(*option) for option in question.criteria.items()]
                return Posed(f"Question: {question.instructions}", self._letters(len(meanings)), meanings)
            case Choices():
                meanings = [_meaning(_word(option.value), option.description) for option in question.choices]
                return Posed(f"Question: {shown(question.instructions)}", self._letters(len(meanings)), meanings)
            case ScoreQuestion():
                labels = tuple(map(str, range(len(question.criteria))))
                return Posed(f"Question: {question.instructions}", labels, question.criteria)
            case Levels():
                meanings = [_meaning(level.label, level.description) for level in question.levels]
                labels = tuple(map(str, range(len(meanings))))
                return Posed(f"Question: {shown(question.instructions)}", labels, meanings)

    async def _prompt(self, state: str, posed: Posed) -> tuple[str, bool]:
        """The prompt, and whether the tokenizer has to add special tokens to it."""
        text = f"State:\n{state}\n\n{posed.text}\nAnswers:\n" + "".join(
            f"{label}: {meaning}\n" if meaning else f"{label}\n"
            for label, meaning in zip(posed.labels, posed.meanings, strict=True)
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


def _check_tokens(first: int, count: int) -> None:
    """Raises RequestError if prompts as long as the first have too many tokens."""
    if first * count > MAX_TOKENS:
        raise RequestError(
            f"Each question's prompt has the whole state: {count} of about {first} tokens are {first * count}, and at "
            f"most {MAX_TOKENS} are allowed. Ask fewer questions at a time.",
            param="questions",
        )


def _top(answer: Completion) -> dict[int, float]:
    assert answer.logprobs is not None
    return dict(answer.logprobs[0].top)


def _quoted(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _transcript(messages: Iterable[Message]) -> str:
    """A conversation as one text, for questions about it."""
    lines = []
    for message in messages:
        if text := message.text():
            lines.append(f"{message.role}: {text}")
        calls = [call.called() for call in message.tool_calls or ()]
        lines += [f"{message.role} calls {call.name}: {call.arguments}" for call in calls]
    return "\n".join(lines)


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
