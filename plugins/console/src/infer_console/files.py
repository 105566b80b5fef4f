"""The page's files, with headers that leave a browser nothing to do but what the page itself does."""

from __future__ import annotations

import hashlib
import mimetypes
from importlib.resources import files

from aiohttp import web
from aiohttp.typedefs import LooseHeaders

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # that is: ask each time whether the ETag is still right
}
PAGE = "index.html"


class Files:
    """Handlers that serve the package's files from memory. A name that is not one of theirs is not found."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for file in files(__package__).joinpath("static").iterdir():
            data = file.read_bytes()
            kind = "text/javascript" if file.name.endswith(".js") else mimetypes.guess_type(file.name)[0]
            tag = hashlib.sha256(data).hexdigest()[:32]
            self._files[file.name] = data, {"Content-Type": f"{kind}; charset=utf-8", "ETag": f'"{tag}"'}

    async def page(self, http: web.Request) -> web.Response:
        return self._answer(http, PAGE)

    async def file(self, http: web.Request) -> web.Response:
        return self._answer(http, http.match_info["file"])

    def _answer(self, http: web.Request, name: str) -> web.Response:
        if name not in self._files:
            raise web.HTTPNotFound
        data, own = self._files[name]
        headers: LooseHeaders = HEADERS | own
        tags = http.if_none_match or ()
        if any(tag.value in ("*", own["ETag"].strip('"')) for tag in tags):
            return web.Response(status=304, headers=headers)
        return web.Response(body=data, headers=headers)
