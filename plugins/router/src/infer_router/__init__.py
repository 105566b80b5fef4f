"""Several models behind one address, and an ingress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infer import hookimpl
from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer.flags import LOADING, NAMED, add_settings
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


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cached", action="store_true", help="show what is in the hub's cache instead, and its size")
    parser.add_argument("--json", action="store_true", help="print it as JSON, sizes in bytes")


def _pull_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, NAMED | LOADING)


def _remove_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a repository, org/name, or one file of it, org/name:TAG or org/name/FILE",
    )
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def _models(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_router import cached, command, serve

    if args.command == "serve":  # which comes here with what it is given if that is several models
        return serve.run(context, args.several)
    return cached.show(args, context) if args.cached else command.models(args, context)


def _pull(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_router import cached

    return cached.pull(args, context)


def _remove(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_router import cached

    return cached.remove(args, context)


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [
        CommandRegistration(
            "models",
            _models,
            "show the models of a running server, and their states",
            add_arguments=_models_arguments,
        ),
        CommandRegistration(
            "pull",
            _pull,
            "download a model from the hub, and say whether it fits",
            add_arguments=_pull_arguments,
        ),
        CommandRegistration("rm", _remove, "remove models from the hub's cache", add_arguments=_remove_arguments),
    ]
