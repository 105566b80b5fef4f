"""`infer serve`: serves the model over HTTP."""

from __future__ import annotations

import argparse

from infer.contracts.command import CommandContext, CommandRegistration
from infer.flags import LOADING, NAMED, SERVING, add_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, NAMED | LOADING | SERVING)


def run(args: argparse.Namespace, context: CommandContext) -> int:
    from infer.server import app

    app.run(context.settings, context.plugins)
    return 0


COMMAND = CommandRegistration("serve", run, "serve the model over HTTP", add_arguments=add_arguments)
