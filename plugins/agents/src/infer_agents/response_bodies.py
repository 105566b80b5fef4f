"""The body of POST /v1/responses: the conversation, and how it is answered."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import from_json, to_json

from infer.contracts.params import (
    MAX_BIASES,
    MAX_LOGPROBS,
    Bias,
    SamplingParams,
    StructuredOutputs,
    TokenId,
    ToolGrammar,
)
from infer.contracts.sections import LONGEST_TIMEOUT_S
from infer.text.templates import INSTRUCTIONS, effort_variables
from infer_agents.response_tools import (
    MAX_OFFERS,
    AllowedTools,
    CloudTool,
    NamedTool,
    Offer,
    Tool,
    ToolChoice,
    cloud_kind,
    offers,
    shown,
)
from infer_agents.seal import unverified
from infer_server import input_items
from infer_server.http.body import Body, Many, typed
from infer_server.input_items import CallItem, CallOutputItem, CustomCallItem, InputMessage, check_called, conversation
from infer_server.messages import Kept, Message, turns
from infer_server.replies import ToolUse
from infer_server.sampling import Metadata, check_schema_and_type, format_outputs
from infer_server.tools import MAX_TOOLS

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
DROPPED = (
    *("additional_tools", "program", "program_output"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
)
"""Types of items that mean nothing here, besides calls of a cloud's tools and their outputs."""


def _item_type(value: Any) -> Any:
    type = typed(value)
    if cloud_kind(type) and str(type).endswith(("_call", "_output")):
        return "web_search_call"
    return "web_search_call" if isinstance(type, str) and type in DROPPED else type


class DroppedItem(Body):
    """What a cloud's tools did. It is accepted with any fields, and the chat template does not see it, nor outputs
    with its ``call_id``."""

    model_config = ConfigDict(extra="ignore")

    type: str
    call_id: Kept = None


class ReasoningItem(input_items.ReasoningItem):
    """A model's reasoning before the message or the calls that follow."""

    encrypted_content: str | None = Field(  # type: ignore[assignment]
        None, description="What an answer had here. It takes precedence over content and summary."
    )

    @field_validator("encrypted_content")
    @classmethod
    def _sealed(cls, value: str | None) -> str | None:
        if value is not None:
            unverified(value)
        return value

    def text(self) -> str:
        return super().text() if self.encrypted_content is None else unverified(self.encrypted_content)


InputItem = Annotated[
    input_items.CommonItem
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[DroppedItem, Tag("web_search_call")],
    Discriminator(_item_type),
]


def _dropped_calls(items: Sequence[Any]) -> set[str]:
    """The ids of calls that the chat template does not see."""
    dropped = {item.call_id for item in items if isinstance(item, DroppedItem) and type(item.call_id) is str}
    return dropped - {item.call_id for item in items if isinstance(item, (CallItem, CustomCallItem))}


def _shown(items: Sequence[Any], dropped: Collection[str] | None = None) -> list[Any]:
    """The items that the chat template sees. ``dropped`` has the ids of calls that it does not, if some may be in other
    items."""
    hidden = _dropped_calls(items) if dropped is None else dropped
    return [
        item
        for item in items
        if not isinstance(item, DroppedItem) and not (isinstance(item, CallOutputItem) and item.call_id in hidden)
    ]


def _begin(instructions: str | None) -> tuple[Message, ...]:
    return () if instructions is None else (Message(role="system", content=instructions),)


class Continuation(Body):
    """The ``past`` items of a stored response and of what led to it, and the ``input`` that follows. It is made here,
    and read like a body because it may be as large as one."""

    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "input", "answer": "past"}

    instructions: str | None = None
    past: Many[InputItem]
    input: Many[InputItem]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        called = {item.call_id for item in self.past if isinstance(item, (CallItem, CustomCallItem))}
        check_called(self.input, self._dropped_calls | called)
        return self

    @functools.cached_property
    def turns(self) -> bytes:
        return turns((*self._told, *conversation(_shown(self.input, self._dropped_calls))))

    @functools.cached_property
    def answer(self) -> int:
        """Which of the turns is the last one of the past."""
        return len(self._told) - 1

    @property
    def _told(self) -> tuple[Message, ...]:
        return (*_begin(self.instructions), *conversation(_shown(self.past, self._dropped_calls)))

    @property
    def _dropped_calls(self) -> set[str]:
        return _dropped_calls([*self.past, *self.input])


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        check_schema_and_type(self.type, "schema", self.schema_)
        return self

    def outputs(self) -> StructuredOutputs | None:
        return format_outputs(self.type, self.schema_)


