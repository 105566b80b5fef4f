"""Input items, as /v1/responses takes them, and the conversation that they stand for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from infer_server.http.body import Body, Many, Text, typed
from infer_server.messages import Arguments, Content, CustomCall, CustomToolCall, FunctionCall, Kept, Message, ToolCall
from infer_server.tools import namespaced


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

    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class _CallItem(_Item):
    call_id: Text
    name: Text
    namespace: str | None = None
    caller: Kept = None

    @property
    def shown_name(self) -> str:
        return self.name if self.namespace is None else namespaced(self.namespace, self.name)


class CallItem(_CallItem):
    type: Literal["function_call"]
    arguments: Arguments
    parsed_arguments: Kept = None


class CustomCallItem(_CallItem):
    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content
    name: Kept = Field(None, description="Ignored: call_id says which call this is the output of.")
    namespace: Kept = Field(None, description="Ignored, as name.")
    caller: Kept = None


CommonItem = (
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
)
"""What every endpoint with input items takes, to be discriminated by ``typed``."""
InputItem = Annotated[CommonItem | Annotated[ReasoningItem, Tag("reasoning")], Discriminator(typed)]


def check_called(items: str | Sequence[Body], others: Collection[str] = ()) -> None:
    """Raise ValueError if a tool's output has no call before it. ``others`` has the ids of calls of other kinds."""
    called = set(others)
    for i, item in enumerate(items if not isinstance(items, str) else ()):
        if isinstance(item, (CallItem, CustomCallItem)):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in called:
            raise ValueError(f"input[{i}]: the output for call_id {item.call_id[:80]!r} has no call before it")


Input = str | Annotated[Many[InputItem], Field(min_length=1)]


def conversation(
    items: str | Sequence[InputMessage | ReasoningItem | CallItem | CustomCallItem | CallOutputItem],
) -> tuple[Message, ...]:
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
                answer["reasoning_content"] = answer.get("reasoning_content", "") + item.text()
            case _:
                call: ToolCall | CustomToolCall
                if isinstance(item, CallItem):
                    call = ToolCall(
                        id=item.call_id, function=FunctionCall(name=item.shown_name, arguments=item.arguments)
                    )
                else:
                    custom = CustomCall(name=item.shown_name, input=item.input)
                    call = CustomToolCall(id=item.call_id, type="custom", custom=custom)
                answer["tool_calls"] = (*answer.get("tool_calls", ()), call)
    return tuple(Message(**({} if "tool_calls" in message else {"content": ""}) | message) for message in messages)
