"""The messages of a conversation, with their content parts and tool calls, as bodies have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import from_json, to_json

from infer.errors import RequestError
from infer_server.http.body import Body, Many, Text

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Other roles are refused, because many templates silently drop messages that have them."""


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
    thinking_blocks: Kept = Field(None, description="Reasoning as LiteLLM keeps it, beside reasoning_content.")
    provider_specific_fields: Kept = Field(None, description="What LiteLLM knows no field for.")
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


Messages = Many[Message]


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
