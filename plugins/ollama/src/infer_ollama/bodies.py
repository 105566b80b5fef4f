"""The bodies of Ollama's API."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import to_json

from infer.contracts.params import MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS, SamplingParams, StructuredOutputs
from infer_server.http.body import Body, Many, Text
from infer_server.messages import Kept
from infer_server.replies import ToolUse
from infer_server.tools import MAX_TOOLS, Function

NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"  # one way to read each: the time grows with the length alone
UNIT = r"(?:ns|us|µs|μs|ms|s|m|h)"
DURATION = re.compile(rf"[+-]?{NUMBER}(?:{UNIT}(?:{NUMBER}{UNIT})*)?")
MAX_DURATION_CHARS = 64
SAMPLED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""The options that say how tokens are drawn, and the engine's names of them."""
NOT_CUT = "Ignored: nothing is ever cut; a prompt that does not fit is refused."
HARDWARE = "Ignored: the server's settings say it."


def _duration(value: float | str) -> float | str:
    if isinstance(value, str) and not (len(value) <= MAX_DURATION_CHARS and DURATION.fullmatch(value)):
        raise ValueError(
            f"it has to be seconds, or a duration of at most {MAX_DURATION_CHARS} characters such as '5m' or '1h30m'"
        )
    return value


KeepAlive = Annotated[float | str, AfterValidator(_duration)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Options(Body):
    """How to answer. What is not set is as the checkpoint says."""

    num_predict: int = Field(-1, ge=-2, lt=2**31, description="The most tokens to generate; below 1: as many as fit.")
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same text; -1: random.")
    stop: Stop | Annotated[Many[Stop], Field(max_length=MAX_STOPS)] = ()
    repeat_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repeat_last_n: int | None = Field(None, description="-1: penalties see all of the text, as they do without it.")
    mirostat: Literal[0] | None = None
    mirostat_tau: Kept = Field(None, description="Ignored: mirostat is off.")
    mirostat_eta: Kept = Field(None, description="Ignored, as mirostat_tau.")
    tfs_z: float | None = Field(None, ge=1, le=1)
    typical_p: float | None = Field(None, ge=1, le=1)
    num_ctx: int | None = Field(None, ge=1, description=f"{NOT_CUT} The server's engine.max_seq_len is the context.")
    num_keep: int | None = Field(None, description=NOT_CUT)
    num_batch: Kept = Field(None, description=HARDWARE)
    num_gpu: Kept = Field(None, description=HARDWARE)
    main_gpu: Kept = Field(None, description=HARDWARE)
    num_thread: Kept = Field(None, description=HARDWARE)
    numa: Kept = Field(None, description=HARDWARE)
    low_vram: Kept = Field(None, description=HARDWARE)
    f16_kv: Kept = Field(None, description=HARDWARE)
    use_mmap: Kept = Field(None, description=HARDWARE)
    use_mlock: Kept = Field(None, description=HARDWARE)
    penalize_newline: Literal[True] | None = None
    logits_all: Literal[False] | None = None
    vocab_only: Literal[False] | None = None
    embedding_only: Literal[False] | None = None

    @model_validator(mode="after")
    def _penalized(self) -> Self:
        if self.repeat_last_n not in (None, -1) and self.repeat_penalty != 1:
            raise ValueError(
                f"repeat_last_n = {self.repeat_last_n} is not supported: repeat_penalty sees all of the text; leave it "
                "out, or give -1"
            )
        return self


class Named(Body):
    """A body that is about a model."""

    model_name: Text = Field(alias="model", description="The served model's name or alias, with or without :latest.")

    @property
    def asked(self) -> str:
        return self.model_name


class Loading(Named):
    """A body for which Ollama would load a model."""

    options: Options = Options()
    keep_alive: KeepAlive | None = Field(None, description="Ignored: the model stays while the server runs.")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests with lower numbers are served earlier.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Share cached prefixes only with requests of the same salt."
    )

    @property
    def unloads(self) -> bool:
        """Whether the model may go at once."""
        value = self.keep_alive
        return value is not None and (
            re.fullmatch(r"[0.a-zµμ+-]+", value) is not None if isinstance(value, str) else not value
        )


