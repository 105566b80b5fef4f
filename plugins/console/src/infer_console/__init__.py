"""A page at /console: chat with the model, watch the engine, see what is installed and chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from infer import hookimpl
from infer.hookspecs import Registration
from infer.protocols import Route, RoutesFactory

INFER_PLUGIN_API = 1


class ConsoleSettings(BaseModel, extra="forbid"):
    enabled: bool = Field(True, description="serve the page /console")


def _routes(service: Any, settings: ConsoleSettings) -> Sequence[Route]:
    from infer_console.routes import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service) if settings.enabled else []


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("console", _routes, "a page to chat and to watch the engine", ConsoleSettings)]
