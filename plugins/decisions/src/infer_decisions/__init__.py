"""POST /v1/decisions and /v1/systemone: typed questions, answered from the probabilities of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory

INFER_PLUGIN_API = 2


def _routes(service: Any, settings: object) -> Sequence[Route]:
    from infer_decisions.endpoint import routes  # here, so that other commands need not wait for the server's part

    return routes(service)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("decisions", _routes, "POST /v1/decisions and /v1/systemone")]
