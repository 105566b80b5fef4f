"""`infer plugins`: lists what is installed, what is chosen, and why."""

from __future__ import annotations

import argparse
import json

from infer.commands.arguments import table
from infer.contracts.hooks import CommandRegistration
from infer.contracts.protocols import CommandContext
from infer.errors import InferError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Print the table of plugins. Raises the error of a choice that cannot be made, after the table."""
    from infer.assemble import choose_device, stored

    rows, failed = context.plugins.survey(
        context.settings, context.sources, lambda: choose_device(context.settings.model.device).type
    )
    try:
        if (weights := stored(context.settings, context.plugins)) is not None:
            row = dict.fromkeys(("distribution", "version"), "-") | {"slot": "checkpoint", "chosen": "yes"}
            row |= {"name": str(context.settings.model.path), "description": str(weights)}
            why = f"model.path = {row['name']} (from {context.sources['model.path']})"
            rows.append(row | {"why": why, "quantization": vars(weights)})
    except InferError as error:
        failed = failed or error
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        columns = ("slot", "name", "distribution", "version", "chosen", "why", "description")
        print(table([columns, *(tuple(row[c] for c in columns) for row in rows)]))
    if failed is not None:
        raise failed
    return 0


COMMAND = CommandRegistration(
    "plugins", run, "list what is installed, what is chosen, and why", add_arguments=add_arguments
)
