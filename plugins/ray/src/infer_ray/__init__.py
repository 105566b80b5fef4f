"""Many infer servers as one: replicas that Ray Serve places and watches, and an ingress before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infer import hookimpl
from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer_ray.settings import RaySettings

if TYPE_CHECKING:
    import argparse

INFER_PLUGIN_API = 2


def _run(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_ray.command import run

    return run(args, context)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from infer.flags import LOADING, NAMED, SERVING, add_settings

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


def _routes(service: Any, settings: object) -> Sequence[Route]:
    from infer_ray.state import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("ray", _routes, "what an ingress asks a replica")]
