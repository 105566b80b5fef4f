"""``infer models``: what a server of several models has, and in which state; and how it is served."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from infer.contracts.command import CommandContext
from infer.errors import InferError
from infer_server.http.fetching import ServedModel, address, served_models


def models(args: argparse.Namespace, context: CommandContext) -> int:
    """Print the state of each model of the server at ``server.host`` and ``server.port``."""
    _, listed = served(context)
    if args.json:
        print(json.dumps(listed, indent=2))
        return 0
    rows = [("name", "state", "size", "expires", "")]
    for each in listed:
        size, left = each.get("size_bytes"), each.get("expires_in_s")
        rows.append(
            (
                each["id"],
                each.get("state", "loaded"),  # a server of one model has it
                "" if size is None else f"{size / 2**30:.2f} GiB",
                "pinned" if each.get("pinned") else "" if left is None else f"in {left:.0f} s",
                each.get("problem") or "",
            )
        )
    print(columns(rows))
    return 0


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, in which what is in one column begins at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def served(context: CommandContext) -> tuple[str, list[ServedModel]]:
    """The URL of the server at ``server.host`` and ``server.port``, and what it says of each of its models. Raises
    NoServerError, or InferError if what answers does not say."""
    server = context.settings.server
    url = address(server)
    try:
        return url, served_models(url, server, "server.host and server.port")
    except ValueError:
        raise InferError(f"server.host = {server.host!r} is no host's name or address; set it to one.") from None
