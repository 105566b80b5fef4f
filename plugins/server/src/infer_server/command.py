"""`infer serve`: serves the model over HTTP, or has a plugin serve several."""

from __future__ import annotations

import argparse
from typing import Any

from infer.contracts.command import CommandContext, CommandRegistration
from infer.flags import LOADING, add_settings

SERVING = {
    "--host": "server.host",
    "--port": "server.port",
    "--api-key": "server.api_keys",
    "--served-model-name": "server.served_model_name",
}
"""Short names for the settings that users of servers type most; other servers use the same names."""
SEVERAL = "models"
"""The command that serves several models."""


class _Words(argparse.Action):
    """One word is ``model.path``. Further ones are further models."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.several = list(values)
        if len(values) == 1:
            given: list[str] = namespace.__dict__.setdefault("plain_settings", [])
            if any(word.startswith("--model.path=") for word in given):
                parser.error("model.path is given twice; leave one out")
            given.append(f"--model.path={values[0]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, LOADING | SERVING)
    parser.set_defaults(several=[])
    parser.add_argument(
        "MODEL",
        action=_Words,
        nargs="*",
        default=argparse.SUPPRESS,
        help="model.path: a folder or file, a hub id or a bundled name; several of them, or names of tables "
        "[models.NAME], are served behind one address",
    )


def run(args: argparse.Namespace, context: CommandContext) -> int:
    if len(args.several) > 1 or context.settings.models:
        code: int = context.plugins.get("command", SEVERAL, "infer serve with several models").registration.factory(
            args, context
        )
        return code
    from infer_server import app

    app.run(context.settings, context.plugins)
    return 0


COMMAND = CommandRegistration("serve", run, "serve the model over HTTP", add_arguments=add_arguments)
