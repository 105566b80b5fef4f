"""The console's routes, and what it says of the server: what is installed and chosen, and the settings."""

from __future__ import annotations

import asyncio
import functools
import json

from aiohttp import web

from infer.contracts.server import Route
from infer.plugins.survey import Survey
from infer.settings import origins
from infer_console.live import Live
from infer_console.page import page
from infer_server.events import Json
from infer_server.service import Service

SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
"""The sampling parameters for which the page has a field, and the server a default."""


def routes(service: Service) -> list[Route]:
    live = Live(service)

    @functools.cache
    def about() -> Json:
        return _about(service)

    async def server(http: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(about), headers={"Cache-Control": "no-store"})

    return page(service, server, live.handle)


def _about(service: Service) -> Json:
    settings = service.settings
    sources = origins(settings)
    survey = Survey(service.plugins, settings, sources)
    return {
        "model": service.served.name,
        "exact": service.served.exact,
        "max_seq_len": service.served.max_seq_len,
        "sampling": service.served.defaulted().model_dump(include=SAMPLING),
        "chats": service.served.template is not None,
        "keys": bool(service.keys),
        "plugins": survey.parts(),
        "settings": [
            # A secret's text is a row of asterisks.
            {
                "key": row["key"],
                "value": json.dumps(row["value"], default=str),
                "source": row["source"],
                "what": row["decides"],
            }
            for row in survey.settings()
        ],
    }
