"""Request bodies, in OpenAI's and vLLM's formats. A field that is not here is refused by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import from_json, to_json

from infer.contracts.params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, StructuredOutputs
from infer.errors import RequestError
from infer.server.http.body import Body, Many, Text, TokenIds, typed

MAX_TOOLS = 128
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Older names of the fields of ``structured_outputs``."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Other roles are refused, because many templates silently drop messages that have them."""


class StreamOptions(Body):
    include_usage: bool = Field(False, description="End the stream with a chunk that contains the usage.")
    continuous_usage_stats: bool = Field(False, description="Put the usage so far into every chunk.")
    include_obfuscation: Literal[False] = False


def _schema_goes_with_its_type(type: str, field: str, schema: object) -> None:
    """Raise ValueError if a format has a schema that nobody would read, or lacks one."""
    if type == "json_schema" and schema is None:
        raise ValueError(f"the type json_schema needs {field}; give it, or another type")
    if type != "json_schema" and schema is not None:
        raise ValueError(f"{field} goes with the type json_schema, and the type is {type}")


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
        _schema_goes_with_its_type(self.type, "json_schema", self.json_schema)
        return self

    def outputs(self) -> StructuredOutputs | None:
        match self.type:
            case "json_object":
                return StructuredOutputs(json_object=True)
            case "json_schema":
                assert self.json_schema is not None
                return StructuredOutputs(json_schema=self.json_schema.schema_ or {})
        return None


