"""The body of POST /v1/messages, and the conversation that it stands for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import to_json

from infer.contracts.params import MAX_STOP_CHARS, MAX_STOPS, SamplingParams, StructuredOutputs
from infer_agents.response_tools import MAX_OFFERS
from infer_server.http.body import Body, Many, Text
from infer_server.messages import Kept
from infer_server.replies import ToolUse
from infer_server.tools import ToolName

ID_PREFIX = "toolu_"
BILLING_HEADER = "x-anthropic-billing-header:"
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
BETWEEN = "\n\n"
"""What separates blocks of text that were written apart."""
INERT_CACHE = "Ignored: equal prefixes are shared anyway."


class _Block(Body):
    cache_control: Kept = Field(None, description=INERT_CACHE)


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Kept = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="As it came with the block, or empty for what another model has thought.")


class RedactedThinkingBlock(_Block):
    """Another server's reasoning, which nobody else can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Kept = None


class ServerBlock(_Block):
    """A call of a tool that another server has, or its result. It is left out; the text that follows it is kept."""

    model_config = ConfigDict(extra="ignore")

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ]


class ToolReferenceBlock(_Block):
    type: Literal["tool_reference"]
    tool_name: Text


Result = Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | Many[Result] = ""
    is_error: bool = False

    def shown(self) -> str:
        text = self.content
        if not isinstance(text, str):
            text = BETWEEN.join(each.text if isinstance(each, TextBlock) else each.tool_name for each in text)
        return f"Error: {text}" if self.is_error else text


UserBlock = Annotated[TextBlock | ToolResultBlock | ToolReferenceBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ServerBlock, Field(discriminator="type")
]


class UserTurn(Body):
    role: Literal["user"]
    content: str | Many[UserBlock]


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: str | Many[AssistantBlock]


class SystemTurn(Body):
    """Instructions in the middle of a conversation. The model is shown them in the user's message."""

    role: Literal["system", "ctx", "msg"]
    content: str | Many[TextBlock]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def check_called(turns: tuple[Turn, ...]) -> None:
    """Raise ValueError if a result has no call before it, or the last call no result."""
    called: set[str] = set()
    last = ""
    for i, turn in enumerate(turns):
        if not isinstance(turn, AssistantTurn):
            last = ""
        for j, block in enumerate(turn.content if not isinstance(turn.content, str) else ()):
            place = f"messages[{i}].content[{j}]"
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
                last = place
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                raise ValueError(
                    f"{place} is a tool_result for {block.tool_use_id!r}, which is no tool_use's id before it"
                )
    if last:
        raise ValueError(f"{last} is a tool_use at the end, which cannot be continued; add its tool_result")


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Ignored: a forced call's input always matches.")
    defer_loading: bool | None = Field(None, description="Ignored: the model is shown all tools.")
    eager_input_streaming: bool | None = Field(None, description="Ignored: input is always streamed as it comes.")
    input_examples: Kept = Field(None, description="Ignored: the chat template does not show them.")
    allowed_callers: Kept = Field(None, description="Ignored: there is only the model.")
    cache_control: Kept = Field(None, description=INERT_CACHE)

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class TypedTool(Body):
    """A tool that another server has, such as ``web_search_20250305``, or whose schema only Anthropic's models know.
    The model is not shown it."""

    model_config = ConfigDict(extra="ignore")

    type: Text
    name: str | None = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type", "custom") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind == "custom" else "typed"


Tool = Annotated[Annotated[CustomTool, Tag("custom")] | Annotated[TypedTool, Tag("typed")], Discriminator(_tool_kind)]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = Field(False, description="true: at most one call.")

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and has to be given there")
        return self


