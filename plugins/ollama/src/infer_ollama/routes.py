"""All routes of Ollama's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer_ollama import answers, embeddings, models

if TYPE_CHECKING:
    from infer.contracts.server import Route
    from infer_server.service import Service


def routes(service: Service) -> list[Route]:
    return [*models.routes(service), *answers.routes(service), *embeddings.routes(service)]
