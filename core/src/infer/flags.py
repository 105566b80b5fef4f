"""Arguments of commands, core's and plugins', that stand for settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from infer.contracts.sections import Settings

NAMED = {"MODEL": "model.path"}
LOADING = {"--model": "model.path", "--max-model-len": "engine.max_seq_len"}
"""Short names for the settings that users type most; other servers use the same names."""


class _Plain(argparse.Action):
    """A flag or a positional argument that stands for a setting."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        key = str(self.const)
        given: list[str] = namespace.__dict__.setdefault("plain_settings", [])
        if any(word.startswith(f"--{key}=") for word in given):
            parser.error(f"{key} is given twice; leave one out")
        given.append(f"--{key}={values}")


def add_settings(sub: argparse.ArgumentParser, flags: Mapping[str, str], **tables: type[BaseModel]) -> None:
    """Add arguments that stand for settings; ``flags`` maps each argument's name to a setting's key. ``tables`` has the
    models of sections that are plugins' own."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()} | tables
    for flag, key in flags.items():
        section, name = key.split(".")
        text = sections[section].model_fields[name].description  # type: ignore[union-attr]
        names: dict[str, Any] = {} if flag.startswith("--") else {"nargs": "?"}
        sub.add_argument(flag, action=_Plain, const=key, default=argparse.SUPPRESS, help=f"{key}: {text}", **names)
