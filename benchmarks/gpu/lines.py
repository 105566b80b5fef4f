"""Printing and saving figures line by line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def main(prog: str, description: str, lines: Iterable[dict[str, Any]]) -> int:
    """The main function of a script that measures ``lines``: print each line, and write all lines so far to ``--json``
    FILE."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all lines here, as they come")
    args = parser.parse_args()
    found = []
    for line in lines:
        found.append(line)
        print(*line.values(), sep="  ", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    return 0
