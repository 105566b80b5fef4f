"""Several models behind one address, and an ingress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infer import hookimpl
from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer_router.settings import RouterSettings

if TYPE_CHECKING:
    import argparse

INFER_PLUGIN_API = 2


def _routes(service: Any, settings: object) -> Sequence[Route]:
    from infer_router.state import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("router", _routes, "what an ingress asks a replica", RouterSettings)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON, sizes in bytes")


def _run(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_router import command, serve

    # infer serve comes here with what it is given if that is several models.
    return serve.run(context, args.several) if args.command == "serve" else command.models(args, context)


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [
        CommandRegistration(
            "models", _run, "show the models of a running server, and their states", add_arguments=_add_arguments
        )
    ]
