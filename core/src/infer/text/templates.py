"""Chat templates: the checkpoint's Jinja template makes a prompt of messages, as in transformers.

Messages come in OpenAI's format, with call arguments as objects, but templates differ in what they support. To lose
nothing, a template is probed once with a made-up conversation (``TemplateStyle``), and it is an error if it leaves out
any of a conversation's instructions.

A template is code that came with the weights. It runs in Jinja's sandbox, which keeps it from files and attributes but
cannot keep it from running for ever. A caller that needs a bound runs this file as a process (``python templates.py``)
and kills it. The process reads a line of JSON that holds the template; then it answers each line, a JSON array
[method, *arguments], with one line of JSON.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import json
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 1 << 24
MAX_MEMORY = 1 << 30
MARK = "Q7f3aZ9k"
"""A text that no template contains: it marks places in a made-up conversation, to find them in the prompt."""
REASONING = ("reasoning_effort", "enable_thinking", "thinking")
"""Variables by which templates are told how much to reason, or whether at all."""
INSTRUCTIONS = ("system", "developer")
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": f"Look a place up. {MARK}tool",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Which one."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["place", "days"],
        },
    },
}
BARE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up"}}
PROBE_ARGUMENTS = {"place": 'Rome "IT"', "days": 3}
PROBE_IDS = ("probe0001", "functions.look_up:0")
LISTED = '"List of tools: '
"""How LFM2's templates begin a list of tools."""
Message = Mapping[str, Any]


class TemplateStyle(NamedTuple):
    """What a template expects, and how it writes calls, as probing it has shown."""

    developer: bool = False
    """It supports the role ``developer``."""
    text_arguments: bool = False
    """It takes the arguments of a call as JSON text rather than as an object."""
    no_content: str | None = ""
    """What it takes as the content of a message that consists of calls only."""
    thinking: bool = False
    """It takes the reasoning of a message that consists of calls as ``thinking``."""
    named_ids: bool = False
    """It shows a call's id instead of the function's name, so that ids have to be ``functions.NAME:N`` (Kimi K2)."""
    short_ids: bool = False
    """It refuses ids of calls other than nine letters and digits (Mistral)."""
    calls_in_content: bool = False
    """It shows tools as LFM2's templates do and drops calls, so that they have to be part of the content."""
    whole_tools: bool = False
    """It cannot show a tool without a description and parameters."""
    variables: Sequence[str] = ()
    """Which of ``REASONING`` it reads."""
    opening: str = ""
    """How it begins an assistant's message, as far as that is always the same."""
    call: str | None = None
    """How it writes a call of ``PROBE_TOOL`` with ``PROBE_ARGUMENTS``; None if it shows no tools or no calls."""


def effort_variables(effort: str) -> dict[str, Any]:
    """An effort by all of ``REASONING``; ``none`` is no reasoning."""
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


