"""Many infer servers as one: replicas that Ray Serve places and watches, behind an ingress of ``infer_router``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer import hookimpl
from infer.contracts.command import CommandContext, CommandRegistration
from infer_ray.settings import RaySettings

if TYPE_CHECKING:
    import argparse

INFER_PLUGIN_API = 2


def _run(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_ray.command import run

    return run(args, context)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from infer.flags import LOADING, NAMED, add_settings
    from infer_server.command import SERVING

    parser.add_argument(
        "action",
        choices=("run", "deploy", "delete"),
        help="run: start Ray on this machine, for itself alone, and serve until Ctrl-C; deploy: have a cluster serve; "
        "delete: have it serve no more",
    )
    own = {"--replicas": "ray.replicas", "--address": "ray.address"}
    add_settings(parser, NAMED | LOADING | SERVING | own, ray=RaySettings)


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [
        CommandRegistration(
            "ray",
            _run,
            "serve by many engines at once, on this machine or a Ray cluster",
            RaySettings,
            add_arguments=_add_arguments,
        )
    ]
