"""``python -m tests.simulation [--seed N] [--worlds N] [--steps N]``: worlds that nobody has written down. One that
fails is made shorter, and named by the command that shows it again."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.simulation.world import MARKS, World


@dataclass(frozen=True)
class Failure:
    """A world that fails after its last step."""

    seed: int
    steps: int
    faults: bool
    why: str

    def __str__(self) -> str:
        end = "" if self.faults else " --no-faults"
        return f"python -m tests.simulation --seed {self.seed} --worlds 1 --steps {self.steps}{end}"


def tried(seed: int, steps: int, faults: bool = True) -> World | Failure:
    world = World(seed, faults)
    try:
        world.live(steps)
    except Exception as error:
        return Failure(seed, world.steps, faults, f"{type(error).__name__}: {error}")
    return world


def failure(seed: int, steps: int, faults: bool = True) -> Failure | None:
    """The shortest failure that halving finds, of a world without faults if that fails as well."""
    shortest = tried(seed, steps, faults)
    if isinstance(shortest, World):
        return None
    if isinstance(found := tried(seed, steps, faults=False), Failure):
        shortest = found
    less = shortest.steps // 2
    while less:
        found = tried(seed, shortest.steps - less, shortest.faults)
        if isinstance(found, World):
            less //= 2
        else:
            shortest, less = found, min(less, found.steps // 2)
    return shortest


def _marks(steps: int, faults: bool, seed: int) -> Counter[str] | Failure:
    logging.disable()  # planned faults are logged
    found = tried(seed, steps, faults)
    return found.marks if isinstance(found, World) else failure(seed, steps, faults) or found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first world")
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-faults", action="store_true")
    args = parser.parse_args()
    began, marks, failed = time.perf_counter(), Counter[str](), 0
    seeds = range(args.seed, args.seed + args.worlds)
    with ProcessPoolExecutor(args.workers) as pool:
        for found in pool.map(partial(_marks, args.steps, not args.no_faults), seeds):
            if isinstance(found, Failure):
                failed += 1
                print(f"{found.why}\n    {found}", flush=True)
            else:
                marks += found
    seconds = time.perf_counter() - began
    missed = [mark for mark in MARKS if not marks[mark]]
    figures = {"seed": args.seed, "worlds": args.worlds, "steps": args.steps, "failed": failed, "missed": missed}
    print(json.dumps(figures | {"steps_per_s": round(args.worlds * args.steps / seconds), "marks": marks}, indent=2))
    return int(failed > 0 or (bool(missed) and args.worlds > 100))


if __name__ == "__main__":
    sys.exit(main())
