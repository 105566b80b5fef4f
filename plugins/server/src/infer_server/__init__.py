"""The HTTP server: OpenAI's endpoints, and what other endpoints are made of."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from infer.contracts.command import CommandRegistration  # child processes import this, and not all of infer
from infer.contracts.registration import Registration, hookimpl
from infer.contracts.server import Route, RoutesFactory

INFER_PLUGIN_API = 2


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    from infer_server.command import COMMAND

    return [COMMAND]


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [
        Registration("chat", _endpoints("chat_completions"), "POST /v1/chat/completions"),
        Registration("completions", _endpoints("completions"), "POST /v1/completions"),
        Registration("tokenization", _endpoints("tokenization"), "POST /tokenize and /detokenize, GET /tokenizer_info"),
        Registration("adapters", _endpoints("adapters"), "POST /v1/load_lora_adapter and /v1/unload_lora_adapter"),
        Registration("about", _endpoints("about"), "GET /v1/models, /health and /ready"),
        Registration("metrics", _endpoints("metrics"), "GET /metrics, for Prometheus"),
    ]


def _endpoints(module: str) -> RoutesFactory:
    """The routes of a module of endpoints, which is imported when there is a server."""

    def make(service: Any, settings: Any, /) -> Sequence[Route]:
        routes: Sequence[Route] = importlib.import_module(f"infer_server.endpoints.{module}").routes(service, settings)
        return routes

    return make
