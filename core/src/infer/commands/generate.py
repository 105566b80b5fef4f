"""`infer generate`: answers prompts on the terminal."""

from __future__ import annotations

import argparse
import sys

from infer.commands.arguments import add_sampling, sampling
from infer.contracts.command import CommandContext, CommandRegistration
from infer.flags import LOADING, add_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", help="texts; none reads one from standard input")
    add_settings(parser, LOADING)
    add_sampling(parser)


def run(args: argparse.Namespace, context: CommandContext) -> int:
    from infer.llm import LLM

    params = sampling(args, {"max_tokens": 128})
    prompts = args.prompts if args.prompts and args.prompts != ["-"] else [sys.stdin.read()]
    with LLM.from_settings(context.settings, context.plugins) as llm:
        params = llm.served.defaulted(params)
        if len(prompts) > 1:
            answers = llm.generate(prompts, params)
            for prompt, answer in zip(prompts, answers, strict=True):
                print(f"{prompt}{answer.text}\n")
            return int(any(answer.finish_reason == "error" for answer in answers))
        unsaid = prompts[0]  # until the request is accepted, so that a refusal is a line of its own
        for event in llm.stream(prompts[0], params):
            print(unsaid + event.text, end="", flush=True)
            unsaid = ""
        print()
        if event.finish_reason == "error":
            print(f"infer: {event.error}", file=sys.stderr)
        return int(event.finish_reason == "error")


COMMAND = CommandRegistration("generate", run, "answer prompts on the terminal", add_arguments=add_arguments)
