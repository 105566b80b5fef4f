"""``check_command``: a command of the documented kind passes, and planted bugs are named."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType

import pytest

from infer import hookimpl
from infer.contracts.command import CommandRegistration
from infer.errors import InferError, PluginError
from infer_testing import ConformanceError, check_command


def plugin(run: Callable[..., object], add: Callable[[argparse.ArgumentParser], object]) -> ModuleType:
    module = ModuleType("planted_command")

    @hookimpl
    def infer_commands() -> list[CommandRegistration]:
        return [CommandRegistration("twice", run, "say it twice", add_arguments=add)]  # type: ignore[arg-type]

    vars(module).update(INFER_PLUGIN_API=2, infer_commands=infer_commands)
    return module


def text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help="what is said")


def fine(args: argparse.Namespace, context: object) -> int:
    print(args.text * 2)
    return 0


def refuses(args: argparse.Namespace, context: object) -> int:
    raise InferError("No.")


def ends(args: argparse.Namespace, context: object) -> int:
    raise SystemExit(3)


def silent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text")


def dotted(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--my.option", help="looks like a setting")


def test_a_command_that_keeps_its_promises_passes_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    check_command(plugin(fine, text), "twice", "a")
    assert capsys.readouterr().out == ""
    with pytest.raises(PluginError, match="thrice"):
        check_command(plugin(fine, text), "thrice", "a")


@pytest.mark.parametrize(
    ("run", "add", "words", "said"),
    [
        (lambda args, context: None, text, ["a"], "exits: it returns a NoneType, not an exit code"),
        (lambda args, context: 1, text, ["a"], "exits: it returns 1 for words"),
        (refuses, text, ["a"], "exits: it refuses the words 'a': No."),
        (ends, text, ["a"], "exits: it ends the process (3)"),
        (lambda args, context: 1 // 0, text, ["a"], "exits: raised ZeroDivisionError"),
        (fine, text, [], "exits: its parser does not take the words ''"),
        (fine, silent, ["a"], "arguments: text has no text of help"),
        (fine, dotted, ["a"], "arguments: --my.option has a dot in it"),
    ],
)
def test_planted_bugs_are_named(
    run: Callable[..., object], add: Callable[[argparse.ArgumentParser], object], words: list[str], said: str
) -> None:
    with pytest.raises(ConformanceError) as failed:
        check_command(plugin(run, add), "twice", *words)
    assert said in str(failed.value)