class Common(SamplingParams, Body):
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
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
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
        said = [
            self.structured_outputs,
            self.response_format.outputs() if self.response_format else None,
            *(StructuredOutputs.model_validate({kind: value}) for kind, value in guided.items() if value is not None),
        ]
        given = [outputs for outputs in said if outputs is not None]
        if len(given) > 1:
            raise ValueError("give one of structured_outputs, response_format and guided_*, not several")
        return given[0] if given else None

    def said(self, param: str) -> str:
        ways = [name for name in (param, "response_format", *GUIDED) if getattr(self, name, None) is not None]
        return ways[0] if param == "structured_outputs" and len(ways) == 1 else super().said(param)

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The sampling parameters, with ``overrides``. Their ``model_fields_set`` has only what was set explicitly."""
        names = (self.model_fields_set & set(SamplingParams.model_fields)) - {"structured_outputs"}
        values = {name: getattr(self, name) for name in names} | overrides
        return SamplingParams(**{"structured_outputs": self.outputs()} | values)


class CompletionRequest(Common):
    """The body of POST /v1/completions."""

    prompt: str | TokenIds | Many[str | TokenIds] = Field(
        union_mode="left_to_right", description="Text or token ids, or a list of these."
    )
    max_tokens: int | None = Field(
        16, ge=0, description="The most tokens to generate; 0 only with echo; null: all that fit."
    )
    echo: bool = Field(False, description="Begin the answer with the prompt; logprobs then include the prompt's.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens, such as BOS, to a text.")
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _echoed(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 asks for no answer, which is possible with echo only")
        return self

    @property
    def prompts(self) -> list[str | TokenIds]:
        return one_or_many(self.prompt)


class EmbeddingRequest(Body):
    """The body of POST /v1/embeddings."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    input: str | TokenIds | Many[str | TokenIds] = Field(
        union_mode="left_to_right", description="Text or token ids, or a list of up to 2,048 of these."
    )
    model: str | None = Field(None, description="The served model's name, or nothing.")
    encoding_format: Literal["float", "base64"] = Field("float", description="Numbers, or fp32 values in base64.")
    dimensions: int | None = Field(None, ge=1, description="Keep so many leading values, and normalise again.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens, such as EOS, to a text.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests with lower numbers are served earlier.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )
    user: str | None = Field(None, max_length=512, description="The end user's id.")
    safety_identifier: str | None = Field(None, max_length=512, description="As user, over which it takes precedence.")

    @property
    def prompts(self) -> list[str | TokenIds]:
        return one_or_many(self.input)


class Document(Body):
    text: str


class Compared(Body):
    """What the bodies of POST /v1/rerank and POST /v1/score share."""

    model: str | None = Field(None, description="The served model's name, or nothing.")
    instruction: str | None = Field(None, description="What to judge by; by default, whether it answers a search.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests with lower numbers are served earlier.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )
    user: str | None = Field(None, max_length=512, description="The end user's id.")
    safety_identifier: str | None = Field(None, max_length=512, description="As user, over which it takes precedence.")


class RerankRequest(Compared):
    """The body of POST /v1/rerank."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "documents", "messages": "documents"}

    query: str
    documents: Many[str | Document] = Field(min_length=1, description="Up to 2,048 texts, or objects with a text.")
    top_n: int | None = Field(None, ge=0, description="Return so many of the best; 0 or nothing: all.")
    return_documents: bool = Field(True, description="Repeat the documents in the answer.")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(Compared):
    """The body of POST /v1/score."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "text_2", "messages": "text_2"}

    text_1: str | Many[str] = Field(description="The query, or one for each of text_2.")
    text_2: str | Many[str] = Field(description="A document, or up to 2,048 of them.")

    @model_validator(mode="after")
    def _some(self) -> Self:
        if (not self.text_1 and self.text_1 != "") or (not self.text_2 and self.text_2 != ""):
            raise ValueError("text_1 and text_2 must not be empty lists")
        return self

    @property
    def first(self) -> list[str]:
        return [self.text_1] if isinstance(self.text_1, str) else list(self.text_1)

    @property
    def second(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)


def one_or_many(prompt: str | TokenIds | Many[str | TokenIds]) -> list[str | TokenIds]:
    """A prompt, or several, as a list."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)


def _within_depth(text: str) -> str:
    try:
        from_json(text)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise ValueError("this JSON is nested too deeply") from None
    return text


def _arguments(text: str) -> Any:
    try:
        return from_json(text) if text.strip() else {}  # it also refuses text that is nested too deeply
    except ValueError:
        return text


Arguments = Annotated[str, AfterValidator(_within_depth)]
"""JSON, or the text that a model wrote in its place."""
Kept = Any
"""A field that clients keep from an answer and send back. It is ignored, because other fields say the same."""


class FunctionCall(Body):
    name: Text
    arguments: Arguments
    parsed_arguments: Kept = None

    def plain(self) -> dict[str, Any]:
        """The call as templates expect it: its arguments are an object if they are valid JSON."""
        return {"name": self.name, "arguments": _arguments(self.arguments)}


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def called(self) -> FunctionCall:
        return self.function


class CustomCall(Body):
    name: Text
    input: str


class CustomToolCall(Body):
    id: str
    type: Literal["custom"]
    custom: CustomCall
    index: int | None = None

    def called(self) -> FunctionCall:
        """The call of the function that the template shows in the tool's place."""
        written = json.dumps({"input": self.custom.input}, ensure_ascii=False)
        return FunctionCall(name=self.custom.name, arguments=written)


def _call_type(value: Any) -> Any:
    return value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[CustomToolCall, Tag("custom")], Discriminator(_call_type)
]


class _Part(Body):
    cache_control: Kept = Field(None, description="Ignored: equal prefixes are shared anyway.")
    prompt_cache_breakpoint: Kept = Field(None, description="Ignored, as cache_control.")


class TextPart(_Part):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Kept = None
    logprobs: Kept = None
    parsed: Kept = None

    def shown(self) -> str:
        return self.text


class RefusalPart(_Part):
    type: Literal["refusal"]
    refusal: str

    def shown(self) -> str:
        return self.refusal


class JsonPart(_Part):
    type: Literal["input_json"]
    data: dict[str, Any] | Many[dict[str, Any]]

    def shown(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)


Part = Annotated[TextPart | RefusalPart | JsonPart, Field(discriminator="type")]
Content = str | Many[Part]


def shown(content: Content | None) -> str:
    """The text of a content's parts."""
    return content if isinstance(content, str) else "".join(part.shown() for part in content or ())


class Message(Body):
    role: Text
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="As reasoning_content.")
    tool_calls: Many[AnyToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = Field(None, description="A call in the format that preceded tool_calls.")
    refusal: str | None = Field(None, description="The text of a message that has no content.")
    parsed: Kept = None
    annotations: Kept = None
    cache_control: Kept = None
    audio: None = None

    def plain(self) -> dict[str, Any]:
        """The message as ``ChatTemplate.prompt`` takes it: its content is a text or None, arguments are objects."""
        nothing = self.content is None and self.refusal is None
        message: dict[str, Any] = {"role": self.role, "content": None if nothing else self.text()}
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        for name, value in (
            ("name", self.name),
            ("reasoning_content", reasoning),
            ("tool_call_id", self.tool_call_id),
        ):
            if value is not None:
                message[name] = value
        calls = [(call.id, call.called()) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append((self.function_call.name, self.function_call))
        if calls:
            message["tool_calls"] = [{"id": id, "type": "function", "function": call.plain()} for id, call in calls]
        return message

    def text(self) -> str:
        return self.refusal or "" if self.content is None else shown(self.content)


def turns(messages: Iterable[Message]) -> bytes:
    """Messages as ``ChatTemplate.prompt`` takes them, as JSON. Raises RequestError if one has an unknown role."""
    plain_messages = [message.plain() for message in messages]
    for i, message in enumerate(plain_messages):
        if message["role"] not in ROLES:
            raise RequestError(
                f"Unknown role {message['role'][:80]} in messages[{i}]; it may be {', '.join(ROLES)}.",
                param="messages",
            )
    return to_json(plain_messages, inf_nan_mode="constants")


def transcript(messages: Iterable[Message]) -> str:
    """A conversation as one text, for questions about it."""
    lines = []
    for message in messages:
        if text := message.text():
            lines.append(f"{message.role}: {text}")
        calls = [call.called() for call in message.tool_calls or ()]
        lines += [f"{message.role} calls {call.name}: {call.arguments}" for call in calls]
    return "\n".join(lines)


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Ignored: a forced call's arguments always match.")


class FunctionTool(Body):
    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return self.model_dump(exclude_none=True)


class PlainFormat(Body):
    type: Literal["text"]


class Custom(Body):
    name: ToolName
    description: str | None = None
    format: PlainFormat | None = Field(None, description="text, as without it: grammars are not supported.")


class CustomTool(Body):
    """A tool that takes a text. The model is shown a function with one parameter, ``input``."""

    type: Literal["custom"]
    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        parameters: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}}
        parameters |= {"required": ["input"], "additionalProperties": False}
        function = self.custom.model_dump(exclude_none=True, exclude={"format"}) | {"parameters": parameters}
        return {"type": "function", "function": function}


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class Named(Body):
    name: Text


