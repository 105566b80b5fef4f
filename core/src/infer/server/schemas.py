"""The bodies of requests, in OpenAI's shapes and vLLM's. What is not here is refused by name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json, to_json

from infer.errors import RequestError, capital
from infer.request import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, StructuredOutputs, TokenId

MAX_TOOLS = 128
Text = Annotated[str, Field(min_length=1)]
TokenIds = tuple[TokenId, ...]


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = Field(False, description="End the stream with a chunk that carries the usage.")
    continuous_usage_stats: bool = Field(False, description="Carry the usage so far in every chunk.")
    include_obfuscation: Literal[False] = False


class SchemaFormat(Body):
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="The answer fits the schema either way.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self

    def outputs(self) -> StructuredOutputs | None:
        match self.type:
            case "json_object":
                return StructuredOutputs(json_object=True)
            case "json_schema":
                assert self.json_schema is not None
                return StructuredOutputs(json_schema=self.json_schema.schema_ or {})
        return None


class Common(SamplingParams):
    """What every endpoint that generates takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(None, description="The served model's name, or nothing.")
    n: int = Field(1, ge=1, description="Answers per prompt; the i-th is drawn with seed + i.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="What the answer has to look like.")
    guided_json: dict[str, Any] | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: tuple[str, ...] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="As structured_outputs.choice."
    )
    guided_grammar: Text | None = Field(None, description="As structured_outputs.grammar.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="The lower, the earlier.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )
    user: str | None = Field(None, max_length=512, description="The caller's own mark, for the access log.")

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true")
        return self

    def outputs(self) -> StructuredOutputs | None:
        """What the answer has to look like, in whichever way that was said. Raises ValueError."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        said = [
            self.structured_outputs,
            self.response_format.outputs() if self.response_format else None,
            *(StructuredOutputs.model_validate({key: value}) for key, value in guided.items() if value is not None),
        ]
        given = [outputs for outputs in said if outputs is not None]
        if len(given) > 1:
            raise ValueError("give one of structured_outputs, response_format and guided_*, not several")
        return given[0] if given else None

    def sampling(self, **more: Any) -> SamplingParams:
        """The sampling parameters alone, with what was set explicitly still marked so; ``more`` goes over them."""
        names = (self.model_fields_set & set(SamplingParams.model_fields)) - {"structured_outputs"}
        values = {name: getattr(self, name) for name in names} | more
        return SamplingParams(**{"structured_outputs": self.outputs()} | values)


class CompletionRequest(Common):
    """The body of POST /v1/completions."""

    prompt: str | TokenIds | tuple[str | TokenIds, ...] = Field(description="Text or token ids, or a list of these.")
    max_tokens: int | None = Field(16, ge=0, description="New tokens at most; 0 only with echo; null: all that fit.")
    echo: bool = Field(False, description="Begin the answer with the prompt; with logprobs, with the prompt's too.")
    add_special_tokens: bool = Field(True, description="Begin a text as the tokenizer does, with a BOS token say.")
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _echoed(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 asks for nothing; it goes with echo only")
        if self.echo and self.stream:
            raise ValueError("echo cannot be streamed")
        return self

    @property
    def prompts(self) -> list[str | TokenIds]:
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)


class FunctionCall(Body):
    name: Text
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: tuple[()] | None = None
    logprobs: tuple[()] | None = None


class Message(Body):
    role: Text
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: tuple[()] | None = None

    def plain(self) -> dict[str, Any]:
        """As templates expect it: content is a text, arguments are objects."""
        found: dict[str, Any] = {"role": self.role, "content": self.text()}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return found

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class Function(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="With a required or named tool the arguments fit either way.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Common):
    """The body of POST /v1/chat/completions."""

    messages: tuple[Message, ...] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="New tokens at most; null for as many as fit.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The same.")
    logprobs: bool = Field(False, description="Report each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And those of so many of the likeliest tokens."
    )
    tools: tuple[Tool, ...] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = Field(True, description="false: one call at most.")
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Go on with the last message instead of a new one.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="For the template, enable_thinking say; what it does not know it ignores."
    )
    echo: Literal[False] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=0)
    modalities: tuple[Literal["text"], ...] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs = true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.forced_tools is not None:
            names = [tool.function.name for tool in self.tools or ()]
            if not names:
                raise ValueError("tool_choice asks for a tool, but tools is empty")
            if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among tools")
            if self.outputs() is not None:
                raise ValueError("a forced tool_choice and another form for the answer exclude each other")
        return self

    @property
    def forced_tools(self) -> tuple[Tool, ...] | None:
        """Of which tools one has to be called; None where none has to."""
        if self.tool_choice == "required":
            return self.tools or ()
        if isinstance(self.tool_choice, NamedTool):
            return tuple(t for t in self.tools or () if t.function.name == self.tool_choice.function.name)
        return None

    def sampling(self, **more: Any) -> SamplingParams:
        tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        count = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling(**{"max_tokens": tokens, "logprobs": count} | more)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def outputs(self) -> StructuredOutputs | None:
        match self.type:
            case "json_object":
                return StructuredOutputs(json_object=True)
            case "json_schema":
                return StructuredOutputs(json_schema=self.schema_ or {})
        return None


class TextOptions(Body):
    format: TextFormat = TextFormat()
    verbosity: None = None


class InputMessage(Body):
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | tuple[TextPart, ...]


class NoObfuscation(Body):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Body):
    """The body of POST /v1/responses. Nothing is stored: a conversation goes along as ``input``."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    input: str | tuple[InputMessage, ...]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextOptions = TextOptions()
    stream: bool = False
    stream_options: NoObfuscation | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=512)
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    include: tuple[()] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Comes back with the response.")
    parallel_tool_calls: bool | None = None
    tools: tuple[()] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def messages(self) -> list[dict[str, Any]]:
        found = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": Message(role=role, content=item.content).text()})
        return found

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            logprobs=self.top_logprobs,
            structured_outputs=self.text.format.outputs(),
        )


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text, or messages to put through the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = Field(None, min_length=1)
    tools: tuple[Tool, ...] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class Truth(Body):
    true: str | None = None
    false: str | None = None