class TextOptions(Body):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Ignored: chat templates know no such variable."
    )


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="For chat templates that know reasoning_effort, or enable_thinking (all but none); otherwise a "
        "bound on the reasoning, as model.effort_budgets has it.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None,
        description="The summary of the reasoning is the reasoning itself, since no other model is there to make one.",
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="As summary.")


class NoObfuscation(Body):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Body):
    """The body of POST /v1/responses. ``input`` holds the whole conversation, or what follows
    ``previous_response_id``."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "structured_outputs": "text.format",
    }
    DERIVED: ClassVar[Mapping[str, str]] = {"turns": "input", "sealed": "input", "listed": "input"}
    add_generation_prompt: ClassVar = True
    continue_final_message: ClassVar = False

    model: str | None = Field(None, description="The served model's name, or nothing.")
    input: str | Many[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1, description="As in chats.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="As in chats.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="As in chats.")
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="As in chats.")
    logit_bias: dict[TokenId, Bias] = Field({}, max_length=MAX_BIASES, description="As in chats.")
    stop: str | Many[str] = Field((), description="Texts that end the answer, which does not include them.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    thinking_token_budget: int | None = Field(
        None, ge=0, lt=2**31, description="The most tokens of reasoning, between its tags; then it is closed."
    )
    tools: Many[Tool] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description="The model is not shown those that only a cloud has, such as web_search.",
    )
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    max_tool_calls: int | None = Field(None, description="Ignored: it counts calls of tools that a cloud runs.")
    stream: bool = False
    stream_options: NoObfuscation | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    timeout: float | None = Field(None, gt=0, le=LONGEST_TIMEOUT_S)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    store: bool | None = Field(None, description="Whether the response is kept; server.agents.store_default if null.")
    background: bool | None = Field(None, description="true: answer at once, and compute the response meanwhile.")
    previous_response_id: str | None = Field(
        None, min_length=1, description="The stored response that input goes on from."
    )
    conversation: Any = Field(None, description="Refused: use previous_response_id.")
    include: (
        Many[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(None, description="What belongs to tools that only a cloud has is ignored.")
    metadata: Metadata | None = Field(None, description="Returned with the response.")
    client_metadata: Kept = Field(None, description="Ignored.")
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = Field(
        None, description="Ignored: there is one tier."
    )
    prompt_cache_key: str | None = Field(None, description="Ignored: equal prefixes are shared anyway.")
    prompt_cache_retention: Kept = Field(None, description="Ignored, as prompt_cache_key.")
    prompt_cache_options: Kept = Field(None, description="Ignored, as prompt_cache_key.")
    context_management: Kept = Field(None, description="Ignored: what does not fit is refused.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )

    @field_validator("conversation")
    @classmethod
    def _no_conversations(cls, value: object) -> NoReturn:
        raise ValueError("conversations are not stored here; leave it out and use previous_response_id")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.previous_response_id is None:
            check_called(self.input, self._dropped_calls)
        if self.background and self.stream:
            raise ValueError("background cannot be combined with stream; leave one out")
        if self.background and self.store is False:
            raise ValueError("background needs a response that is stored; leave store = false out")
        names: set[str] = set()
        offers = self.offers
        if len(offers) > MAX_OFFERS:
            raise ValueError(
                f"tools holds {len(offers)} tools with those of namespaces; at most {MAX_OFFERS} are allowed"
            )
        for offer in offers:
            if offer.name in names:
                raise ValueError(f"tools would show the model two tools named {offer.name!r}; rename one of them")
            names.add(offer.name)
        keys = {key for offer in offers for key in offer.keys}
        for named in self._named:
            if named.key not in keys:
                raise ValueError(f"tool_choice names {named.name!r}, which is not among tools")
        if self._forces and not self._chosen:
            raise ValueError("tool_choice asks for a tool, but tools has none that the model can be shown")
        if self._forces and self.text.format.outputs() is not None:
            raise ValueError(
                "a forced tool_choice cannot be combined with another text.format for the answer; leave one out"
            )
        return self

    @functools.cached_property
    def turns(self) -> bytes:
        return turns((*_begin(self.instructions), *conversation(_shown(self._items))))

    @functools.cached_property
    def listed(self) -> bytes:
        """The input items as JSON, for a Continuation and for the store; nothing if neither needs them."""
        if self.store is False and self.previous_response_id is None:
            return b"[]"
        return to_json([item.model_dump(exclude_none=True) for item in self._items], inf_nan_mode="constants")

    def after(self, past: bytes) -> bytes:
        """The body of a Continuation of ``past``, input items as JSON."""
        return b'{"instructions":%b,"past":%b,"input":%b}' % (to_json(self.instructions), past, self.listed)

    @functools.cached_property
    def sealed(self) -> tuple[tuple[str, str], ...]:
        """All ``encrypted_content``, with the paths of these fields."""
        return tuple(
            (f"input[{i}].encrypted_content", item.encrypted_content)
            for i, item in enumerate(self._items)
            if isinstance(item, ReasoningItem) and item.encrypted_content is not None
        )

    @property
    def _items(self) -> Sequence[Any]:
        if not isinstance(self.input, str):
            return self.input
        return [InputMessage(role="user", content=self.input)] if self.input else []

    @property
    def _dropped_calls(self) -> set[str]:
        return _dropped_calls(self._items)

    def gathered(self) -> Self | None:
        """The same with one system message at most, at the beginning: the instructions that begin the conversation are
        one, and later ones are the user's. None if it is so already."""
        messages: list[dict[str, Any]] = from_json(self.turns)
        begin = list(itertools.takewhile(lambda message: message["role"] in INSTRUCTIONS, messages))
        rest = [
            message | {"role": "user"} if message["role"] in INSTRUCTIONS else message
            for message in messages[len(begin) :]
        ]
        if len(begin) < 2 and rest == messages[len(begin) :]:
            return None
        system = {"role": "system", "content": "\n\n".join(message["content"] for message in begin)}
        made = to_json([*([system] if begin else []), *rest], inf_nan_mode="constants")
        return self.model_copy(update={"turns": made})

    @property
    def hints(self) -> dict[str, Any]:
        """The effort, which agents always send, whatever the model."""
        return {} if self.reasoning.effort is None else effort_variables(self.reasoning.effort)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def wants_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        return bool(self.reasoning.summary or self.reasoning.generate_summary)

    @functools.cached_property
    def offers(self) -> list[Offer]:
        """The tools that the model can be shown."""
        return list(offers(self.tools or ()))

    @property
    def cloud_kinds(self) -> set[str]:
        """Which kinds of tools are asked for that only a cloud has."""
        kinds = (cloud_kind(tool.type) for tool in self.tools or () if isinstance(tool, CloudTool))
        return {kind for kind in kinds if kind is not None}

    @property
    def _named(self) -> tuple[NamedTool, ...]:
        """What ``tool_choice`` names, if it names anything."""
        match self.tool_choice:
            case NamedTool():
                return (self.tool_choice,)
            case AllowedTools():
                return self.tool_choice.named
        return ()

    @functools.cached_property
    def _chosen(self) -> list[Offer]:
        """The tools that ``tool_choice`` names, or all if it names none."""
        if self.tool_choice is None or isinstance(self.tool_choice, str):
            return self.offers
        keys = {named.key for named in self._named}
        return [offer for offer in self.offers if not keys.isdisjoint(offer.keys)]

    @property
    def _offered(self) -> list[Offer]:
        """The tools that the model is shown."""
        if self.tool_choice == "none":
            return []
        return self._chosen if isinstance(self.tool_choice, AllowedTools) else self.offers

    @property
    def _forces(self) -> bool:
        """Whether the answer has to call one of the chosen tools."""
        match self.tool_choice:
            case None | "none" | "auto" | AllowedTools(mode="auto"):
                return False
        return True

    def tool_use(self) -> ToolUse:
        offered = shown(self._offered)
        forced = None
        if self._forces:
            forced = offered if self._offered is self._chosen else shown(self._chosen)
        return ToolUse(
            offered,
            forced,
            self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool),
            {offer.name for offer in self.offers if offer.custom},
            self._grammars,
            self.text.format.outputs(),
        )

    @property
    def _grammars(self) -> dict[str, ToolGrammar]:
        return {offer.name: offer.grammar for offer in self.offers if offer.grammar is not None}

    def client_name(self, param: str) -> str:
        if param == "structured_outputs" and (self._forces or (self._grammars and self.text.format.outputs() is None)):
            return "tools"
        return super().client_name(param)

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The sampling parameters, with ``overrides``. Of those that a checkpoint may have values for, their
        ``model_fields_set`` has what was set explicitly."""
        names = (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "logit_bias", "stop"),
        )
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        own = {
            "max_tokens": self.max_output_tokens,
            "seed": self.seed,
            "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
            "structured_outputs": self.text.format.outputs(),
            "thinking_token_budget": self.thinking_token_budget,
        }
        return SamplingParams(**own | given | overrides)
