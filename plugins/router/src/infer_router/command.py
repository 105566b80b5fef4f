"""``infer models``: what a server of several models has, and in which state; and how it is served."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from infer.contracts.command import CommandContext
from infer.errors import InferError

TIMEOUT_S = 10.0


class NoServerError(InferError):
    """No server answers."""


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


def served(context: CommandContext) -> tuple[str, list[dict[str, Any]]]:
    """The URL that lists the models of the server at ``server.host`` and ``server.port``, and what it says of each.
    Raises NoServerError, or InferError if what answers does not say."""
    server = context.settings.server
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}/v1/models"
    request = urllib.request.Request(url)
    if server.api_keys:
        request.add_header("Authorization", f"Bearer {server.api_keys[0].get_secret_value()}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]
            return url, found
    except urllib.error.HTTPError as error:
        raise InferError(
            f"The server at {url} answers {error.code}; if it has keys, set server.api_keys to one of them."
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise NoServerError(
            f"No server of models answers at {url} ({error}); start infer serve, or set server.host and server.port."
        ) from None
