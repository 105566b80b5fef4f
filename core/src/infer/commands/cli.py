"""The command line: finds the command, parses its arguments, and runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from infer.commands import COMMANDS
from infer.contracts.hooks import CommandRegistration
from infer.contracts.protocols import CommandContext
from infer.errors import EngineDeadError, InferError, PluginError
from infer.plugins import Offer, Plugins
from infer.settings import load_settings, split_arguments

SETTINGS = "Any setting can be given as --section.key value; `infer settings` lists them."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 for success, 1 for failed work, 2 for an error that the user can fix."""
    settings_argv, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    try:
        return _run(settings_argv, rest)
    except InferError as error:
        print(f"infer: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineDeadError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(settings_argv: Sequence[str], rest: Sequence[str]) -> int:
    commands, plugins = {command.name: command for command in COMMANDS}, None
    if rest and not rest[0].startswith("-") and rest[0] not in commands:
        # Load plugins only if needed, because it takes as long as importing torch.
        plugins = Plugins.discover()
        commands[rest[0]] = _command(plugins, rest[0]).registration
    args = _parser(commands.values()).parse_args(rest)
    plugins = plugins or Plugins.discover()
    offer = _command(plugins, args.command)
    words = (*settings_argv, *getattr(args, "plain_settings", ()))
    loaded = load_settings(plugins, file=args.settings, argv=words)
    loaded.settings.log.begin()
    code = offer.registration.factory(args, CommandContext(loaded.settings, loaded.sources, plugins, words))
    if type(code) is not int:
        raise PluginError(f"{offer.whose} returned a {type(code).__name__}, not an exit code.")
    return code


def _command(plugins: Plugins, name: str) -> Offer:
    """The offer of a command. Raises PluginError if no plugin or more than one offers it."""
    return plugins.get("command", name, "infer COMMAND")


def _parser(commands: Iterable[CommandRegistration] = COMMANDS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