class NamedFunction(Body):
    type: Literal["function"]
    function: Named

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Body):
    type: Literal["custom"]
    custom: Named

    @property
    def name(self) -> str:
        return self.custom.name


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Many[Annotated[NamedFunction | NamedCustom, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_TOOLS
    )


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


Metadata = Annotated[dict[str, str], Field(max_length=16)]


class ChatRequest(Common):
    """The body of POST /v1/chat/completions."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages"}
    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "messages"}

    messages: Many[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="The most tokens to generate; null: as many as fit.")
    max_completion_tokens: int | None = Field(None, ge=1, description="As max_tokens.")
    logprobs: bool = Field(False, description="Report each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Also report the log-probabilities of so many likeliest tokens."
    )
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | NamedCustom | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool = Field(True, description="false: at most one call.")
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="Continue the last message instead of a new one.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    echo: Literal[False] | None = None
    store: Literal[False] | None = None
    metadata: Metadata | None = Field(None, description="Returned with the answer.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that know reasoning_effort, or enable_thinking (all but none)."
    )
    modalities: Many[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        names = {tool.name for tool in self.tools or ()}
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice asks for a tool, but tools is empty")
        if unknown := next((name for name in self._chosen or () if name not in names), None):
            raise ValueError(f"tool_choice names {unknown!r}, which is not among tools")
        if self.forced_tools is not None and self.outputs() is not None:
            raise ValueError(
                "a forced tool_choice cannot be combined with another format for the answer; leave one out"
            )
        return self

    @functools.cached_property
    def turns(self) -> bytes:
        return turns(self.messages)

    @property
    def _chosen(self) -> set[str] | None:
        """The names of the tools that ``tool_choice`` names, if it names any."""
        match self.tool_choice:
            case NamedFunction() | NamedCustom():
                return {self.tool_choice.name}
            case AllowedTools():
                return {tool.name for tool in self.tool_choice.allowed_tools.tools}
        return None

    @property
    def _possible_tools(self) -> tuple[FunctionTool | CustomTool, ...]:
        """The tools that ``tool_choice`` names, or all if it names none."""
        chosen = self._chosen
        return tuple(tool for tool in self.tools or () if chosen is None or tool.name in chosen)

    @property
    def offered_tools(self) -> tuple[FunctionTool | CustomTool, ...]:
        """The tools that the model is shown."""
        if self.tool_choice == "none":
            return ()
        if isinstance(self.tool_choice, AllowedTools):
            return self._possible_tools
        return self.tools or ()

    @property
    def custom_tools(self) -> set[str]:
        """The names of the tools that take a text."""
        return {tool.name for tool in self.tools or () if isinstance(tool, CustomTool)}

    @property
    def forced_tools(self) -> tuple[FunctionTool | CustomTool, ...] | None:
        """The tools of which one has to be called; None if no call is required."""
        match self.tool_choice:
            case None | "none" | "auto" | AllowedTools(allowed_tools=Allowed(mode="auto")):
                return None
        return self._possible_tools

    def said(self, param: str) -> str:
        if param == "structured_outputs" and self.forced_tools is not None:
            return "tools"
        return "max_completion_tokens" if param == "max_tokens" and self.max_tokens is None else super().said(param)

    def sampling(self, **overrides: Any) -> SamplingParams:
        tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        count = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling(**{"max_tokens": tokens, "logprobs": count} | overrides)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _schema_goes_with_its_type(self.type, "schema", self.schema_)
        return self

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


class _Item(Body):
    id: str | None = None
    status: str | None = None


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = Field(None, description="Ignored: the chat template does not see it.")


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """A model's reasoning before the message or the calls that follow."""

    type: Literal["reasoning"]
    summary: Many[ReasoningText] = ()
    content: Many[ReasoningText] | None = None
    encrypted_content: None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Arguments
    parsed_arguments: Kept = None
    namespace: str | None = None


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: str
    namespace: str | None = None


class CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")],
    Discriminator(typed),
]