class ChatTemplate:
    """A chat template. ``tokens`` are the special tokens by role (``bos_token``, ``eos_token``), as templates name
    them; ``tool_source`` is a template for chats with tools, if they have one of their own.

    The source is not compiled before the first ``render``: Jinja evaluates constants when it compiles, and
    ``{{ 'x' * 10**10 }}`` is one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens)
        self.tool_source = tool_source

    @property
    def state(self) -> dict[str, Any]:
        """The arguments that make it."""
        return {"source": self.source, "tokens": self.tokens, "tool_source": self.tool_source}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the messages just as they are. ``variables`` are passed to the template, too. Raises ValueError with
        the template's error message, or if the prompt is too long."""
        values = {
            **self.tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._tool_template if tools else self._template
        try:
            text = template.render(values)
        except Exception as error:  # a template may fail in as many ways as a program
            raise ValueError(f"the chat template says: {str(error) or type(error).__name__}") from error
        if len(text) > MAX_CHARS:
            raise ValueError(f"the chat template makes more than {MAX_CHARS} characters of these messages")
        return text

    def prompt(self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **form: Any) -> str:
        """Render messages in OpenAI's format, adapted to the template's style. With ``continue_final_message`` the
        prompt ends where the last message's text ends. Raises ValueError as ``render`` does, and if the template leaves
        out an instruction."""
        adapted = [self._adapted(message) for message in messages]
        if self.style.named_ids:
            adapted = _with_named_ids(adapted)
        if continue_final_message:
            last = adapted[-1]
            if last.get("tool_calls"):
                raise ValueError("continue_final_message cannot go on with a message that has tool_calls")
            # Many templates strip trailing whitespace from a message; with a mark after it, it is kept.
            adapted[-1] = last | {"content": (last.get("content") or "") + MARK}
        if form.get("tools") and self.style.whole_tools:
            form["tools"] = [_whole(tool) for tool in form["tools"]]
        try:
            text = self.render(adapted, **form)
        except ValueError:
            self._check_arguments(adapted, form)
            raise
        self._check_instructions(adapted, text, form)
        if not continue_final_message:
            return text
        end = text.rfind(MARK)
        if end < 0:
            raise ValueError("continue_final_message needs a last message whose text the chat template shows")
        return text[:end]

    @functools.cached_property
    def style(self) -> TemplateStyle:
        """What probing the template has shown. Raises ValueError if the template is not valid."""
        found = self._probed()
        if found.no_content is None and not self._goes_on(found) and self._goes_on(found._replace(no_content="")):
            found = found._replace(no_content="")
        short, other = (self._goes_on(found, id) for id in PROBE_IDS)
        whole = self._renders([_USER], PROBE_TOOL) and not self._renders([_USER], BARE_TOOL)
        sources = [self.source, *([] if self.tool_source is None else [self.tool_source])]
        names = {name.name for each in sources for name in _environment().parse(each).find_all(nodes.Name)}
        variables = [name for name in REASONING if name in names]
        return found._replace(
            short_ids=short and not other, whole_tools=whole, variables=variables, opening=self._opening()
        )

    def _probed(self) -> TemplateStyle:
        _ = self._template, self._tool_template
        developer = "developer" in self.source and self._shows([{"role": "developer", "content": MARK}, _USER])
        for id, no_content, text_arguments in itertools.product(PROBE_IDS, (None, ""), (False, True)):
            call = _probe(id, text_arguments)
            shown = self._turn({"role": "assistant", "content": no_content, "tool_calls": [call]})
            if shown is None:
                continue
            tools_shown, turn = shown
            # No model was trained on None or a dict as Python prints them, so such a template needs other arguments.
            if "look_up" in turn and "Rome" in turn and "None" not in turn and "{'" not in turn:
                thought = {"role": "assistant", "content": no_content, "tool_calls": [call], "thinking": MARK}
                thinking = "thinking" in self.source and self._shows([_USER, thought])
                named = id != PROBE_IDS[0]
                return TemplateStyle(
                    developer, text_arguments, no_content, thinking, named, call=turn if tools_shown else None
                )
        if LISTED in self.source:
            call = {"function": {"name": "look_up", "arguments": PROBE_ARGUMENTS}}
            shown = self._turn({"role": "assistant", "content": _in_python([call])})
            if shown is not None and shown[0]:
                return TemplateStyle(developer, calls_in_content=True, call=shown[1])
        return TemplateStyle(developer)

    @functools.cached_property
    def _template(self) -> Template:
        return self._compiled(self.source)

    @functools.cached_property
    def _tool_template(self) -> Template:
        return self._template if self.tool_source is None else self._compiled(self.tool_source)

    def _compiled(self, source: str) -> Template:
        try:
            return _environment().from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error

    def _adapted(self, message: Message) -> dict[str, Any]:
        """``message`` in the form that this template takes."""
        adapted = dict(message)
        if adapted["role"] == "developer" and not self.style.developer:
            adapted["role"] = "system"
        if self.style.short_ids:
            adapted = _with_short_id(adapted)
        calls = adapted.get("tool_calls")
        if calls and self.style.calls_in_content:
            adapted["content"] = (adapted.get("content") or "") + _in_python(calls)
        if adapted.get("content") is None:
            adapted["content"] = self.style.no_content if calls else ""
        if calls and not adapted["content"] and self.style.thinking and adapted.get("reasoning_content"):
            adapted["thinking"] = adapted["reasoning_content"]
        if calls and self.style.text_arguments:
            adapted["tool_calls"] = [call | {"function": _with_text(call["function"])} for call in calls]
        return adapted

    def _check_arguments(self, messages: Sequence[Message], form: Mapping[str, Any]) -> None:
        """Raise ValueError if the template fails because a call's arguments are no object."""
        without = [
            message | {"tool_calls": [call | {"function": call["function"] | {"arguments": {}}} for call in calls]}
            if (calls := message.get("tool_calls"))
            else message
            for message in map(dict, messages)
        ]
        try:
            self.render(without, **form)
        except ValueError:
            return
        for i, message in enumerate(messages):
            for j, call in enumerate(message.get("tool_calls") or ()):
                if not isinstance(call["function"]["arguments"], dict):
                    raise ValueError(
                        f"messages[{i}].tool_calls[{j}].function.arguments must be a JSON object, because the chat "
                        "template shows its members one by one; send an object, such as {}"
                    )

    def _check_instructions(self, messages: Sequence[Message], text: str, form: Mapping[str, Any]) -> None:
        """Raise ValueError if the prompt lacks an instruction. Many templates show one system message, at the
        beginning, or none, and silently drop the others."""
        wanted = [i for i, message in enumerate(messages) if message["role"] in INSTRUCTIONS and message["content"]]
        at = 0
        for i in wanted:
            content = messages[i]["content"].strip()
            begin = text.find(content, at)
            if begin < 0:
                break
            at = begin + len(content)
        else:
            return
        # The template may have changed an instruction's text rather than dropped it, so look for marks, which stay as
        # they are.
        marked = list(messages)
        for i in wanted:
            marked[i] = {**messages[i], "content": f"{MARK}{i}."}
        shown = self.render(marked, **form)
        for i in wanted:
            if f"{MARK}{i}." not in shown:
                raise ValueError(
                    f"the chat template does not show messages[{i}], of the role {messages[i]['role']!r}; many know "
                    "only one system message, at the beginning, or none"
                )

    def _opening(self) -> str:
        """How an assistant's message begins that is asked for, and one that others follow."""
        said = {"role": "assistant", "content": f"{MARK}said"}
        try:
            texts = [self.render([_USER], add_generation_prompt=asked) for asked in (True, False)]
            turn = self.render([_USER, said, _USER], add_generation_prompt=False).partition(f"{MARK}said")[0]
        except ValueError:
            return ""
        asked, before = texts
        return _common(asked.removeprefix(before), turn.removeprefix(before)).rstrip()

    def _renders(self, messages: Sequence[Message], tool: Mapping[str, Any]) -> bool:
        try:
            self.render(messages, tools=[tool])
        except ValueError:
            return False
        return True

    def _goes_on(self, style: TemplateStyle, id: str = "") -> bool:
        """Whether a message of calls in this style may stand before others: many templates read the last one's content
        in another way."""
        id = id or PROBE_IDS[style.named_ids]
        call = _probe(id, style.text_arguments)
        message = {"role": "assistant", "content": style.no_content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": id, "name": "look_up", "content": "x"}
        return self._renders([_USER, message, result], PROBE_TOOL)

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return MARK in self.render(messages, tools=None, add_generation_prompt=True)
        except ValueError:
            return False

    def _turn(self, message: Message) -> tuple[bool, str] | None:
        """Whether the template shows tools, and how it writes an assistant's message; None if it raises an error."""
        user = {"role": "user", "content": f"{MARK}user"}
        said = {"role": "assistant", "content": f"{MARK}said"}
        form: dict[str, Any] = {"tools": [PROBE_TOOL], "add_generation_prompt": False}
        try:
            text = self.render([user, message], **form)
            plain = self.render([user, said], **form)
            prompt = self.render([user], **form | {"add_generation_prompt": True})
        except ValueError:
            return None
        # Take what follows the question in each text. ``opening`` is how the assistant's turn begins, ``after`` is how
        # it ends, and the rest of ``turn`` is the message itself.
        before, _, after = plain.rpartition(f"{MARK}user")[2].partition(f"{MARK}said")
        opening = prompt.rpartition(f"{MARK}user")[2]
        turn = text.rpartition(f"{MARK}user")[2]
        common = _common(turn, opening)
        if common.rfind("<") > common.rfind(">"):  # the common part ends inside a tag: that tag belongs to the message
            common = common[: common.rfind("<")]
        turn = turn[max(len(head) for head in (before, opening, common) if turn.startswith(head)) :]
        turn = turn.removesuffix(_end(turn, after)).rpartition("</think>")[2]
        return f"{MARK}tool" in text, turn


def _probe(id: str, text_arguments: bool) -> dict[str, Any]:
    """A call of ``PROBE_TOOL``."""
    arguments = json.dumps(PROBE_ARGUMENTS) if text_arguments else PROBE_ARGUMENTS
    return {"id": id, "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def _common(one: str, other: str) -> str:
    """The longest common prefix."""
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(different, min(len(one), len(other)))]


def _end(turn: str, after: str) -> str:
    """What ends both texts. Unless it is all of ``after``, it begins with a whole tag that stands behind another."""
    end = _common(turn[::-1], after[::-1])[::-1]
    while end and end != after and (turn[: -len(end)][-1:].isalnum() or ">" in end.partition("<")[0]):
        _, tag, rest = end[1:].partition("<")
        end = tag + rest
    return end


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls' ids, also those of their results, that name functions and count calls."""
    ids: dict[Any, str] = {}
    count = 0
    adapted = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call.get("id")] = f"functions.{call['function']['name']}:{count}"
            calls.append(call | {"id": ids[call.get("id")]})
            count += 1
        answered = ids.get(message.get("tool_call_id"))
        more = {"tool_calls": calls} if calls else {"tool_call_id": answered} if answered else {}
        adapted.append(message | more)
    return adapted


def _with_short_id(part: Mapping[str, Any]) -> dict[str, Any]:
    """A message, or a call, whose ids that are too long are others of nine letters and digits."""
    calls = part.get("tool_calls")
    made: dict[str, Any] = {"tool_calls": [_with_short_id(call) for call in calls]} if calls else {}
    for key in ("id", "tool_call_id"):
        id = part.get(key)
        if isinstance(id, str) and not re.fullmatch("[A-Za-z0-9]{9}", id):
            made[key] = hashlib.sha256(id.encode(errors="surrogatepass")).hexdigest()[:9]
    return {**part, **made}


def _in_python(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as LFM2 writes them."""
    return f"<|tool_call_start|>[{', '.join(_one_in_python(call['function']) for call in calls)}]<|tool_call_end|>"


def _one_in_python(function: Mapping[str, Any]) -> str:
    given = function["arguments"]
    if isinstance(given, str):  # that is no JSON
        return f"{function['name']}({given})"
    values = {key: _tojson(value) if isinstance(value, str) else repr(value) for key, value in given.items()}
    return f"{function['name']}({', '.join(f'{key}={value}' for key, value in values.items())})"


_USER = {"role": "user", "content": "x"}


class _Generation(Extension):
    """``{% generation %}`` marks, for training, what the model has written; here it renders its contents."""

    tags = {"generation"}  # noqa: RUF012  (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's ``tojson`` without its escaping of <, > and &, as in transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _whole(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with a description and parameters, which may be empty."""
    return {
        **tool,
        "function": {"description": "", "parameters": {"type": "object", "properties": {}}, **tool["function"]},
    }


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else _tojson(arguments)}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    template = ChatTemplate(**json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        method, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            if method == "style":
                answer = {"value": template.style._asdict()}
            else:
                messages, form = arguments
                answer = {"value": template.prompt(messages, **form)}
            # Escapes would make the answer up to three times as long as UTF-8 does.
            data = json.dumps(answer, ensure_ascii=False).encode()
        except ValueError as error:
            data = json.dumps({"error": str(error)}).encode()
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
