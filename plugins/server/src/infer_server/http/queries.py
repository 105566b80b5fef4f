"""The parameters of URLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from infer.errors import RequestError


def query(http: web.Request, **known: Sequence[str] | None) -> dict[str, str]:
    """The parameters of a URL. ``known`` has the values that each may have; None is any. Raises RequestError."""
    asked: dict[str, str] = {}
    for name, value in http.query.items():
        name = name.removesuffix("[]")
        if name not in known:
            raise RequestError(f"The parameter {name[:100]!r} is not supported; leave it out.", param=name)
        if (values := known[name]) is not None and value not in values:
            raise RequestError(
                f"{name} = {value[:100]!r} is not supported; it may be {' or '.join(values)}.", param=name
            )
        asked[name] = value
    return asked


def limit(asked: Mapping[str, str], few: int, most: int) -> int:
    """The parameter ``limit``: how many entries a page may have, ``few`` unless it says. Raises RequestError."""
    value = asked.get("limit", str(few))
    if not (value.isascii() and value.isdecimal() and len(value) <= len(str(most)) and 1 <= int(value) <= most):
        raise RequestError(f"limit = {value[:100]!r} must be a number from 1 to {most}.", param="limit")
    return int(value)
