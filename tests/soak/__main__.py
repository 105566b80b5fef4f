"""``python -m tests.soak [--rounds N] [--seconds N] [--seed N] [--each] [NAME ...]``"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.clients import HOSTILE, ORDINARY
from tests.soak.soak import Report, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    names = {client.__name__: client for client in (*ORDINARY, *HOSTILE)}
    parser.add_argument("name", nargs="*", choices=[[], *names], help="these clients only, all in each round")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other round is begun")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--each", action="store_true", help="a soak for each kind of client, and one for none")
    parser.add_argument("--no-faults", action="store_true", help="kill nothing, and leave the disk as it is")
    args = parser.parse_args()
    chosen = [names[name] for name in args.name]
    kinds = [[], *([client] for client in chosen or HOSTILE)] if args.each else [chosen or None]
    bad = False
    for clients in kinds:
        with tempfile.TemporaryDirectory() as folder:
            report = Report()
            draw, faults = random.Random(args.seed), not args.no_faults
            asyncio.run(soak(Path(folder), draw, args.rounds, report, clients, faults=faults, seconds=args.seconds))
        name = "everything" if clients is None else " ".join(client.__name__ for client in clients) or "nobody"
        print(json.dumps({"clients": name, "seed": args.seed, "asked_for": args.rounds} | report.figures()), flush=True)
        for violation in report.violations:
            print(f"VIOLATION (--seed {args.seed}): {violation}", flush=True)
        bad |= bool(report.violations)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
