"""What a client asks and what it gets back: the only things that cross between a client's side and the engine."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from infer.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256

FinishReason = Literal["stop", "length", "abort", "error"]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class SamplingParams(BaseModel):
    """How to continue one prompt. Frozen; every value is checked when it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int | None = Field(16, ge=1, description="New tokens at most; null for as many as fit.")
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="0 takes the likeliest token.")
    top_k: int = Field(0, ge=-1, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens that together reach this mass.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens below this fraction of the likeliest one.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same text.")
    stop: tuple[str, ...] = Field((), description="Texts that end the answer; they are not part of it.")
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=64, description="Tokens that end the answer.")
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Likeliest tokens to report per token.")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="The same for the prompt's tokens.")

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
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        if any(not text or len(text) > MAX_STOP_CHARS for text in value):
            raise ValueError(f"each stop string has 1 to {MAX_STOP_CHARS} characters")
        return value


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Made by the client's side, never changed."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = field(default_factory=new_request_id)
    seed: int = 0
    """``params.seed``, or drawn once when the client gave none."""
    cache_salt: str = ""
    """Only requests of equal salt share what the cache holds."""
    arrival: float = field(default_factory=time.perf_counter)

    @classmethod
    def make(
        cls,
        prompt_token_ids: list[int] | tuple[int, ...],
        params: SamplingParams,
        *,
        vocab_size: int,
        max_seq_len: int,
        id: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Check the ids and the length against the model. Raises RequestError, whose text is fit for the client."""
        n = len(prompt_token_ids)
        if n == 0:
            raise RequestError("The prompt is empty: give at least one token.", param="prompt")
        if n >= max_seq_len:
            raise RequestError(
                f"This model's maximum context length is {max_seq_len} tokens, and one of them is needed for the "
                f"answer, but the prompt has {n} tokens. Shorten the prompt or raise engine.max_seq_len.",
                param="prompt",
                code="context_length_exceeded",
            )
        asked = params.max_tokens if "max_tokens" in params.model_fields_set else None
        if asked is not None and n + asked > max_seq_len:
            raise RequestError(
                f"This model's maximum context length is {max_seq_len} tokens, but the prompt has {n} tokens and "
                f"max_tokens asks for {asked} more. Lower max_tokens or shorten the prompt.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        for name, ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
            if bad := next((i for i in ids if not 0 <= i < vocab_size), None):
                raise RequestError(
                    f"{name} holds token id {bad}, but this model's ids are 0 to {vocab_size - 1}.",
                    param=name,
                )
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return cls(tuple(prompt_token_ids), params, id or new_request_id(), seed, cache_salt or "")


class TokenLogprobs(NamedTuple):
    """The chosen token's log-probability (natural log, before temperature and filters) and the likeliest ones."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """News of one request. Exactly one of its events, the last, has a ``finish_reason``."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first event: None for the first prompt token, then one per prompt token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token or text that ended the answer, when one did."""
    error: str | None = None
    num_cached: int = 0
    """Prompt tokens that the cache already held."""
