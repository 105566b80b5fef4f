"""JSON schemas as llguidance takes them."""

from __future__ import annotations

from typing import Any

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Whitespace between the parts of a JSON text: enough for indentation, but bounded, so that an answer cannot go on with
whitespace for ever."""


def spaced(schema: Any, **options: bool) -> Any:
    """The schema with bounded white space between the parts of a text that fits it, and other ``options``."""
    given = schema.get("x-guidance", {})
    how = {"whitespace_pattern": WHITESPACE, **options}
    return schema | {"x-guidance": how | given if isinstance(given, dict) else given}
