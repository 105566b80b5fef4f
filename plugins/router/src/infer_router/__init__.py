"""A server in front of several infer servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory

INFER_PLUGIN_API = 2


def _routes(service: Any, settings: object) -> Sequence[Route]:
    from infer_router.state import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("router", _routes, "what an ingress asks a replica")]
