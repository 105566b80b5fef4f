"""The APIs that coding agents speak: OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory

if TYPE_CHECKING:
    from infer.server.service import Service

INFER_PLUGIN_API = 2


def _responses(service: Service, settings: object, /) -> Sequence[Route]:
    from infer_agents.responses import (
        routes,  # imported here, so that other commands need not wait for the server's part
    )

    return routes(service)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("responses", _responses, "POST /v1/responses")]
