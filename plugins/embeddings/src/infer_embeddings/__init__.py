"""POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory

INFER_PLUGIN_API = 2


def _embeddings(service: Any, settings: object) -> Sequence[Route]:
    from infer_embeddings.embeddings import routes  # here, so that other commands need not wait for the server's part

    return routes(service)


def _rerank(service: Any, settings: object) -> Sequence[Route]:
    from infer_embeddings.rerank import routes

    return routes(service)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [
        Registration("embeddings", _embeddings, "POST /v1/embeddings"),
        Registration("rerank", _rerank, "POST /v1/rerank and /v1/score"),
    ]
