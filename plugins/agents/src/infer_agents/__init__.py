"""The APIs that coding agents speak: OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infer import hookimpl
from infer.contracts.command import CommandRegistration
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer_agents.launch import COMMAND
from infer_agents.settings import AgentsSettings

if TYPE_CHECKING:
    from infer_server.service import Service

INFER_PLUGIN_API = 2


def _routes(service: Service, settings: AgentsSettings, /) -> Sequence[Route]:
    from infer_agents.routes import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service, settings)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("agents", _routes, "POST /v1/responses and /v1/messages", AgentsSettings)]


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [COMMAND]
