"""Messages to a prompt: the checkpoint's Jinja template, read as transformers reads it.

Messages come in one form, OpenAI's, with arguments as objects; templates differ in what they know. So that none of it
gets lost on the way, a template is tried once with a conversation of its own making (``Manners``), and what it does not
show of a conversation's instructions is an error.

A template is code that came with the weights. It runs in Jinja's sandbox, which keeps it from files and attributes but
not from running for ever; who cannot have that runs this file as a process (``python templates.py``) and kills it.
That process reads a line of JSON that holds the template, then answers every line, [method, *arguments], with one.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
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
"""Stands for a text in a conversation made up to see what a template does with it: no template says it by itself."""
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
PROBE_ARGUMENTS = {"place": 'Rome "IT"', "days": 3}
Message = Mapping[str, Any]


class Manners(NamedTuple):
    """What is special about a template: whether it has a role ``developer``, whether it takes a call's arguments as
    text, what it takes for the content of a message that has calls only. ``call`` is how it writes a call, namely of
    ``PROBE_TOOL`` with ``PROBE_ARGUMENTS``; None where it shows no tools or no calls."""

    developer: bool = False
    text_arguments: bool = False
    no_content: str | None = ""
    call: str | None = None


class ChatTemplate:
    """``tokens`` are the special tokens by their role (``bos_token``, ``eos_token``), as templates name them.

    Nothing of the source is looked at before the first ``render``: Jinja works out constants when it compiles, and
    ``{{ 'x' * 10**10 }}`` is one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """What the template makes of messages just as they are. ``more`` goes to it too. Raises ValueError with what
        the template complains of."""
        values = {
            **self.tokens,
            **more,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template
        try:
            text = template.render(values)
        except Exception as error:  # a template may fail in as many ways as a program
            raise ValueError(f"the chat template says: {str(error) or type(error).__name__}") from error
        if len(text) > MAX_CHARS:
            raise ValueError(f"the chat template makes more than {MAX_CHARS} characters of this")
        return text

    def prompt(self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **form: Any) -> str:
        """``render`` for messages in OpenAI's form, by the template's manners. With ``continue_final_message`` the
        prompt ends where the last message's text does. Raises ValueError also where the template hides an
        instruction."""
        adapted = [self._adapted(message) for message in messages]
        if continue_final_message:
            last = adapted[-1]
            if last.get("tool_calls"):
                raise ValueError("continue_final_message cannot go on with a message that has tool_calls")
            # Text in the middle of a message keeps the blanks that many templates strip from its end.
            adapted[-1] = last | {"content": (last.get("content") or "") + MARK}
        text = self.render(adapted, **form)
        self._check_instructions(adapted, text, form)
        if not continue_final_message:
            return text
        end = text.rfind(MARK)
        if end < 0:
            raise ValueError("continue_final_message needs a last message whose text the chat template shows")
        return text[:end]

    @functools.cached_property
    def manners(self) -> Manners:
        """Raises ValueError where the template is not valid."""
        _ = self._template
        developer = "developer" in self.source and self._shows([{"role": "developer", "content": MARK}, _USER])
        for no_content, text_arguments in itertools.product((None, ""), (False, True)):
            arguments = json.dumps(PROBE_ARGUMENTS) if text_arguments else PROBE_ARGUMENTS
            call = {"id": "probe0001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            found = self._turn({"role": "assistant", "content": no_content, "tool_calls": [call]})
            if found is None:
                continue
            tools_shown, turn = found
            # As Python would show them, None and a dict are not what a model was trained on.
            if "look_up" in turn and "Rome" in turn and "None" not in turn and "{'" not in turn:
                return Manners(developer, text_arguments, no_content, turn if tools_shown else None)
        return Manners(developer)

    @functools.cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error

    def _adapted(self, message: Message) -> dict[str, Any]:
        """A message as this template takes it."""
        found = dict(message)
        if found["role"] == "developer" and not self.manners.developer:
            found["role"] = "system"
        calls = found.get("tool_calls")
        if found.get("content") is None:
            found["content"] = self.manners.no_content if calls else ""
        if calls and self.manners.text_arguments:
            found["tool_calls"] = [call | {"function": _with_text(call["function"])} for call in calls]
        return found

    def _check_instructions(self, messages: Sequence[Message], text: str, form: Mapping[str, Any]) -> None:
        """Many templates know one system message, at the beginning, or none, and drop the others in silence."""
        wanted = [i for i, message in enumerate(messages) if message["role"] in INSTRUCTIONS and message["content"]]
        at = 0
        for i in wanted:
            content = messages[i]["content"].strip()
            found = text.find(content, at)
            if found < 0:
                break
            at = found + len(content)
        else:
            return
        # A template may well change a text, so this has not proved anything: marks stay as they are.
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

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return MARK in self.render(messages, tools=None, add_generation_prompt=True)
        except ValueError:
            return False

    def _turn(self, message: Message) -> tuple[bool, str] | None:
        """Whether the template shows tools, and what it makes of an assistant's message; None where it refuses."""
        user = {"role": "user", "content": f"{MARK}user"}
        said = {"role": "assistant", "content": f"{MARK}said"}
        form: dict[str, Any] = {"tools": [PROBE_TOOL], "add_generation_prompt": False}
        try:
            text = self.render([user, message], **form)
            plain = self.render([user, said], **form)
            prompt = self.render([user], **form | {"add_generation_prompt": True})
        except ValueError:
            return None
        # Of each, what follows the question: how the turn begins, how it ends, and what lies between.
        before, _, after = plain.rpartition(f"{MARK}user")[2].partition(f"{MARK}said")
        asked = prompt.rpartition(f"{MARK}user")[2]
        turn = text.rpartition(f"{MARK}user")[2]
        common = _common(turn, asked)
        if common.rfind("<") > common.rfind(">"):  # in the middle of a tag, which is the next one's beginning too
            common = common[: common.rfind("<")]
        turn = turn[max(len(head) for head in (before, asked, common) if turn.startswith(head)) :]
        turn = turn.removesuffix(after).rpartition("</think>")[2]
        return f"{MARK}tool" in text, turn


def _common(one: str, other: str) -> str:
    """What both begin with."""
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(different, min(len(one), len(other)))]


_USER = {"role": "user", "content": "x"}


class _Generation(Extension):
    """``{% generation %}`` marks, for training, what the model has written; here it is only what is inside."""

    tags = {"generation"}  # noqa: RUF012  (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, leaves <, > and & alone."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


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
            if method == "manners":
                answer = {"value": template.manners._asdict()}
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