def _all_called(items: str | tuple[InputItem, ...]) -> str | tuple[InputItem, ...]:
    """Raise ValueError if a tool's output has no call before it."""
    called: set[str] = set()
    for item in items if not isinstance(items, str) else ():
        if isinstance(item, (CallItem, CustomCallItem)):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in called:
            raise ValueError(f"the output for call_id {item.call_id!r} has no call before it")
    return items


Input = Annotated[str | Annotated[Many[InputItem], Field(min_length=1)], AfterValidator(_all_called)]


def conversation(items: Input) -> tuple[Message, ...]:
    """The messages that input items stand for. Reasoning and calls become parts of the assistant's message that they
    belong to."""
    if isinstance(items, str):
        return (Message(role="user", content=items),)
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            continue
        if isinstance(item, InputMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": item.content})
            continue
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        if isinstance(item, (InputMessage, ReasoningItem)):  # text and reasoning come first in a message
            goes_on = goes_on and not {"content", "tool_calls"} & set(messages[-1])
        if not goes_on:
            messages.append({"role": "assistant"})
        answer = messages[-1]
        match item:
            case InputMessage():
                answer["content"] = item.content
            case ReasoningItem():
                text = "".join(part.text for part in item.content or item.summary)
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
            case _:
                call: ToolCall | CustomToolCall
                if isinstance(item, CallItem):
                    call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                else:
                    custom = CustomCall(name=item.name, input=item.input)
                    call = CustomToolCall(id=item.call_id, type="custom", custom=custom)
                answer["tool_calls"] = (*answer.get("tool_calls", ()), call)
    return tuple(Message(**({} if "tool_calls" in message else {"content": ""}) | message) for message in messages)


class NoObfuscation(Body):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Body):
    """The body of POST /v1/responses. Nothing is stored: ``input`` has to contain the whole conversation."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "structured_outputs": "text.format",
    }
    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "input"}
    add_generation_prompt: ClassVar = True
    continue_final_message: ClassVar = False

    model: str | None = Field(None, description="The served model's name, or nothing.")
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    stop: str | Many[str] = Field((), description="Texts that end the answer, which does not include them.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextOptions = TextOptions()
    stream: bool = False
    stream_options: NoObfuscation | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    include: Many[Literal["message.output_text.logprobs"]] | None = None
    metadata: Metadata | None = Field(None, description="Returned with the response.")
    parallel_tool_calls: bool | None = None
    tools: tuple[()] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )

    @functools.cached_property
    def turns(self) -> bytes:
        begin = () if self.instructions is None else (Message(role="system", content=self.instructions),)
        return turns((*begin, *conversation(self.input)))

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs or self.include)

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Of temperature, top_p and top_k, their ``model_fields_set`` has what was set
        explicitly."""
        names = ("temperature", "top_p", "top_k", "stop")
        said = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            seed=self.seed,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured_outputs=self.text.format.outputs(),
            **said,
        )


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text, or messages to put through the chat template first."""

    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "messages"}

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, min_length=1)
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)
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

    @functools.cached_property
    def turns(self) -> bytes:
        return turns(self.messages or ())


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
