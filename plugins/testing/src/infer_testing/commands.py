"""What ``CommandFactory`` promises, tried on one command by the words that a user would write."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_testing.suite import Suite, Violation


@dataclass
class Commands:
    """A command, the words after its name, and what it works with."""

    registration: CommandRegistration
    words: Sequence[str]
    context: CommandContext

    def parser(self) -> argparse.ArgumentParser:
        """As ``infer`` makes it. Raises Violation if an argument cannot be added."""
        parser = argparse.ArgumentParser(
            prog=f"infer {self.registration.name}", allow_abbrev=False, exit_on_error=False
        )
        parser.add_argument("--settings", metavar="FILE", help="settings file")
        if self.registration.add_arguments is not None:
            try:
                self.registration.add_arguments(parser)
            except argparse.ArgumentError as error:
                raise Violation(f"add_arguments adds what is there already: {error}") from None
        return parser


SUITE: Suite[Commands] = Suite("check_command")
check = SUITE.check


def check_command(
    plugin: object,
    name: str,
    *words: str,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
    **sections: Mapping[str, Any],
) -> None:
    """Try ``infer NAME WORDS`` of a plugin's module. ``sections`` are settings, as for ``infer.LLM``. Raises
    ConformanceError, and InferError if the module has no such command."""
    plugins = Plugins.discover([plugin])
    registration = plugins.get("command", name, "The command to check").registration
    assert isinstance(registration, CommandRegistration)  # discovery has looked
    loaded = load_settings(plugins, env={}, overrides=sections, read_file=False)
    context = CommandContext(loaded.settings, loaded.sources, plugins, ())
    SUITE.enforce(Commands(registration, words, context), only=only, seed=seed, case=case)


@check("add_arguments adds arguments with a text of help each, to a new parser at every call, and hides no setting")
def arguments(c: Commands, draw: random.Random) -> None:
    first, second = ([action for action in c.parser()._actions if action.dest != "help"] for _ in range(2))
    if [action.dest for action in first] != [action.dest for action in second]:
        raise Violation("add_arguments adds other arguments when it is called again")
    for action in first:
        shown = "/".join(action.option_strings) or action.dest
        if not action.help:
            raise Violation(f"{shown} has no text of help")
        if hidden := [option for option in action.option_strings if "." in option]:
            raise Violation(f"{hidden[0]} has a dot in it, as only settings have")
    c.parser().format_help()  # which formats the texts with %


@check("The factory returns an exit code, which is 0 where its work has succeeded")
def exits(c: Commands, draw: random.Random) -> None:
    try:
        args = c.parser().parse_args([*c.words])
    except (argparse.ArgumentError, SystemExit) as error:
        raise Violation(f"its parser does not take the words {' '.join(c.words)!r}: {error}") from None
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = c.registration.factory(args, c.context)
        except InferError as error:
            raise Violation(f"it refuses the words {' '.join(c.words)!r}: {error}") from None
        except SystemExit as error:
            raise Violation(f"it ends the process ({error.code!r}) in place of returning an exit code") from None
    if type(code) is not int:
        raise Violation(f"it returns a {type(code).__name__}, not an exit code")
    if code:
        raise Violation(f"it returns {code} for words that it should understand")