class Thinking(Body):
    """Whether the model reasons, where its chat template lets that be chosen."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="With enabled, the most tokens of reasoning; ignored if the model's tags are no tokens.",
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: the reasoning is in the signature alone, which is to be sent back."
    )

    def budget(self) -> int | None:
        """The most tokens of reasoning. Clients also send a 0 beside other types, which means nothing."""
        return self.budget_tokens if self.type == "enabled" else None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = Field(None, description="Ignored: the model is not shown it.")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="For chat templates that know reasoning_effort; for others a bound on the reasoning, as "
        "model.effort_budgets has it.",
    )
    format: OutputFormat | None = None
    task_budget: Kept = Field(None, description="Ignored: the model is not shown it.")


class UserMetadata(Body):
    user_id: str | None = Field(None, max_length=512, description="The end user's id.")


class Thought(NamedTuple):
    """Reasoning that a client has sent back, and its seal."""

    param: str
    """Which block it is."""
    text: str
    signature: str


Piece = bytes | tuple[Thought, ...]
"""A part of a conversation in JSON; or what belongs there, as one text, once it is known to be the model's own."""


class MessagesRequest(Body):
    """The body of POST /v1/messages and of POST /v1/messages/count_tokens."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop": "stop_sequences"}
    DERIVED: ClassVar[Mapping[str, str]] = {"history": "messages"}

    model: str | None = Field(None, description="The served model's name, or nothing.")
    messages: Many[Turn] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="The most tokens to generate; more than fit: all that fit.")
    system: str | Many[TextBlock] | None = None
    tools: Many[Tool] | None = Field(None, max_length=MAX_OFFERS)
    tool_choice: ToolChoice | None = None
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    stop_sequences: Many[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        (), max_length=MAX_STOPS, description="Texts that end the answer, which does not include them."
    )
    metadata: UserMetadata | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="As output_config.format.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    context_management: Kept = Field(None, description="Ignored: nothing is left out of the conversation.")
    cache_control: Kept = Field(None, description=INERT_CACHE)
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Ignored: there is one.")
    speed: Literal["standard", "fast"] | None = Field(None, description="Ignored: there is one.")
    betas: Many[str] | None = Field(None, description="Ignored, as the header anthropic-beta.")
    diagnostics: Kept = Field(None, description="Ignored: usage says what was cached.")
    thread: dict[str, Any] | None = Field(None, description="Refused, so that clients send whole conversations.")
    container: None = None
    mcp_servers: tuple[()] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_called(self.messages)
        names: set[str] = set()
        for tool in self._offered:
            if tool.name in names:
                raise ValueError(f"tools would show the model two tools named {tool.name!r}; rename one of them")
            names.add(tool.name)
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not self._possible_tools:
            if choice.name is not None:
                raise ValueError(
                    f"tool_choice names {choice.name!r}, which is not among tools that have an input_schema"
                )
            raise ValueError("tool_choice asks for a tool, but tools has none with an input_schema")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format and output_config.format say the same; give one")
        if self._forced and self._format is not None:
            raise ValueError("a forced tool_choice cannot be combined with a format for the answer; leave one out")
        return self

    @property
    def user(self) -> str | None:
        """The end user, for the access log."""
        return None if self.metadata is None else self.metadata.user_id

    @property
    def _format(self) -> OutputFormat | None:
        return self.output_format or (self.output_config.format if self.output_config else None)

    @property
    def _offered(self) -> tuple[CustomTool, ...]:
        """The tools that the model can be shown."""
        return tuple(tool for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def hidden(self) -> bool:
        """Whether there are tools that the model is not shown, whatever is chosen."""
        return len(self._offered) < len(self.tools or ())

    @property
    def _possible_tools(self) -> tuple[CustomTool, ...]:
        """Those of which ``tool_choice`` asks for one, or all."""
        name = None if self.tool_choice is None else self.tool_choice.name
        return tuple(tool for tool in self._offered if name in (None, tool.name))

    @property
    def _forced(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or ToolChoice(type="auto")
        return ToolUse(
            [tool.shown() for tool in self._offered] if choice.type != "none" else (),
            [tool.shown() for tool in self._possible_tools] if self._forced else None,
            not choice.disable_parallel_tool_use and choice.type != "tool",
            format=self._outputs,
        )

    @property
    def _outputs(self) -> StructuredOutputs | None:
        return None if self._format is None else StructuredOutputs(json_schema=self._format.schema_)

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The sampling parameters, with ``overrides``. Of temperature, top_p and top_k, their ``model_fields_set`` has
        what was set explicitly."""
        names = self.model_fields_set & {"temperature", "top_p", "top_k"}
        given = {name: getattr(self, name) for name in names}
        fields = {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "seed": self.seed}
        return SamplingParams(**fields | given | {"structured_outputs": self._outputs} | overrides)

    @property
    def hints(self) -> dict[str, Any]:
        """What the chat template is told of reasoning. It has an effect only if the template knows the word."""
        hints: dict[str, Any] = {}
        if self.thinking is not None:
            hints |= dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
        if self.output_config is not None and self.output_config.effort is not None:
            hints["reasoning_effort"] = self.output_config.effort
        return hints

    def client_name(self, param: str) -> str:
        if param == "structured_outputs":
            return "tools" if self._forced else "output_format" if self.output_format else "output_config.format"
        return super().client_name(param)

    def instructions(self, *, billing_header: bool) -> str:
        """What ``system`` says, with or without the block that Claude Code changes in every request."""
        if self.system is None or isinstance(self.system, str):
            return self.system or ""
        texts = [block.text for block in self.system]
        return BETWEEN.join(text for text in texts if billing_header or not text.startswith(BILLING_HEADER))

    @functools.cached_property
    def history(self) -> tuple[tuple[Piece, ...], bool]:
        """The conversation without ``system``, as a list's items in JSON, and whether its last message is to be
        continued. It is in pieces, because the process that parses bodies cannot check seals."""
        pieces: list[Piece] = []
        role = ""
        for message, thoughts in conversation(self.messages):
            role = message["role"]
            whole = b"%b%b" % (b"," if pieces else b"", to_json(message, inf_nan_mode="constants"))
            pieces += [whole[:-1] + b',"reasoning_content":', thoughts, b"}"] if thoughts else [whole]
        return tuple(pieces), role == "assistant"


