"""The page of an engine's steps that ``infer demo --html`` and ``infer bench --timeline`` write."""

from __future__ import annotations

from pathlib import Path

from infer.errors import InferError, installing
from infer.plugins.discovery import Plugins


def new_timeline(flag: str, file: str, plugins: Plugins) -> Path:
    """Make sure that there is an observer ``timeline``, which writes a page of an engine's steps, and begin its file
    anew. Raises InferError."""
    if not any(offer.name == "timeline" for offer in plugins.offers["observer"]):
        raise InferError(
            f"{flag} needs the plugin that writes the page: {installing('infer-console')}.{plugins.culprits()}"
        )
    plugins.get("observer", "timeline", flag)
    try:
        Path(file).write_bytes(b"")
    except OSError as error:
        raise InferError(f"{flag} {file} cannot be written: {error.strerror}.") from None
    return Path(file).absolute()
