"""Bodies of requests for decisions: /v1/decisions, in OpenAI's format and in infer's own, and /v1/systemone."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from infer.server.http.body import Body, Many, Text
from infer.server.schemas import Input, JsonPart, TextPart, conversation, transcript

MAX_QUESTIONS = 400
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
    prompt_cache_options: CacheOptions | None = None
    user: str | None = Field(None, alias="safety_identifier", max_length=512, description="The end user's id.")

    @functools.cached_property
    def subject(self) -> str:
        return self.input if isinstance(self.input, str) else transcript(conversation(self.input))
