"""`infer plugins`: lists what is installed, what is chosen, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any

from infer.commands.arguments import table
from infer.contracts.hooks import CommandRegistration
from infer.contracts.protocols import CommandContext
from infer.errors import InferError
from infer.slots import SLOTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Print the table of plugins. Raises the error of a choice that cannot be made, after the table."""
    from infer.assemble import choose_device, stored

    rows: list[dict[str, Any]] = []
    failed = None
    for slot, offers in context.plugins.offers.items():
        chosen, why, all_of_them = None, "", ""
        about = SLOTS[slot]
        asked = about.asked(context.settings)
        if about.setting is not None:
            why = f"{about.setting} = {asked} (from {context.sources[about.setting]})"
        if about.when and asked == "auto":
            all_of_them, why = "when met", about.when
        elif about.setting is None:
            all_of_them = "yes"
        else:
            try:
                device = choose_device(context.settings.model.device).type
                chosen = None if asked == "none" else context.plugins.choose(slot, context.settings, [device])
            except InferError as error:
                failed = error
        for offer in offers:
            unavailable = offer.registration.unavailable
            taken = offer is chosen or (all_of_them and not unavailable)
            rows.append(
                {
                    "slot": slot,
                    "name": offer.name,
                    "distribution": offer.distribution,
                    "version": offer.version,
                    "chosen": (all_of_them or "yes") if taken else "no",
                    "why": why if taken else unavailable or "",
                    "description": "; ".join(
                        (offer.registration.description, *(f"knows K/V in {name}" for name in offer.kv_dtypes))
                    ),
                }
            )
    try:
        if (weights := stored(context.settings, context.plugins)) is not None:
            row = dict.fromkeys(("distribution", "version"), "-") | {"slot": "checkpoint", "chosen": "yes"}
            row |= {"name": str(context.settings.model.path), "description": str(weights)}
            why = f"model.path = {row['name']} (from {context.sources['model.path']})"
            rows.append(row | {"why": why, "quantization": vars(weights)})
    except InferError as error:
        failed = failed or error
    for b in context.plugins.broken:
        rows.append(
            {
                "slot": "-",
                "name": "-",
                "distribution": b.distribution,
                "version": b.version,
                "chosen": "broken",
                "why": b.reason,
                "description": "",
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        columns = ("slot", "name", "distribution", "version", "chosen", "why", "description")
        print(table([columns, *(tuple(row[c] for c in columns) for row in rows)]))
    if failed is not None:
        raise failed
    return 0


COMMAND = CommandRegistration(
    "plugins", run, "list what is installed, what is chosen, and why", add_arguments=add_arguments
)
