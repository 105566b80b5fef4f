"""Collects the installed endpoints and checks them, so that a fault in one is reported when the server starts."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from infer.contracts.server import Route
from infer.errors import PluginError
from infer.plugins.discovery import Plugins
from infer.plugins.inspection import Named
from infer.settings import plugin_settings
from infer_server.http.body import Body
from infer_server.http.errors import WHOSE
from infer_server.http.wire import WireFormat
from infer_server.openapi import PAGES, Place, document
from infer_server.service import Service

log = logging.getLogger(__name__)

OURS = "infer-server"
"""The distribution of the server's own endpoints."""


def gather(service: Service, plugins: Plugins, *, described: bool = False) -> list[Place]:
    """The ``grouped`` routes of all plugins, in the order of discovery. Raises PluginError if a plugin's
    routes cannot be served, or if two distributions serve the same path. That they can be described need not be tried
    if another server has ``described`` them."""
    owners = dict.fromkeys((("GET", path, "") for path in PAGES), OURS)
    found: list[Route] = []
    for offer in plugins.offers["routes"]:
        if offer.registration.unavailable:
            log.warning("%s is left out: %s", offer.whose, offer.registration.unavailable)
            continue
        plugins.get("routes", offer.name, "the server's routes")
        with Named(f"{offer.whose} cannot be used"):
            own = plugin_settings(service.settings, "routes", offer.name)
            routes = checked(offer.registration.factory(service, own), service)
            if offer.distribution != OURS:  # describing ours takes a while, and tests check it
                if not described:
                    document(grouped(routes), "")
                routes = [replace(route, handler=_told(route.handler, offer.whose)) for route in routes]
        for route in routes:
            place = (route.method, re.sub(r"{[^{}]*}", "{}", route.path), (route.header or "").lower())
            if place in owners:
                both = f"{owners[place]} and {offer.distribution}"
                raise PluginError(f"{both} both serve {_named(route)}; uninstall one of them.")
            owners[place] = offer.distribution
        found += routes
    places = grouped(found)
    for first, *_ in places:
        if first.header is not None:
            raise PluginError(f"{_named(first)} takes the place of no endpoint: there is none without that header.")
    return places


def grouped(routes: Iterable[Route]) -> list[Place]:
    """The routes of each method and path: first that without a header, then those that take its place."""
    places: dict[tuple[str, str], list[Route]] = {}
    for route in sorted(routes, key=lambda route: route.header or ""):
        places.setdefault((route.method, route.path), []).append(route)
    return [*places.values()]


def chosen(http: web.Request, place: Place) -> Route:
    """Which of the routes of one method and path a request is for."""
    return next((route for route in place[1:] if route.header in http.headers), place[0])


def dispatched(place: Place) -> Handler:
    """A handler of the requests for these."""

    async def handler(http: web.Request) -> web.StreamResponse:
        return await chosen(http, place).handler(http)

    return handler if len(place) > 1 else place[0].handler


def _named(route: Route) -> str:
    """What a message calls a route."""
    return f"{route.method} {route.path}" + ("" if route.header is None else f" with {route.header}")


def _told(handler: Handler, whose: str) -> Handler:
    """The handler, for which errors name the plugin."""

    @functools.wraps(handler)
    async def named(http: web.Request) -> web.StreamResponse:
        http[WHOSE] = whose
        return await handler(http)

    return named


def checked(routes: object, service: Service) -> Sequence[Route]:
    """The routes that a factory made, checked. Raises TypeError, ValueError or whatever aiohttp raises for a route that
    it cannot serve."""
    if not isinstance(routes, (list, tuple)) or not all(isinstance(route, Route) for route in routes):
        raise TypeError("its factory returned something other than a list of Routes")
    routers = {route.header: web.UrlDispatcher() for route in routes}
    for route in routes:
        if not isinstance(route.summary, str) or not route.summary.isprintable():
            raise TypeError(f"the summary of {route.method} {route.path} is not one line of text")
        if not inspect.iscoroutinefunction(route.handler):
            raise TypeError(f"the handler of {route.method} {route.path} is not an async function")
        if not (route.wire_format is None or isinstance(route.wire_format, WireFormat)):
            raise TypeError(f"the wire_format of {route.method} {route.path} is no infer_server.http.wire.WireFormat")
        if route.header is not None and route.open:
            raise TypeError(f"{_named(route)} is open, which only the endpoint without the header can be")
        routers[route.header].add_route(route.method, route.path, route.handler)
        if route.body is not None:
            if not (isinstance(route.body, type) and issubclass(route.body, Body)):
                raise TypeError(f"the body of {route.method} {route.path} does not extend infer_server.http.body.Body")
            service.expect(route.body)
    return routes
