"""The command line: finds the command, parses its arguments, and runs it. What a list of the commands does not need is
imported late."""

from __future__ import annotations

import argparse
import difflib
import gc
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions, version
from typing import TYPE_CHECKING, NoReturn

from infer.errors import InferError, PluginError, SettingsError, one_line
from infer.plugins.commands import LISTED

if TYPE_CHECKING:
    from infer.contracts.command import CommandRegistration
    from infer.plugins.discovery import Offer, Plugins

log = logging.getLogger(__name__)

SETTINGS = "Any setting can be given as --section.key value; `infer settings` lists them."

LISTING = ("-h", "--help", "--version")
"""What is answered with no command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 for success, 1 for failed work, 2 for an error that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if not words or words[0] in LISTING:
            _overview(words[:1])
        return _run(words, own=argv is None)
    except InferError as error:
        print(f"infer: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: Sequence[str], *, own: bool) -> int:
    """Run a command, in a process that is its ``own`` or somebody else's."""
    from infer.commands.own import COMMANDS
    from infer.contracts.command import CommandContext
    from infer.plugins.discovery import Plugins
    from infer.settings import arguments, load_settings, split_arguments

    settings_argv, rest = split_arguments(words)
    commands, plugins = {command.name: command for command in COMMANDS}, None
    if rest and not rest[0].startswith("-") and rest[0] not in commands:
        # Load plugins only if needed, because it takes as long as importing torch.
        plugins = Plugins.discover()
        commands[rest[0]] = _command(plugins, rest[0]).registration
    if not rest or rest[0] not in commands:
        _overview(rest)
    passed_on: Sequence[str] = ()
    if commands[rest[0]].passes_on and "--" in rest:
        end = [*rest].index("--")
        rest, passed_on = rest[:end], rest[end + 1 :]
    args, unknown = _parser(commands.values(), {}).parse_known_args(rest, argparse.Namespace(passed_on=passed_on))
    plugins = plugins or Plugins.discover()
    if own:
        gc.freeze()  # what is imported stays, and no collection needs to look through it
    offer = _command(plugins, args.command)
    if unknown:
        raise SettingsError(_not_understood(unknown[0], args, plugins))
    plain = getattr(args, "plain_settings", ())
    if twice := sorted({key for key, *_ in arguments(settings_argv)} & {key for key, *_ in arguments(plain)}):
        raise SettingsError(f"{twice[0]} is given twice, as --{twice[0]} and by another argument; leave one out.")
    given = (*settings_argv, *plain)
    loaded = load_settings(plugins, file=args.settings, argv=given)
    loaded.settings.log.begin()
    context = CommandContext(loaded.settings, loaded.sources, plugins, given)
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
    from infer.settings import describe_schema, meant, schema

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
    from infer.plugins.discovery import advice

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
        whose = f"{self.prog}: " if " " in self.prog else ""
        raise SettingsError(f"{whose}{message}. `{self.prog} --help` shows how it is used.")


def _overview(words: Sequence[str]) -> NoReturn:
    """Answer words that begin with no command: with a list of the commands of our packages that are installed, or with
    what is wrong. Raises SettingsError."""
    there = {package for package, _ in LISTED.values() if next(iter(distributions(name=package)), None)}
    _parser((), {name: text for name, (package, text) in LISTED.items() if package in there}).parse_args(words)
    raise SettingsError("The command comes first. `infer --help` lists them.")


def _parser(commands: Iterable[CommandRegistration], listed: Mapping[str, str]) -> argparse.ArgumentParser:
    """A parser of these commands, and of the names of those that are ``listed``."""
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
    for name, text in listed.items():
        subparsers.add_parser(name, help=text)  # for the list alone: what it takes is known once it is loaded
    return parser


if __name__ == "__main__":
    sys.exit(main())
