"""The command line: finds the command, parses its arguments, and runs it."""

from __future__ import annotations

import argparse
import difflib
import gc
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions, version
from typing import NoReturn

from infer.commands import COMMANDS
from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError, PluginError, SettingsError, one_line
from infer.plugins.discovery import Offer, Plugins, advice
from infer.plugins.extension_points import EXTENSION_POINTS
from infer.settings import arguments, describe_schema, load_settings, meant, schema, split_arguments

log = logging.getLogger(__name__)

SETTINGS = "Any setting can be given as --section.key value; `infer settings` lists them."

ELSEWHERE: Mapping[str, str] = {
    "serve": "serve the model over HTTP",
    "launch": "start a coding agent that uses a server of infer",
    "models": "show the models of a running server, and their states",
    "pull": "download a model from the hub, and say whether it fits",
    "rm": "remove models from the hub's cache",
    "ray": "serve by many engines at once, on this machine or a Ray cluster",
    "cache": "list or remove what cache.paged.disk keeps",
    "bench": "measure the workloads over HTTP",
    "demo": "print a timeline of steps, chunked prefill on and off side by side",
    "simulate": "play workloads without a model, on a clock of its own",
    "tune": "find batch, chunk and budget for latency goals, by simulation",
    "check": "try what a plugin's contract promises on an installed part",
    "new": "write a plugin's package, with a test",
}
"""What the commands of our other packages do, in their own words, for a list of commands that loads no plugin."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 for success, 1 for failed work, 2 for an error that the user can fix."""
    settings_argv, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    try:
        return _run(settings_argv, rest, own=argv is None)
    except InferError as error:
        print(f"infer: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(settings_argv: Sequence[str], rest: Sequence[str], *, own: bool) -> int:
    """Run a command, in a process that is its ``own`` or somebody else's."""
    commands, plugins = {command.name: command for command in COMMANDS}, None
    if rest and not rest[0].startswith("-") and rest[0] not in commands:
        # Load plugins only if needed, because it takes as long as importing torch.
        plugins = Plugins.discover()
        commands[rest[0]] = _command(plugins, rest[0]).registration
    passed_on: Sequence[str] = ()
    if rest and rest[0] in commands and commands[rest[0]].passes_on and "--" in rest:
        end = [*rest].index("--")
        rest, passed_on = rest[:end], rest[end + 1 :]
    others = None if rest and rest[0] in commands else _elsewhere()
    args, unknown = _parser(commands.values(), others).parse_known_args(rest, argparse.Namespace(passed_on=passed_on))
    plugins = plugins or Plugins.discover()
    if own:
        gc.freeze()  # what is imported stays, and no collection needs to look through it
    offer = _command(plugins, args.command)
    if unknown:
        raise SettingsError(_not_understood(unknown[0], args, plugins))
    plain = getattr(args, "plain_settings", ())
    if twice := sorted({key for key, *_ in arguments(settings_argv)} & {key for key, *_ in arguments(plain)}):
        raise SettingsError(f"{twice[0]} is given twice, as --{twice[0]} and by another argument; leave one out.")
    words = (*settings_argv, *plain)
    loaded = load_settings(plugins, file=args.settings, argv=words)
    loaded.settings.log.begin()
    context = CommandContext(loaded.settings, loaded.sources, plugins, words)
    try:
        code = offer.registration.factory(args, context)
    except (InferError, BrokenPipeError):
        raise
    except Exception as error:
        if offer.registration in COMMANDS:
            raise
        log.debug("%s failed", offer.whose, exc_info=error)
        raise PluginError(f"{offer.whose} failed: {one_line(error)}; --log.level debug shows more.") from error
    if type(code) is not int:
        raise PluginError(f"{offer.whose} returned a {type(code).__name__}, not an exit code.")
    return code


def _not_understood(word: str, args: argparse.Namespace, plugins: Plugins) -> str:
    """The sentence about an argument that a command does not have."""
    word = word.partition("=")[0]  # what comes after it may be a secret
    hint, name = "", word.replace("_", "-")
    if name.startswith("--"):
        settings = [key for key, *_ in describe_schema(schema(plugins))]
        options = [option for option in args.infer_options if option != "--help"]  # which the sentence ends with anyway
        close = difflib.get_close_matches(name, options, n=1)
        close += [f"--{key}" for key in [meant(name.removeprefix("--").replace("-", "_"), settings)] if key]
        hint = f" Did you mean {close[0]}?" if close else ""
    return f"infer {args.command} has no argument {word!r}.{hint} `infer {args.command} --help` lists what it has."


def _command(plugins: Plugins, name: str) -> Offer:
    """The offer of a command. Raises SettingsError if there is none, and PluginError if more than one plugin offers
    it."""
    there = sorted({offer.name for offer in plugins.offers["command"]})
    if name not in there:
        raise SettingsError(
            f"There is no command {name!r}; there are {', '.join(there)}.{advice('command', name, there)}"
            f"{plugins.culprits()}"
        )
    return plugins.get("command", name, "the command line")


class _Arguments(argparse.ArgumentParser):
    """Faults are errors like any other: one sentence."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message}. `{self.prog} --help` shows how it is used.")


def _elsewhere() -> dict[str, str]:
    """The commands of our other packages that are installed, and what they do."""
    packages = EXTENSION_POINTS["command"].packages
    return {name: text for name, text in ELSEWHERE.items() if next(iter(distributions(name=packages[name])), None)}


def _parser(
    commands: Iterable[CommandRegistration] = COMMANDS, others: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    parser = _Arguments(
        prog="infer",
        description="LLM inference whose every backend is a plugin.",
        epilog=f"{SETTINGS} Plugins may bring further commands; `infer plugins` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"infer {version('infer-core')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        text = command.description
        sub = subparsers.add_parser(
            command.name, help=text.replace("%", "%%"), description=text, epilog=SETTINGS, allow_abbrev=False
        )
        sub.add_argument("--settings", metavar="FILE", help="settings file (default: INFER_SETTINGS, ./settings.toml)")
        if command.add_arguments is not None:
            command.add_arguments(sub)
        sub.set_defaults(infer_options=[*sub._option_string_actions])
    for name, text in (others or {}).items():
        subparsers.add_parser(name, help=text)  # for the list alone: what it takes is known once its plugin is loaded
    return parser


if __name__ == "__main__":
    sys.exit(main())