class Answered(Loading):
    """What /api/chat and /api/generate have in common."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "max_tokens": "options.num_predict",
        "structured_outputs": "format",
        "logprobs": "top_logprobs",
        "seed": "options.seed",
        **{engine: f"options.{own}" for own, engine in SAMPLED.items()},
    }

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="json, or a JSON schema that the answer has to match."
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Whether to reason, or how much; without it, as the chat template has it."
    )
    logprobs: bool = Field(False, description="Report each token's log-probability.")
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="Also report so many likeliest tokens.")
    truncate: bool | None = Field(None, description=NOT_CUT)
    shift: bool | None = Field(None, description=NOT_CUT)

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self

    @property
    def hints(self) -> dict[str, Any]:
        """What the chat template is told of reasoning. It has an effect only if the template knows the word."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return dict.fromkeys(("enable_thinking", "thinking"), bool(self.think)) | effort

    def outputs(self) -> StructuredOutputs | None:
        """The answer's format; None if any text will do."""
        if isinstance(self.format, dict):
            return StructuredOutputs(json_schema=self.format)
        return StructuredOutputs(json_object=True) if self.format else None

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The sampling parameters, with ``overrides``. Their ``model_fields_set`` has of the options only those that
        were set."""
        options = self.options
        given = {SAMPLED[own]: getattr(options, own) for own in SAMPLED if own in options.model_fields_set}
        fields = {
            "max_tokens": options.num_predict if options.num_predict > 0 else None,
            "seed": None if options.seed == -1 else options.seed,
            "logprobs": self.top_logprobs if self.logprobs else None,
            "structured_outputs": self.outputs(),
        }
        return SamplingParams(**fields | given | overrides)


class CalledFunction(Body):
    name: Text
    arguments: dict[str, Any] = Field({})
    index: Kept = None


class Call(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: tuple[()] | None = None
    tool_calls: Many[Call] | None = None
    tool_name: str | None = None
    name: str | None = Field(None, description="As tool_name.")
    tool_call_id: str | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class ChatBody(Answered):
    """The body of POST /api/chat."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages", **Answered.NAMES}
    DERIVED: ClassVar[Mapping[str, str]] = {"history": "messages"}

    messages: Many[ChatMessage] = ()
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)

    def tool_use(self) -> ToolUse:
        return ToolUse([tool.shown() for tool in self.tools or ()], format=self.outputs())

    @functools.cached_property
    def history(self) -> tuple[bytes, bool]:
        """The messages as ``ChatTemplate.prompt`` takes them, as JSON, and whether the last one is to be continued;
        no JSON if there are none."""
        if not self.messages:
            return b"", False
        last = self.messages[-1]
        continues = last.role == "assistant" and not last.tool_calls
        return to_json(conversation(self.messages), inf_nan_mode="constants"), continues


def conversation(messages: tuple[ChatMessage, ...]) -> list[dict[str, Any]]:
    """The messages as ``ChatTemplate.prompt`` takes them. Calls without an id get one, and so do their results, which
    belong to the calls of their name, or to all calls in turn."""
    shown: list[dict[str, Any]] = []
    made = 0
    waiting: list[tuple[str, str]] = []  # the name and the id of calls without a result
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if (name := message.name if message.tool_name is None else message.tool_name) is not None:
            plain["name"] = name
        if message.thinking is not None:
            plain["reasoning_content"] = message.thinking
        if message.role == "tool":
            id = message.tool_call_id
            if id is None:
                id = next((its for called, its in waiting if name in (None, called)), None)
            if id is not None:
                plain["tool_call_id"] = id
                waiting = [each for each in waiting if each[1] != id]
        elif message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            calls, waiting = [], []
            for call in message.tool_calls:
                id = call.id or f"call{made:05d}"  # the only form that all templates take
                made += 1
                waiting.append((call.function.name, id))
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": id, "type": "function", "function": function})
            plain["tool_calls"] = calls
        shown.append(plain)
    return shown


class GenerateBody(Answered):
    """The body of POST /api/generate."""

    NAMES: ClassVar[Mapping[str, str]] = {"messages": "prompt", **Answered.NAMES}

    prompt: str = ""
    system: str | None = None
    raw: bool = Field(False, description="Give the model the prompt as it is, without a chat template.")
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: tuple[()] | None = None
    images: tuple[()] | None = None
    width: None = None
    height: None = None
    steps: None = None

    @model_validator(mode="after")
    def _bare(self) -> Self:
        if self.raw and (self.system or self.think is not None):
            raise ValueError(
                f"{'system' if self.system else 'think'} has no effect with raw = true; leave one of them out"
            )
        return self

    @property
    def turns(self) -> bytes:
        """The conversation that the prompt stands for, as JSON."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return to_json([*system, {"role": "user", "content": self.prompt}], inf_nan_mode="constants")


class EmbedBody(Loading):
    """The body of POST /api/embed."""

    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    input: str | Many[str]
    truncate: bool | None = Field(None, description=NOT_CUT)
    dimensions: int | None = Field(None, ge=1, description="Keep so many leading values, and normalize again.")


class OldEmbedBody(Loading):
    """The body of POST /api/embeddings."""

    prompt: str


class NamedEitherWay(Body):
    """What names a model as "model", or as "name" as older clients do."""

    model_name: str | None = Field(None, alias="model")
    name: str | None = Field(None, description="As model.")

    @model_validator(mode="after")
    def _about_one(self) -> Self:
        if not self.asked:
            raise ValueError("model is missing; give the name of one")
        return self

    @property
    def asked(self) -> str:
        return self.model_name or self.name or ""


class ShowBody(NamedEitherWay):
    """The body of POST /api/show, and what the bodies of other routes about models may have."""

    verbose: Kept = Field(None, description="Ignored: there is no more to show.")
    system: Kept = Field(None, description="Ignored: a model has no system prompt of its own.")
    template: Kept = Field(None, description="Ignored, as system.")
    options: Kept = Field(None, description="Ignored, as system.")


class PullBody(NamedEitherWay):
    """The body of POST /api/pull."""

    stream: bool = True
    insecure: Kept = Field(None, description="Ignored: nothing is fetched.")
    username: Kept = Field(None, description="Ignored, as insecure.")
    password: Kept = Field(None, description="Ignored, as insecure.")