class YesNoQuestion(Body):
    type: Literal["noul", "yes_no"]
    instructions: Text
    criteria: Truth | None = Field(None, description="What yes and no stand for.")


class ChoiceQuestion(Body):
    type: Literal["choice"]
    instructions: Text
    criteria: dict[Text, str | None] = Field(min_length=2, max_length=26, description="Each option and its meaning.")


class ScoreQuestion(Body):
    type: Literal["score"]
    instructions: Text
    criteria: tuple[Text, ...] = Field(min_length=2, max_length=10, description="The levels, from 0 on.")


Question = Annotated[YesNoQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionsRequest(Body):
    """The body of POST /v1/decisions and /v1/systemone."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    state: str | dict[str, Any] | list[Any] = Field(description="What the questions are about.")
    questions: dict[Text, Question] = Field(min_length=1, max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=512)


T = TypeVar("T", bound=BaseModel)


def parse(body: bytes, model: type[T]) -> T:
    """A null means that a field is not given (of ``max_tokens``, that there is no limit). Raises RequestError that
    names the first field at fault."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise RequestError("The body must be a JSON object.")
    given = {key: value for key, value in data.items() if value is not None or key == "max_tokens"}
    if len(given) < len(data):
        body = to_json(given, inf_nan_mode="constants")
    return checked(lambda: model.model_validate_json(body, strict=True), model)


R = TypeVar("R")


def checked(make: Callable[[], R], model: type[BaseModel]) -> R:
    """What ``make`` makes of a request's values; its complaints as a RequestError."""
    try:
        return make()
    except ValidationError as error:
        raise _explain(error, model) from None
    except ValueError as error:
        raise _said(str(error), model) from None


PLAIN_TAGS = ("str", "int", "float", "bool", "none", "[key]")
LONG_TAGS = ("tuple[", "dict[", "list[", "literal[", "function-", "constrained-")


def _is_tag(part: int | str) -> bool:
    """Whether a step of a location says which of several forms pydantic tried."""
    return isinstance(part, str) and (part in PLAIN_TAGS or part.startswith(LONG_TAGS) or part[:1].isupper())


def _explain(error: ValidationError, model: type[BaseModel]) -> RequestError:
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    if first["loc"] and _is_tag(first["loc"][-1]):
        # Of the forms that were tried, the one that came furthest is what was meant.
        stem = first["loc"][:-1]
        first = max((e for e in found if e["loc"][: len(stem)] == stem), key=lambda e: len(e["loc"]))
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_tag(part):
            path += f".{part}" if path else part
    field = path or None
    value = repr(first["input"])
    value = value if len(value) <= 80 else value[:77] + "..."
    what = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "missing":
            return RequestError(f"The field {field!r} is missing.", param=field)
        case "extra_forbidden":
            close = difflib.get_close_matches(field or "", model.model_fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            return RequestError(f"The field {field!r} is not known.{hint}", param=field)
        case "literal_error":
            return RequestError(
                f"{field} = {value} is not supported; {what.removeprefix('Input should be ')} is.", param=field
            )
    if field is not None and (field == "prompt" or field.startswith("prompt[")):
        return RequestError("prompt must be a text or a list of token ids, or a list of these.", param="prompt")
    return _said(what, model) if field is None else RequestError(f"{field} = {value}: {what}.", param=field)


def _said(what: str, model: type[BaseModel]) -> RequestError:
    """A sentence about several fields is put down to the first that it names."""
    words = re.findall(r"\w+", what)
    named = next((word for word in words if word in model.model_fields), None)
    text = what if words[0] in model.model_fields else capital(what)
    return RequestError(f"{text}.", param=named)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
