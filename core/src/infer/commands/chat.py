"""`infer chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from infer.commands.arguments import add_sampling, sampling
from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.params import SamplingParams
from infer.errors import InferError
from infer.flags import LOADING, NAMED, add_settings
from infer.text.reasoning import opens_reasoning, read_content, read_reasoning

if TYPE_CHECKING:
    from rich.console import Console

    from infer.llm import LLM

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the conversation begins with")
    add_settings(parser, NAMED | LOADING)
    add_sampling(parser)


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Read a line and stream the answer, until there are no more lines."""
    from rich.console import Console
    from rich.text import Text

    from infer.llm import LLM

    params = sampling(args, {"max_tokens": None})
    console = Console(highlight=False)
    with LLM.from_settings(context.settings, context.plugins) as llm:
        if console.is_terminal:
            console.print(Text(f"{llm.served.name}. {HELP}", style="dim"))
        params = llm.served.defaulted(params)
        beginning = [] if args.system is None else [{"role": "system", "content": args.system}]
        messages = list(beginning)
        while (line := _read(console)) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    messages = list(beginning)
                    continue
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, console, messages, params)
            messages.append({"role": "assistant", "content": answer})
    return 0


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/bold]") if console.is_terminal else sys.stdin.readline() or None
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(llm: LLM, console: Console, messages: Sequence[dict[str, str]], params: SamplingParams) -> str:
    """Show the answer as it arrives, and return it. Ctrl-C stops the answer and keeps what has arrived."""
    from rich.console import Group
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

    prompt = llm.render(messages)
    tags = llm.served.reasoning
    thinking = tags is not None and opens_reasoning(prompt, tags)
    parser = read_reasoning(read_content(tags, {}), tags, thinking=thinking)
    shown = {"reasoning": "", "content": ""}
    live = Live(console=console, vertical_overflow="visible") if console.is_terminal else None
    with live or nullcontext():
        try:
            for event in llm.stream(llm.encode(prompt), params):
                for piece in [*parser.push(event.text), *(parser.flush() if event.finish_reason else ())]:
                    shown[piece.kind] += piece.text
                    if live is None:
                        console.print(piece.text, end="", markup=False)
                if event.finish_reason == "error":
                    raise InferError(event.error)
                if live is not None:
                    live.update(Group(Text(shown["reasoning"], style="dim italic"), Markdown(shown["content"])))
        except KeyboardInterrupt:
            pass
    if live is None:
        console.print()
    return shown["content"]


COMMAND = CommandRegistration("chat", run, "talk with the model on the terminal", add_arguments=add_arguments)
