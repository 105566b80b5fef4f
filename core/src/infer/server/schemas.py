"""The bodies of requests and responses, in OpenAI's shapes."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infer.errors import RequestError
from infer.request import SamplingParams, TokenId


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: bool = Field(False, description="End the stream with a chunk that carries the usage.")


class CompletionRequest(SamplingParams):
    """The body of POST /v1/completions: the sampling parameters and these. Fields of OpenAI's that infer does not
    support may be sent with their neutral value and are refused with any other."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    prompt: str | tuple[TokenId, ...] = Field(description="Text, or token ids.")
    stream: bool | None = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )
    user: str | None = Field(None, description="The caller's own mark; not used.")
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    def sampling(self) -> SamplingParams:
        """The sampling parameters alone, with what was set explicitly still marked so."""
        return SamplingParams(**self.model_dump(include=self.model_fields_set & set(SamplingParams.model_fields)))


def parse(body: bytes) -> CompletionRequest:
    """Raises RequestError that names the first field at fault."""
    try:
        request = CompletionRequest.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise _explain(error) from None
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is given, but stream is not true.", param="stream_options")
    return request


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    value = repr(first["input"])
    value = value if len(value) <= 80 else value[:77] + "..."
    match first["type"]:
        case "json_invalid":
            return RequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
        case "model_type" | "model_attributes_type":
            return RequestError("The body must be a JSON object.")
        case "missing":
            return RequestError(f"The field {field!r} is missing.", param=field)
        case "extra_forbidden":
            close = difflib.get_close_matches(field or "", CompletionRequest.model_fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            return RequestError(f"The field {field!r} is not known.{hint}", param=field)
        case "literal_error" if field in CompletionRequest.model_fields:
            return RequestError(
                f"{field} = {value} is not supported; {first['msg'].removeprefix('Input should be ')} is.",
                param=field,
            )
    if field == "prompt":
        return RequestError(
            "prompt must be one text or one list of token ids; send several prompts as several requests.",
            param=field,
        )
    return RequestError(f"{field} = {value}: {first['msg']}.", param=field)
