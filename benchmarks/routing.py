"""How routing scales: the router's own code before synthetic replicas, on a virtual clock.

    python -m benchmarks.routing --json benchmarks/results/routing.json --plot docs/images/routing.svg

A replica prefills one prompt at a time, ``PREFILL`` tokens a second, and decodes beside that; its cache keeps what was
used last. Requests arrive at random (Poisson), as many for each replica, however many there are. Of each prompt, the
first tokens are those of its group. What is measured in real time is only what a decision takes and how much memory
the router has."""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infer_router.router import Router

PREFILL = 8000.0
"""Tokens per second."""
ITL = 0.02
ANSWER = 100
TOKENS = 64
"""Tokens of a block."""
SHARED, OWN = 16, 4
"""Blocks of a prompt that are its group's, and its own."""
CAPACITY = 2560
"""Blocks that a replica's cache has room for: 164,000 tokens."""
GROUPS = 8
"""Groups of prompts per replica."""
RATE = 16.7
"""Requests per second for each replica: a million per minute for a thousand."""
NUMBERS = (1, 10, 100, 1000)
TRAFFIC = ("skewed", "uniform", "unique")
POLICIES = ("prefix", "round robin", "least loaded")


class Cache:
    """Blocks, the one used longest ago first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, chain: Sequence[int]) -> int:
        """How many leading blocks it has; it has them all afterward."""
        found = next((i for i, block in enumerate(chain) if block not in self._blocks), len(chain))
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > CAPACITY:
            self._blocks.popitem(last=False)
        return found


def traffic(kind: str, replicas: int, rng: random.Random) -> Callable[[], list[int]]:
    """Makes prompts: a function that returns a chain of blocks."""
    number = GROUPS * replicas
    starts = [rng.getrandbits(60) for _ in range(number)]
    weights = list(itertools.accumulate(1 / (i + 1) if kind == "skewed" else 1.0 for i in range(number)))

    def make() -> list[int]:
        start = rng.getrandbits(60) if kind == "unique" else rng.choices(starts, cum_weights=weights)[0]
        own = rng.getrandbits(60)
        return [start + i for i in range(SHARED)] + [own + i for i in range(OWN)]

    return make


def simulate(policy: str, kind: str, replicas: int, requests: int) -> dict[str, Any]:
    rng = random.Random(1)
    make, router = traffic(kind, replicas, rng), Router()
    names = [f"r{i}" for i in range(replicas)]
    for name in names:
        router.join(name)
    caches = {name: Cache() for name in names}
    found = 0
    free = dict.fromkeys(names, 0.0)
    turn = itertools.cycle(names)
    ends: list[tuple[float, int, Any]] = []
    now, first, decisions, ratios, done = 0.0, [], [], [], dict.fromkeys(names, 0)
    measured = 0
    for i in range(requests):
        now += rng.expovariate(RATE * replicas)
        while ends and ends[0][0] <= now:
            router.end(heapq.heappop(ends)[2])
        chain = make()
        began = time.perf_counter()
        if policy == "round robin":
            name = next(turn)
        else:
            choice = router.choose(chain if policy == "prefix" else ())
            assert choice is not None
            name = choice.replica
        ticket = router.begin(name, chain if policy == "prefix" else ())
        decisions.append(time.perf_counter() - began)
        had = caches[name].use(chain)
        computed = (len(chain) - had) * TOKENS
        free[name] = max(free[name], now) + computed / PREFILL
        heapq.heappush(ends, (free[name] + ANSWER * ITL, i, ticket))
        if i >= requests // 2:  # the first half fills the caches
            measured += 1
            found += had
            first.append(free[name] - now)
            done[name] += computed + ANSWER
            if i % 1000 == 0:
                loads = [router.open(each) for each in names]
                ratios.append(max(loads) / max(1.0, statistics.fmean(loads)))
    first.sort()
    decisions.sort()
    blocks = measured * (SHARED + OWN)
    return {
        "policy": policy,
        "traffic": kind,
        "replicas": replicas,
        "requests": requests,
        "hit_rate": found / blocks,
        "computed_per_request": (blocks - found) * TOKENS / measured,
        "ttft_p50_ms": 1e3 * first[len(first) // 2],
        "ttft_p99_ms": 1e3 * first[len(first) * 99 // 100],
        "load_max_over_mean": statistics.fmean(ratios) if ratios else None,
        "work_max_over_mean": max(done.values()) / statistics.fmean(done.values()),
        "decision_p50_us": 1e6 * decisions[len(decisions) // 2],
        "decision_p99_us": 1e6 * decisions[len(decisions) * 99 // 100],
        "blocks": router.blocks,
    }


def memory(blocks: int) -> dict[str, float]:
    """What the router takes for so many blocks, and what a decision takes with these."""
    tracemalloc.start()
    router, rng = Router(most_blocks=2 * blocks), random.Random(2)
    for i in range(1000):
        router.join(f"r{i}")
    before = tracemalloc.get_traced_memory()[0]
    starts = [rng.getrandbits(60) for _ in range(blocks // (SHARED + OWN))]
    for start in starts:
        choice = router.choose(())
        assert choice is not None
        router.end(router.begin(choice.replica, [start + i for i in range(SHARED + OWN)]))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    times = []
    for _ in range(20_000):
        start, own = rng.choice(starts), rng.getrandbits(60)
        chain = [start + i for i in range(SHARED)] + [own + i for i in range(OWN)]
        began = time.perf_counter()
        choice = router.choose(chain)
        assert choice is not None
        ticket = router.begin(choice.replica, chain)
        times.append(time.perf_counter() - began)
        router.end(ticket)
    times.sort()
    return {
        "blocks": router.blocks,
        "bytes_per_block": taken / blocks,
        "decision_p50_us": 1e6 * times[len(times) // 2],
        "decision_p99_us": 1e6 * times[len(times) * 99 // 100],
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "infer"
    from matplotlib import pyplot

    shown = (("hit_rate", "blocks found in the cache"), ("computed_per_request", "tokens computed per request"))
    figure, axes = pyplot.subplots(len(shown), 2, figsize=(9, 6), sharex=True)
    for row, (key, title) in enumerate(shown):
        for column, kind in enumerate(("skewed", "uniform")):
            axis = axes[row][column]
            for policy in POLICIES:
                points = [(r["replicas"], r[key]) for r in rows if (r["policy"], r["traffic"]) == (policy, kind)]
                axis.plot(*zip(*points, strict=True), marker="o", label=policy)
            axis.set_xscale("log")
            axis.set_title(f"{title}, {kind} groups", fontsize=9)
            axis.grid(alpha=0.3)
            axis.set_ylim(0, 1 if key == "hit_rate" else TOKENS * (SHARED + OWN))
            if row:
                axis.set_xlabel("replicas")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="*", default=NUMBERS)
    parser.add_argument("--requests", type=int, default=400, help="per replica, and 60,000 in all at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = []
    for kind, replicas, policy in itertools.product(TRAFFIC, args.replicas, POLICIES):
        rows.append(simulate(policy, kind, replicas, min(60_000, max(4000, args.requests * replicas))))
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True)
    table = memory(1_000_000)
    print(json.dumps(table))
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows, "table": table}, indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
