"""``python -m tests.mutants``: plant each bug in a copy of the sources and see whether its tests notice it."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter

from tests.mutants.plant import read, try_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("name", nargs="*", help="only mutants whose name or file holds one of these")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many, drawn")
    parser.add_argument("--seed", type=int, help="of the draw")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    mutants = [m for m in read() if not args.name or any(part in m.name or part in m.file for part in args.name)]
    if args.sample is not None and args.sample < len(mutants):
        seed = random.randrange(10**6) if args.seed is None else args.seed
        print(f"{args.sample} of {len(mutants)} mutants, drawn with --seed {seed}", flush=True)
        mutants = random.Random(seed).sample(mutants, args.sample)
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
