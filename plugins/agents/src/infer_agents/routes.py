"""The routes of all APIs, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.contracts.server import Route
from infer_agents import responses
from infer_agents.seal import make_seal

if TYPE_CHECKING:
    from infer.server.service import Service
    from infer_agents.settings import AgentsSettings


def routes(service: Service, settings: AgentsSettings) -> list[Route]:
    seal = make_seal(None if settings.key is None else settings.key.get_secret_value())
    return [*responses.routes(service, seal)]