def _blocks(turn: Turn) -> Iterator[tuple[int, Any]]:
    content = turn.content
    return enumerate([TextBlock(type="text", text=content)] if isinstance(content, str) else content)


def conversation(turns: tuple[Turn, ...]) -> Iterator[tuple[dict[str, Any], tuple[Thought, ...]]]:
    """The messages that turns stand for, as ``ChatTemplate.prompt`` takes them, and the reasoning of each. Turns of one
    side become one message, since templates want them to take turns; results of tools come first in it."""
    for own, run in itertools.groupby(enumerate(turns), lambda one: one[1].role == "assistant"):
        texts, results, calls, thoughts = list[str](), list[Any](), list[Any](), list[Thought]()
        for i, turn in run:
            for j, block in _blocks(turn):
                match block:
                    case TextBlock():
                        texts.append(REMINDER.format(block.text) if isinstance(turn, SystemTurn) else block.text)
                    case ToolReferenceBlock():
                        texts.append(block.tool_name)
                    case ToolResultBlock():
                        results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.shown()})
                    case ToolUseBlock():
                        function = {"name": block.name, "arguments": block.input}
                        calls.append({"id": block.id, "type": "function", "function": function})
                    case ThinkingBlock():
                        thoughts.append(Thought(f"messages[{i}].content[{j}]", block.thinking, block.signature))
        if own and (texts or calls or thoughts):
            called = {"tool_calls": calls} if calls else {}
            yield {"role": "assistant", "content": "".join(texts) or None, **called}, tuple(thoughts)
        elif not own:
            yield from ((result, ()) for result in results)
            if texts or not results:
                yield {"role": "user", "content": BETWEEN.join(texts)}, ()
