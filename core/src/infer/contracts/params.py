"""Sampling parameters and structured outputs: how a client wants its answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from infer.contracts.text import CallForm, CallSyntax

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_CHOICES = 1024

TokenId = Annotated[int, Field(ge=0, strict=True)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class StructuredOutputs(BaseModel):
    """The format that an answer must have. Exactly one field is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    json_schema: dict[str, Any] | bool | str | None = Field(
        default=None, alias="json", description="A JSON schema that the answer, which is JSON, has to match."
    )
    json_object: bool | None = Field(default=None, description="The answer is a JSON object with any contents.")
    regex: str | None = Field(
        default=None, min_length=1, description="A regular expression that the whole answer matches."
    )
    choice: tuple[str, ...] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICES, description="The answer is one of these texts."
    )
    grammar: str | None = Field(
        default=None, min_length=1, description="A grammar in Lark's notation, as the grammar backend reads it."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if type(self) is not StructuredOutputs:  # a field of this type checks instances of subclasses by it, too
            return self
        if sum(value not in (None, False) or (name == "json_schema" and value is False) for name, value in self) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self


class ToolGrammar(NamedTuple):
    """The grammar of the text that a tool takes."""

    name: str
    """The tool's, as the model is shown it."""
    syntax: Literal["lark", "regex"]
    definition: str
    param: str
    """Where the request has the grammar."""


class CallOutputs(StructuredOutputs):
    """The format of an answer that may call tools. No client gives it."""

    kind: Literal["whole", "listed", "free", "either"]
    """``whole``: the answer is the input of the only tool. ``listed``: it is a list of calls in JSON, at least one and
    only one if ``single``; each is an object of ``name`` and ``arguments``, of ``functions`` or of ``tools``, whose
    arguments are an object of ``input``. ``free``: it is text that may call ``tools`` in one of the ``forms``.
    ``either``: it has the format ``answer``, or is calls of ``functions`` in the ``syntax``, only one if ``single``."""
    tools: tuple[ToolGrammar, ...] = ()
    """Those whose inputs have grammars."""
    functions: tuple[tuple[str, Any], ...] = ()
    """Names, with JSON schemas of the arguments."""
    single: bool = False
    forms: tuple[CallForm, ...] = ()
    answer: StructuredOutputs | None = None
    """JSON of some schema."""
    syntax: tuple[CallSyntax, ...] = ()
    tags: tuple[str, str] | None = None
    """What encloses reasoning, with which an answer that is ``free`` or ``either`` may begin, and in which nothing is
    held to anything."""
    opened: bool = False
    """Whether it begins within the reasoning."""


class SamplingParams(BaseModel):
    """How to continue one prompt. Frozen; all values are checked when it is made."""

    # Defaults are given by name, for type checkers know them only so unless they have pydantic's plugin.

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int | None = Field(
        default=16, ge=1, description="The most tokens to generate; more than fit, or null: as many as fit."
    )
    temperature: float = Field(
        default=1.0, ge=0, le=100, allow_inf_nan=False, description="0 takes the likeliest token."
    )
    top_k: int = Field(default=0, ge=-1, lt=2**31, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Keep the likeliest tokens whose probabilities add up to this."
    )
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Drop tokens less likely than this fraction of the likeliest."
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="The same seed gives the same text.")
    stop: tuple[str, ...] = Field(default=(), description="Texts that end the answer, which does not include them.")
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=64, description="Tokens that end the answer.")
    ignore_eos: bool = Field(default=False, description="Do not end the answer at the end-of-sequence token.")
    min_tokens: int = Field(default=0, ge=0, lt=2**31, description="No stop token is drawn before so many tokens.")
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from the logit of every token that the answer already has."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from a token's logit for each time that the answer has it."
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="Divides (if negative, multiplies) the logits of tokens of prompt and answer.",
    )
    logit_bias: dict[TokenId, Bias] = Field(
        default={},
        max_length=MAX_BIASES,
        description="Token ids, each with a number from -100 to 100 to add to its logit.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="The format that the answer must have."
    )
    thinking_token_budget: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="The most tokens of reasoning, between its tags; then it is closed.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Report log-probabilities, and those of so many likeliest tokens.",
    )
    logprob_token_ids: tuple[TokenId, ...] | None = Field(
        default=None, min_length=1, max_length=256, description="Report the log-probabilities of these tokens instead."
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="As logprobs, for the prompt's tokens."
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value is None:
            return ()
        if isinstance(value, list):  # a validator before the strict one sees JSON's arrays as lists
            return tuple(value)
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _bounded(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(not text or len(text) > MAX_STOP_CHARS for text in value):
            raise ValueError(f"each stop string has 1 to {MAX_STOP_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        if self.logprob_token_ids is not None and self.logprobs is not None:
            raise ValueError("logprobs and logprob_token_ids cannot be combined; give one")
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(
                f"{name} cannot be combined with structured output, which decides itself where the answer ends"
            )
        return self

    @property
    def edits_logits(self) -> bool:
        """Whether logits are edited before each draw (penalties, biases, minimum length, a grammar, a budget)."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.structured_outputs
            or self.thinking_token_budget is not None
        )
