"""`infer settings`: prints each setting's value and source, or the schema of all settings."""

from __future__ import annotations

import argparse
import json
from typing import Any

from infer.commands.arguments import table
from infer.contracts.command import CommandContext, CommandRegistration
from infer.plugins.discovery import Plugins
from infer.settings import describe, describe_schema, schema


class _Schema(argparse.Action):
    """Prints the schema and exits. It does so while arguments are parsed, so that wrong settings do not matter."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(json.dumps(schema(Plugins.discover()).model_json_schema(), indent=2))
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--json-schema", action=_Schema, nargs=0, help="print the schema of settings.toml")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    values = dict(describe(context.settings))
    if args.json:
        both = {key: {"value": value, "source": context.sources[key]} for key, value in values.items()}
        print(json.dumps(both, indent=2, default=str))
        return 0
    descriptions = {key: text for key, text, _ in describe_schema(schema(context.plugins))}
    shown = {key: "none" if value is None else json.dumps(value, default=str) for key, value in values.items()}
    rows = [(key, text, context.sources[key], descriptions.get(key, "")) for key, text in shown.items()]
    print(table([("key", "value", "source", "what it is"), *rows]))
    return 0


COMMAND = CommandRegistration("settings", run, "show each setting's value and source", add_arguments=add_arguments)
