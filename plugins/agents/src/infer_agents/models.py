"""GET /v1/models and GET /v1/models/{model}, as Anthropic's clients ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from infer.contracts.server import Route
from infer_server.http.listing import VERSION, ListedModel, ListedModels, listed, page
from infer_server.http.wire import Anthropic

if TYPE_CHECKING:
    from infer_server.service import Service


def routes(service: Service) -> list[Route]:
    context = service.served.max_seq_len

    async def models(http: web.Request) -> web.Response:
        return web.json_response(page(http, [listed(name, context) for name in service.names()]))

    async def model(http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if not service.is_model(name):
            raise service.unknown(name)
        return web.json_response(listed(name, context))

    return [
        Route(
            "GET",
            "/v1/models",
            models,
            "The model, its aliases and its adapters, as Anthropic lists models.",
            ListedModels,
            wire_format=Anthropic(),
            header=VERSION,
        ),
        Route(
            "GET",
            "/v1/models/{model:.+}",
            model,
            "The model of this name, as Anthropic has it.",
            ListedModel,
            wire_format=Anthropic(),
            header=VERSION,
        ),
    ]
