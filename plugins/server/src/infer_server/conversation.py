"""What the chat template decides: the prompt made from messages, and how the answer is read."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, cast

from tokenizers import Tokenizer

from infer.assemble.served import Served
from infer.contracts.params import CallOutputs, SamplingParams
from infer.contracts.request import ThinkingTokens
from infer.contracts.sections import ModelSettings
from infer.contracts.text import ReasoningTags
from infer.errors import RequestError, installing
from infer.text.reasoning import opens_reasoning
from infer.text.templates import PROBE_ARGUMENTS, PROBE_TOOL, REASONING, TemplateStyle, effort_variables
from infer.text.tool_formats import ToolFormat, recognize
from infer_server.http.body import Body
from infer_server.http.parsing import checked
from infer_server.rendering import Renderer
from infer_server.replies import Reply, ToolUse

log = logging.getLogger(__name__)

OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
NO_TOOLS = ToolUse()
USER, ASSISTANT = b'{"role":"user"', b'{"role":"assistant"'
"""How messages begin in ``turns``."""
RESERVED = ("self", "loop", "caller", "varargs", "kwargs")
"""Names that have a meaning of their own in Jinja templates."""


class ConversationBody(Protocol):
    """What a prompt is made of. It may have ``reasoning_effort``, which has to have an effect; or ``hints``, variables
    that the template need not know, and of which a ``reasoning_effort`` that it refuses is left out. An effort that the
    template does not know bounds the reasoning, by ``model.effort_budgets``."""

    @property
    def turns(self) -> bytes:
        """The messages as JSON: ``infer_server.messages.turns``."""

    @property
    def add_generation_prompt(self) -> bool: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class Conversation:
    """The model's chat template, which is rendered in a process of its own."""

    def __init__(self, served: Served, settings: ModelSettings) -> None:
        self._served = served
        self._renderer = None if served.template is None else Renderer(served.template)
        self._setting = settings.tool_format
        self._budgets = settings.budgets
        self._probed: TemplateStyle | None = None
        self.tool_format: ToolFormat | None = None
        """How the model writes tool calls; None if unknown. ``prepare`` sets it."""
        self._told: set[str] = set()
        """The formats of which the log has said that they hold no grammars."""
        self._opening: tuple[int, ...] = ()
        """The tokens with which an assistant's message begins; none if they are unknown. ``prepare`` sets them."""

    async def prepare(self) -> None:
        """Find out how the chat template begins messages and writes tool calls, unless the settings say the latter.
        Call this first."""
        formats = self._served.tool_formats
        if self._setting != "auto":
            self.tool_format = next(iter(formats), None)
        if self._served.template is None:
            return
        written, why = None, "it shows no tools, or no calls"
        try:
            style = await self._style()
            self._opening = tuple(self._served.tokenizer.encode(style.opening, add_special_tokens=False).ids)
            written = style.call
        except RequestError as error:
            why = str(error)
        if self._setting != "auto":
            return
        if written is not None:
            function = PROBE_TOOL["function"]
            known = {function["name"]: function["parameters"]}
            self.tool_format = recognize(formats, written, known, (function["name"], PROBE_ARGUMENTS))
            why = f"a call, which it writes as {written[:200]!r}, cannot be read back"
        if self.tool_format is None:
            advice = "set model.tool_format if the model has one"
            if not formats:
                why, advice = "none is installed", f"{installing('infer-tool-formats')} brings some"
            log.warning(
                "requests with tools are refused: the chat template has none of the known formats (%s); %s", why, advice
            )
        else:
            log.info("tool calls are read as model.tool_format = %s", self.tool_format.name)

    async def close(self) -> None:
        """End the renderer's process."""
        if self._renderer is not None:
            await self._renderer.close()

    async def render(self, messages: bytes, /, **form: Any) -> str:
        """The prompt that the chat template makes from messages in JSON: ``ChatTemplate.prompt``. Raises
        RequestError."""
        return await self._process(messages, **form)

    async def prompt(self, body: ConversationBody, tools: Sequence[dict[str, Any]]) -> str:
        """The prompt that the chat template makes from a request's messages. Raises RequestError."""
        return (await self._prompt(body, tools))[0]

    async def _prompt(self, body: ConversationBody, tools: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
        """The prompt, and the effort that the body asks for and the template does not know. Raises RequestError."""
        variables = body.chat_template_kwargs or {}
        effort: str | None = getattr(body, "reasoning_effort", None)
        hints: Mapping[str, Any] = getattr(body, "hints", {})
        known = (await self._style()).variables if effort is not None or hints else ()
        if effort is not None:
            told = effort_variables(effort)
            variables = {name: told[name] for name in known} | variables
        for name in variables:
            if name in OWN_FIELDS:
                raise RequestError(
                    f"chat_template_kwargs holds {name!r}, which has a field of its own.", param="chat_template_kwargs"
                )
            if name in RESERVED:
                raise RequestError(
                    f"chat_template_kwargs holds {name!r}, which templates cannot be given.",
                    param="chat_template_kwargs",
                )
        render = functools.partial(
            self.render,
            body.turns,
            tools=list(tools) or None,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
        taken, refused = untold_effort(known, effort, hints)
        try:
            return await render(**{**hints, **variables}), taken
        except RequestError:
            if "reasoning_effort" not in hints or "reasoning_effort" in variables:
                raise
        # Many templates know only a few efforts, and refuse others.
        fewer = {name: hints[name] for name in hints if name != "reasoning_effort"}
        return await render(**{**fewer, **variables}), refused

    async def reply(
        self, body: ConversationBody, sampling: Callable[..., SamplingParams], tools: ToolUse = NO_TOOLS
    ) -> Reply:
        """The reply that a body asks for. ``sampling`` makes its sampling parameters, and takes the
        ``structured_outputs`` that calls need. Raises RequestError."""
        if tools.offered and tools.forced is None and self.tool_format is None:
            if self._setting == "auto" and not self._served.tool_formats:
                raise RequestError(
                    "This server has no format of tool calls; install infer-tool-formats there, or force a call with "
                    "tool_choice.",
                    param="tools",
                )
            raise RequestError(
                "The format in which this model's chat template writes tool calls is unknown; set model.tool_format, "
                "or force a call with tool_choice.",
                param="tools",
            )
        prompt, effort = await self._prompt(body, tools.offered)
        tags = self._served.reasoning
        thinking = tags is not None and opens_reasoning(prompt, tags)
        end = self._tag_tokens[1] if thinking else ()
        outputs = tools.outputs()
        held = None if outputs is not None else self._held(tools, thinking, end)
        if held is not None and tags is not None and tags.reader is not None:
            end = ()  # what holds the reply reads all of it, as the reader does
        overrides = {} if (chosen := outputs or held) is None else {"structured_outputs": chosen}
        params = self._served.defaulted(checked(lambda: sampling(**overrides), type(cast(Body, body))))
        # Whether a format applies from the first token on, so that there is no reasoning.
        bound = params.structured_outputs is not None and not end and held is None
        tokens = None if tags is None else self._thinking_tokens(tags, thinking)
        if tokens is None:
            why = "this model does not reason"
            if tags is not None:
                why = f"this model reasons between {tags.opening} and {tags.closing}, which are no tokens of its own"
            if params.thinking_token_budget is not None and not bound:
                raise RequestError(
                    f"thinking_token_budget has no effect: {why}; leave it out.", param="thinking_token_budget"
                )
            if getattr(body, "reasoning_effort", None) is not None and not (await self._style()).variables:
                raise RequestError(
                    f"reasoning_effort = {effort!r} has no effect: this model's chat template knows none of "
                    f"{', '.join(REASONING)}, and {why}; leave it out.",
                    param="reasoning_effort",
                )
        elif effort is not None and params.thinking_token_budget is None:
            budget = 0 if effort == "none" else self._budgets.get(effort)
            params = params.model_copy(update={"thinking_token_budget": budget})
        if bound:
            tags, tokens, params = None, None, params.model_copy(update={"thinking_token_budget": None})
        steps = body.turns.count(ASSISTANT, max(0, body.turns.rfind(USER)))
        return Reply(
            prompt, params, tools, self.tool_format, tags, thinking, end, tokens, opening=self._opening, steps=steps
        )

    def _held(self, tools: ToolUse, thinking: bool, end: Sequence[int]) -> CallOutputs | None:
        """What holds calls in a free reply to the grammars of their inputs, or a reply to be either calls or what its
        format says. None if nothing does: the log says so, if that is because of how the model writes calls.
        ``thinking`` means that the reply begins within reasoning, and ``end`` are the tokens behind which what is held
        begins, if there are such. Raises RequestError."""
        either = tools.either
        if self.tool_format is None or not (either or (tools.held and tools.format is None)):
            return None
        tags = self._served.reasoning
        forms, around, opened = self.tool_format.forms, None if tags is None else tags[:2], thinking and not end
        if tags is not None and tags.reader is not None:
            if either and end:
                return None  # calls stand before the channel in which the format applies
            forms, around, opened = tags.forms, None, False
        if either:
            if not self.tool_format.syntax or (tags is not None and tags.reader is not None):
                raise RequestError(
                    f"A format of the answer cannot be combined with tools that the model may call: no grammar tells "
                    f"its calls, of model.tool_format = {self.tool_format.name}, from the answer; set tool_choice to "
                    "none or required, or leave out tools or the format.",
                    param="tools",
                )
            return CallOutputs(
                kind="either",
                functions=tools.functions,
                single=not tools.parallel,
                answer=tools.format,
                syntax=self.tool_format.syntax,
                tags=around,
                opened=opened,
            )
        if not forms:
            if self.tool_format.name not in self._told:
                self._told.add(self.tool_format.name)
                log.warning(
                    "the model is only told of the grammars of tools unless a call is forced: in calls of "
                    "model.tool_format = %s it cannot be held to them",
                    self.tool_format.name,
                )
            return None
        return CallOutputs(kind="free", tools=tools.held, forms=forms, tags=around, opened=opened)

    def _thinking_tokens(self, tags: ReasoningTags, opened: bool) -> ThinkingTokens | None:
        """The tokens around the reasoning; None if they are not always the same."""
        opening, closing = self._tag_tokens
        return ThinkingTokens(opening, closing, opened) if (opening or opened) and closing and not tags.reader else None

    @functools.cached_property
    def _tag_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of the tags before and behind the reasoning; none of a tag that is written in several ways."""
        tags, tokenizer = self._served.reasoning, self._served.tokenizer
        return ((), ()) if tags is None else (_fixed(tokenizer, tags.opening), _fixed(tokenizer, tags.closing))

    async def _style(self) -> TemplateStyle:
        if self._probed is None:
            self._probed = await self._process.style()
        return self._probed

    @property
    def _process(self) -> Renderer:
        if self._renderer is None:
            raise RequestError(
                "This checkpoint has no chat template; give one with model.chat_template, or use /v1/completions.",
                param="messages",
            )
        return self._renderer


def untold_effort(
    known: Collection[str], effort: str | None, hints: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """The effort of which a template that reads the variables ``known`` is not told, so that it bounds the reasoning:
    if the template takes what it is given, and if it refuses the effort's name. A request asks for ``effort``, or has
    ``hints``."""
    given = effort or hints.get("reasoning_effort")
    wanted = "none" if hints.get("enable_thinking") is False else given
    if wanted == "none" and not {"enable_thinking", "thinking"}.isdisjoint(known):
        wanted = None
    told = wanted == given != "none" and "reasoning_effort" in known
    return None if told else wanted, wanted


def _fixed(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens of a text that are the same wherever it stands, because it is one token or stands between two added
    ones; none if that is not so."""
    if (whole := tokenizer.token_to_id(text)) is not None:
        return (whole,)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    added = tokenizer.get_added_tokens_decoder()
    return tuple(ids) if ids and ids[0] in added and ids[-1] in added else ()
