"""A page at /console to chat with the model, watch the engine and see what is installed and chosen; and a file that
shows what an engine has done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from infer import hookimpl
from infer.contracts.records import ObserverFactory
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer_console.timeline import TimelineSettings, make

INFER_PLUGIN_API = 2


class ConsoleSettings(BaseModel, extra="forbid"):
    enabled: bool = Field(True, description="serve the console at /console")


def _routes(service: Any, settings: ConsoleSettings) -> Sequence[Route]:
    from infer_console.routes import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service) if settings.enabled else []


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("console", _routes, "a web page to chat with the model and watch the engine", ConsoleSettings)]


@hookimpl
def infer_observers() -> list[Registration[ObserverFactory]]:
    return [
        Registration("timeline", make, "writes a page of the engine's steps when the engine stops", TimelineSettings)
    ]
