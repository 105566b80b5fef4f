"""GET /v1/models, /health and /ready: which model is served, and whether the server works."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from infer.contracts.server import Route

if TYPE_CHECKING:
    from infer_server.service import Service


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    quantization: str | None
    exact: bool
    default_sampling_params: dict[str, float]
    root: NotRequired[str]
    """Where an adapter was loaded from."""
    parent: NotRequired[str]
    """The model that an adapter changes."""


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Status(TypedDict):
    status: str


def routes(service: Service, settings: object) -> list[Route]:
    served, engine_loop = service.served, service.engine_loop
    created = int(time.time())

    def described(name: str) -> Model:
        entry: Model = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "infer",
            "max_model_len": served.max_seq_len,
            "vocab_size": served.vocab_size,
            "quantization": served.quantization,
            "exact": served.exact,
            "default_sampling_params": dict(served.sampling),
        }
        if (adapter := service.adapter(name)) is None:
            return entry
        return {**entry, "id": adapter.name, "root": adapter.path, "parent": served.name}

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [described(name) for name in service.names()]})

    async def model(http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if not service.is_model(name):
            raise service.unknown(name)
        return web.json_response(described(name))

    def status(good: str | None, otherwise: str) -> web.Response:
        """200 if ``good`` is not None."""
        found = good or ("stuck" if engine_loop.stuck else otherwise)
        return web.json_response({"status": found}, status=200 if good else 503)

    async def health(http: web.Request) -> web.Response:
        return status("ok" if engine_loop.healthy else None, "dead")

    async def ready(http: web.Request) -> web.Response:
        return status("ready" if engine_loop.accepting else None, "draining")

    return [
        Route("GET", "/v1/models", models, "The model that is served.", Models),
        Route("GET", "/v1/models/{model:.+}", model, "The model of this name.", Model),
        Route("GET", "/health", health, "200 while the engine lives and gets on.", Status, open=True),
        Route("GET", "/ready", ready, "200 while new requests are taken.", Status, open=True),
    ]
