"""Messages to a prompt: the checkpoint's Jinja template, read as transformers reads it.

A template is code that came with the weights. It runs in Jinja's sandbox, which keeps it from files and attributes but
not from running for ever; who cannot have that runs this file as a process (``python chat_template.py``) and kills it.
That process reads a line of JSON that holds the template, then answers every line, a call's arguments, with one.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 1 << 24
MAX_MEMORY = 1 << 30


class ChatTemplate:
    """``tokens`` are the special tokens by their role (``bos_token``, ``eos_token``), as templates name them.

    Nothing of the source is looked at before the first ``render``: Jinja works out constants when it compiles, and
    ``{{ 'x' * 10**10 }}`` is one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.tokens = dict(tokens)

    @functools.cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """The prompt. ``more`` goes to the template as it is. Raises ValueError with what the template complains of."""
        values = {
            **self.tokens,
            **more,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            template = self._template
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        try:
            text = template.render(values)
        except Exception as error:  # a template may fail in as many ways as a program
            raise ValueError(f"the chat template says: {str(error) or type(error).__name__}") from error
        if len(text) > MAX_CHARS:
            raise ValueError(f"the chat template makes more than {MAX_CHARS} characters of this")
        return text


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


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    template = ChatTemplate(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        try:
            answer = {"text": template.render(**json.loads(line))}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
