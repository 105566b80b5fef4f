"""`infer plugins`: what is installed, what is chosen and why, who implements which hook, and what settings decide."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.commands.arguments import table
from infer.contracts.command import CommandContext, CommandRegistration
from infer.plugins.extension_points import EXTENSION_POINTS
from infer.plugins.survey import Survey

PARTS = ("slot", "name", "distribution", "version", "chosen", "why", "description")
HOOKS = ("hook", "implemented by", "what it is for")
SETTINGS = ("setting", "value", "from", "decides")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Print the tables. Raises the error of the first choice that cannot be made, after them."""
    survey = Survey(context.plugins, context.settings, context.sources)
    parts, hooks, settings = survey.parts(), survey.hooks(), survey.settings()
    if args.json:
        whole = {
            "parts": parts,
            "hooks": hooks,
            "settings": settings,
            "checkpoints": {name: str(path) for name, path in context.plugins.checkpoints.items()},
            "broken": [vars(broken) for broken in context.plugins.broken],
        }
        print(json.dumps(whole, indent=2, default=str))
    else:
        deciding = [row for row in settings if row["selects"] or row["source"] != "default"]
        print(
            _table(PARTS, [[row[c] for c in PARTS] for row in parts]),
            _table(HOOKS, [[row["hook"], ", ".join(row["plugins"]) or "-", row["description"]] for row in hooks]),
            _table(SETTINGS, [[row["key"], json.dumps(row["value"], default=str), *_decides(row)] for row in deciding]),
            sep="\n\n",
        )
    if survey.failed:
        raise survey.failed[0]
    return 0


def _decides(row: Mapping[str, Any]) -> tuple[str, str]:
    """Where a setting's value came from, and what it decides: the parts that it selects if it does that."""
    selects = row["selects"]
    if selects is None:
        return row["source"], row["decides"]
    parts = " or ".join(selects["parts"]) or "none"
    when = f", {EXTENSION_POINTS[selects['slot']].when}" if selects["chosen"] == "when met" else ""
    return row["source"], f"{selects['slot']}: {parts}{when}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([columns, *rows])


COMMAND = CommandRegistration(
    "plugins", run, "list what is installed, what is chosen, and why", add_arguments=add_arguments
)
