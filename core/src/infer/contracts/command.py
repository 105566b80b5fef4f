"""The contract of commands that a plugin adds to the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infer.contracts.registration import Registration
from infer.contracts.sections import Settings

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class CommandContext:
    """What a command works with, besides its own arguments."""

    settings: Settings
    """What all sources say together, checked."""
    sources: Mapping[str, str]
    """Where each setting's value came from, by its dotted key."""
    plugins: Any
    """What is installed: ``infer.plugins.discovery.Plugins``. ``LLM.from_settings(settings, plugins)`` loads the
    model."""
    argv: tuple[str, ...]
    """The settings that the command line gave, as words, for a process of its own."""


class CommandFactory(Protocol):
    """Runs a command and returns its exit code: 0, or 1 where its work has failed. What the user can mend it raises as
    an InferError, whose text is shown, and the exit code is 2."""

    def __call__(self, args: argparse.Namespace, context: CommandContext, /) -> int: ...


@dataclass(frozen=True)
class CommandRegistration(Registration[CommandFactory]):
    """A command, ``infer NAME``. ``factory`` runs it, and ``description`` is its line of help."""

    add_arguments: Callable[[argparse.ArgumentParser], object] | None = None
    """Adds the command's arguments to its parser. It is called whenever plugins are discovered, so it must be quick;
    slow imports belong in ``factory``. ``--settings`` and ``--section.key`` are there already."""
    passes_on: bool = False
    """Whether the words after ``--`` are for a program that the command starts. They become ``args.passed_on``."""
