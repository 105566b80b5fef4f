"""python -m benchmarks.frames [--rows N] [--json FILE]

How fast the engine's view is drawn: a timeline of 10,000 steps with so many requests each, in a Chromium without a
screen or a GPU, while further steps come and while the slider moves. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from tests.console.browser import browsing

from infer_bench.bench import machine
from infer_console.messages import hello
from infer_console.timeline import add

STEPS, CELLS, FRAMES = 10_000, 8192, 150
DRAW = """(async (act) => {
    const at = [];
    for (let n = 0; n < %d; n++) {
        at.push(await new Promise(requestAnimationFrame));
        act(n);
    }
    return at;
})(%s)"""
COME = """(n) => {
    const last = modules.view.steps.all.at(-1);
    const next = (i) => ({ ...last, kind: "step", index: last.index + i, start: last.start + 30 * i, new: {} });
    modules.view.take([next(1), next(2)]);
}"""
MOVE = """(n) => {
    const slider = document.querySelector("#scrub");
    slider.value = Number(slider.min) + 50 * n;
    slider.dispatchEvent(new Event("input"));
}"""


def records(rows: int) -> Iterator[bytes]:
    """What is told of a decode of so many requests, with drafts now and then, beside one that prefills."""
    yield to_json(hello(server="x", budget=512, cache=10**6))
    numbers = [*range(rows - 1)]
    for n in range(STEPS):
        works = [(rows - 1, 64 * n, 64, 1, 0, 0, 0), *((m, n, 4, 0, 1, 3, 2) for m in numbers[n % 7 :: 50])]
        yield to_json(
            {
                "kind": "step",
                "index": n,
                "start": 30.0 * n,
                "ms": 29.0 + n % 3,
                "tokens": rows + 63,
                "passes": 1,
                "running": rows,
                "waiting": 0,
                "free": 5000,
                "totals": [n, 0, n, 0, 0],
                "decodes": [m for m in numbers if (m - n % 7) % 50],
                "at": [n for m in numbers if (m - n % 7) % 50],
                "works": works,
                "new": {} if n else {m: f"cmpl-{m:024d}" for m in range(rows)},
            }
        )
        if n % 50 == 0:
            cells = "".join(str((n + m * m) % 4) for m in range(CELLS))
            yield to_json({"kind": "map", "step": n, "each": 4, "counts": [CELLS] * 4, "cells": cells})


async def measure(page: Path) -> dict[str, Any]:
    """For each way, the width of a step and the frames: the time between two, and the page's work for each, in ms."""
    found: dict[str, Any] = {}
    async with browsing() as tab:
        await tab.resize(1280, 1200)
        await tab.send("Performance.enable")
        await tab.open(page.as_uri())
        await tab.until("Number(document.querySelector('#lanes').dataset.drawn) > 0")

        async def work() -> float:
            metrics = (await tab.send("Performance.getMetrics"))["metrics"]
            return 1e3 * float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

        for name, act in {"steps come": COME, "the slider moves": MOVE}.items():
            for zoom in (1, 4):
                await tab.run(f"document.querySelector('#zoom').value = {zoom}")
                before = await work()
                at = await tab.run(DRAW % (FRAMES, act))
                spent = (await work() - before) / FRAMES
                gaps = sorted(b - a for a, b in itertools.pairwise(at))
                row = {"median": statistics.median(gaps), "p95": gaps[int(0.95 * len(gaps))], "work": spent}
                found[f"{name}, {zoom} px a step"] = row
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frames", description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        page = Path(made) / "page.html"
        add(page, "many", [*records(args.rows)])
        found = asyncio.run(measure(page))
    print(f"{args.rows} requests, ms a frame{'median':>24}{'95th':>8}{'work':>8}")
    for name, row in found.items():
        print(f"{name:42}{row['median']:8.1f}{row['p95']:8.1f}{row['work']:8.1f}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": args.rows, "ms": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
