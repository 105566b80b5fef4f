"""The routes of all APIs, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.contracts.server import Route
from infer_agents import messages, models, responses
from infer_agents.seal import make_seal
from infer_agents.store import open_store

if TYPE_CHECKING:
    from infer_agents.settings import AgentsSettings
    from infer_server.service import Service


def routes(service: Service, settings: AgentsSettings) -> list[Route]:
    seal = make_seal(None if settings.key is None else settings.key.get_secret_value())
    store = open_store(settings.store, max_bytes=settings.store_max_bytes, max_days=settings.store_max_days)
    return [
        *responses.routes(service, seal, store, store_default=settings.store_default),
        *messages.routes(service, seal, billing_header=settings.billing_header),
        *models.routes(service),
    ]
