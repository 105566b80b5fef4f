"""The console's page: its routes, whichever server has them."""

from __future__ import annotations

from aiohttp.typedefs import Handler

from infer.contracts.server import Route
from infer_console.files import Files
from infer_console.sessions import Host, Login, Sessions, for_page


def page(host: Host, server: Handler, steps: Handler) -> list[Route]:
    """``server`` answers what the page is told of the model, of the plugins and the settings, and ``steps`` with the
    engine's steps as they happen."""
    files, sessions = Files(), Sessions(host)
    return [
        Route("GET", "/console", files.page, "The console.", None, open=True),
        Route("GET", "/console/{file}", files.file, "A file of the console.", None, open=True),
        Route("POST", "/console/api/login", sessions.login, "Exchange a key for a cookie.", None, Login, open=True),
        Route("POST", "/console/api/logout", sessions.logout, "End the cookie's session.", None, open=True),
        Route("GET", "/console/api/server", for_page(host, server), "What is installed, and the settings.", None),
        Route("GET", "/console/api/steps", for_page(host, steps), "The engine's steps as they happen.", None),
    ]
