"""``python -m tests.mutants``: plant each bug in a copy of the sources and see whether its tests notice it."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from tests.mutants.plant import changed, read, try_all


def _part(text: str) -> slice:
    part, _, parts = text.partition("/")
    return slice(int(part) - 1, None, int(parts))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("name", nargs="*", help="only mutants whose name or file holds one of these")
    parser.add_argument("--changed", metavar="REF", help="only mutants whose file or test differs from this commit")
    parser.add_argument("--part", type=_part, metavar="I/N", help="only the I-th of N parts, such as 1/4")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    mutants = [m for m in read() if not args.name or any(part in m.name or part in m.file for part in args.name)]
    if args.changed:
        mutants = [m for m in mutants if changed(args.changed) & {m.file, *(test.split("::")[0] for test in m.tests)}]
        if not mutants:
            print(f"no mutant's file or test differs from {args.changed}")
            return 0
    if args.part:
        mutants = mutants[args.part]
    if not mutants:
        print("no such mutant", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for mutant, outcome, why in try_all(mutants, args.workers):
        counts[outcome] += 1
        print(f"{outcome:9} {mutant.name}" + (f": {why}" if why else ""), flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("killed", "SURVIVED", "broken")))
    return int(counts["killed"] < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
