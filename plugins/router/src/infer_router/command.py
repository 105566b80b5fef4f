"""``infer models``: what a server of several models has, and in which state; and how it is served."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from typing import Any

from infer.contracts.command import CommandContext
from infer.errors import InferError

TIMEOUT_S = 10.0


def models(args: argparse.Namespace, context: CommandContext) -> int:
    """Print the state of each model of the server at ``server.host`` and ``server.port``."""
    listed = _listed(context)
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
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join((*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4])).rstrip())
    return 0


def _listed(context: CommandContext) -> list[dict[str, Any]]:
    server = context.settings.server
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}/v1/models"
    request = urllib.request.Request(url)
    if server.api_keys:
        request.add_header("Authorization", f"Bearer {server.api_keys[0].get_secret_value()}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]
            return found
    except urllib.error.HTTPError as error:
        raise InferError(
            f"The server at {url} answers {error.code}; if it has keys, set server.api_keys to one of them."
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise InferError(
            f"No server of models answers at {url} ({error}); start infer serve, or set server.host and server.port."
        ) from None
