"""``python -m tests.simulation [--seed N] [--worlds N] [--steps N] [--seconds N]``: worlds that nobody has written
down. One that fails is made shorter, and named by the command that shows it again."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from tests.simulation.world import MARKS, WALK_EVERY, World, command


@dataclass(frozen=True)
class Failure:
    """A world that fails after its last step."""

    seed: int
    steps: int
    faults: bool
    why: str

    def __str__(self) -> str:
        return command(self.seed, self.steps, self.faults)


def tried(seed: int, steps: int, faults: bool = True, walk_every: int = 1) -> World | Failure:
    world = World(seed, faults, walk_every=walk_every)
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


def lived(seed: int, steps: int, faults: bool, walk_every: int) -> tuple[int, Counter[str]] | Failure:
    """How many steps a world has lived for, and its marks."""
    logging.disable()  # planned faults are logged
    found = tried(seed, steps, faults, walk_every)
    if isinstance(found, World):
        return found.steps, found.marks
    return failure(seed, steps, faults) or found


def worlds(args: argparse.Namespace) -> Iterator[tuple[int, Counter[str]] | Failure]:
    """What becomes of each world. None is begun when the time is over."""
    walk_every = 1 if args.worlds == 1 else WALK_EVERY
    end = time.monotonic() + args.seconds
    with ProcessPoolExecutor(args.workers) as pool:
        begun: deque[Future[tuple[int, Counter[str]] | Failure]] = deque()
        for seed in range(args.seed, args.seed + args.worlds):
            if time.monotonic() >= end:
                break
            begun.append(pool.submit(lived, seed, args.steps, not args.no_faults, walk_every))
            if len(begun) > 2 * args.workers:  # so that nobody is idle
                yield begun.popleft().result()
        for future in begun:
            yield future.result()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first world")
    parser.add_argument("--worlds", type=int, default=1000, help="1: its books are compared after each step")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other world is begun")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-faults", action="store_true")
    args = parser.parse_args(argv)
    began, marks, ran, failed, steps = time.perf_counter(), Counter[str](), 0, 0, 0
    for found in worlds(args):
        ran += 1
        if isinstance(found, Failure):
            failed += 1
            print(f"{found.why}\n    {found}", flush=True)
        else:
            steps += found[0]
            marks += found[1]
    seconds = time.perf_counter() - began
    missed = [mark for mark in MARKS if not marks[mark]]
    print(
        json.dumps(
            {
                "seed": args.seed,
                "worlds": f"{ran} of {args.worlds}",
                "steps": args.steps,
                "failed": failed,
                "missed": missed,
                "steps_per_s": round(steps / seconds),
                "marks": marks,
            },
            indent=2,
        )
    )
    # Who looks at one world again does not expect everything of it.
    return int(failed > 0 or (bool(missed) and args.worlds > 1))


if __name__ == "__main__":
    sys.exit(main())
