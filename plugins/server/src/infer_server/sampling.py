"""What bodies of endpoints that generate text share: sampling fields and the answer's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from infer.contracts.params import MAX_CHOICES, SamplingParams, StructuredOutputs
from infer.contracts.sections import LONGEST_TIMEOUT_S
from infer_server.http.body import Body, Many, Text

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Older names of the fields of ``structured_outputs``."""


class StreamOptions(Body):
    include_usage: bool = Field(False, description="End the stream with a chunk that contains the usage.")
    continuous_usage_stats: bool = Field(False, description="Put the usage so far into every chunk.")
    include_obfuscation: Literal[False] = False


def check_schema_and_type(type: str, field: str, schema: object) -> None:
    """Raise ValueError if a format has a schema that nobody would read, or lacks one."""
    if type == "json_schema" and schema is None:
        raise ValueError(f"the type json_schema needs {field}; give it, or another type")
    if type != "json_schema" and schema is not None:
        raise ValueError(f"{field} goes with the type json_schema, and the type is {type}")


def format_outputs(type: str, schema: dict[str, Any] | None) -> StructuredOutputs | None:
    """What an answer's format asks for; None if any text will do."""
    match type:
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            return StructuredOutputs(json_schema=schema or {})
    return None


class SchemaFormat(Body):
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="Ignored: the answer always matches the schema.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        check_schema_and_type(self.type, "json_schema", self.json_schema)
        return self

    def outputs(self) -> StructuredOutputs | None:
        return format_outputs(self.type, self.json_schema.schema_ if self.json_schema else None)


class SamplingBody(SamplingParams, Body):
    """The fields that all endpoints that generate text have in common."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    n: int = Field(1, ge=1, description="Answers per prompt; the i-th is drawn with seed + i.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="The format that the answer must have.")
    guided_json: dict[str, Any] | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Many[str] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="As structured_outputs.choice."
    )
    guided_grammar: Text | None = Field(None, description="As structured_outputs.grammar.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests with lower numbers are served earlier.")
    timeout: float | None = Field(
        None,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="Seconds within which the answer has to end; else it ends with an error of status 504.",
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Share cached prefixes only with requests of the same salt, and drafts with none.",
    )
    user: str | None = Field(None, max_length=512, description="The end user's id.")
    safety_identifier: str | None = Field(None, max_length=512, description="As user, over which it takes precedence.")

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true")
        return self

    def outputs(self) -> StructuredOutputs | None:
        """The answer's format, in whichever of the possible fields the client gave it. Raises ValueError if there are
        several."""
        guided = {kind: getattr(self, name) for name, kind in GUIDED.items()}
        formats = [
            self.structured_outputs,
            self.response_format.outputs() if self.response_format else None,
            *(StructuredOutputs.model_validate({kind: value}) for kind, value in guided.items() if value is not None),
        ]
        given = [outputs for outputs in formats if outputs is not None]
        if len(given) > 1:
            raise ValueError("give one of structured_outputs, response_format and guided_*, not several")
        return given[0] if given else None

    def client_name(self, param: str) -> str:
        ways = [name for name in (param, "response_format", *GUIDED) if getattr(self, name, None) is not None]
        return ways[0] if param == "structured_outputs" and len(ways) == 1 else super().client_name(param)

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The sampling parameters, with ``overrides``. Their ``model_fields_set`` has only what was set explicitly."""
        names = (self.model_fields_set & set(SamplingParams.model_fields)) - {"structured_outputs"}
        values = {name: getattr(self, name) for name in names} | overrides
        return SamplingParams(**{"structured_outputs": self.outputs()} | values)


Metadata = Annotated[dict[str, str], Field(max_length=16)]
