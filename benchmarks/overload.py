"""python -m benchmarks.overload [--times N] [--seconds S] [--json FILE]

What becomes of a server that is asked for many times what it can answer: how soon it refuses, what those notice whom it
serves, and how soon it is itself again. Streams at capacity first, one after another in each place; then requests that
come at ``--times`` that rate, whatever becomes of them; then one at a time. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from infer_bench.bench import machine, server

PLACES, WAITING, NEW = 8, 64, 64
SETTINGS = {
    "model.path": "demo",
    "engine.max_batch_size": str(PLACES),
    "engine.max_waiting_requests": str(WAITING),
    "engine.max_seq_len": "1024",
}
SETTLED = 1.5
"""A server is itself again when TTFT is at most so many times that at capacity, several times in a row."""
IN_A_ROW = 5
WATCHED_S = 15.0
"""For how long it is watched after the load."""


@dataclass
class Seen:
    """What clients saw, in seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    """From the first byte sent to the refusal."""
    lost: int = 0
    """Connections that ended without an answer."""
    after: list[tuple[float, float]] = field(default_factory=list)
    """When each of a row of single requests was sent, since the load's end, and its TTFT (infinite: refused)."""


def asked(at: int) -> bytes:
    """A request, another one for each number: the cache has no part in this."""
    body = json.dumps({
        "prompt": [3 + (at * 31 + i * i) % 900 for i in range(64)],
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def one(address: tuple[str, int], at: int, seen: Seen) -> None:
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(asked(at))
        status = (await reader.readline()).split()[1:2]
        if status == [b"503"]:
            seen.refused.append(time.perf_counter() - began)
        elif status != [b"200"]:
            seen.lost += 1
        else:
            last = 0.0
            async for line in reader:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    (seen.itl if last else seen.ttft).append(now - (last or began))
                    last = now
        writer.close()
    except OSError:
        seen.lost += 1


async def at_capacity(address: tuple[str, int], seconds: float) -> tuple[Seen, float]:
    """As many streams as there are places. Returns how many requests per second were answered, too."""
    seen, end, count = Seen(), time.perf_counter() + seconds, 0

    async def place() -> None:
        nonlocal count
        while time.perf_counter() < end:
            count += 1
            await one(address, count, seen)

    began = time.perf_counter()
    await asyncio.gather(*(place() for _ in range(PLACES)))
    return seen, count / (time.perf_counter() - began)


async def overload(address: tuple[str, int], rate: float, seconds: float) -> Seen:
    """Requests at a rate, none of which waits for another's answer, and single ones when no more of these come."""
    seen, tasks, began = Seen(), set[asyncio.Task[None]](), time.perf_counter()
    for i in range(int(rate * seconds)):
        await asyncio.sleep(began + i / rate - time.perf_counter())
        tasks.add(task := asyncio.create_task(one(address, 10_000 + i, seen)))
        task.add_done_callback(tasks.discard)
    ended = time.perf_counter()
    while (sent := time.perf_counter() - ended) < WATCHED_S:
        probe = Seen()
        await one(address, 1_000_000 + len(seen.after), probe)
        seen.after.append((sent, probe.ttft[0] if probe.ttft else float("inf")))
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    return seen


def share(values: Sequence[float], of: float) -> float:
    """A percentile, in milliseconds."""
    ordered = sorted(values)
    return round(1000 * ordered[int(of * (len(ordered) - 1))], 2) if ordered else float("nan")


def latencies(seen: Seen) -> dict[str, float]:
    return {
        "ttft_p50": share(seen.ttft, 0.5),
        "ttft_p99": share(seen.ttft, 0.99),
        "itl_p50": share(seen.itl, 0.5),
        "itl_p99": share(seen.itl, 0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json")
    args = parser.parse_args()
    with server([part for name, value in SETTINGS.items() for part in (f"--{name}", value)]) as url:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        address = parts.hostname, parts.port
        asyncio.run(at_capacity(address, 3))
        calm, rate = asyncio.run(at_capacity(address, args.seconds / 4))
        crowded = asyncio.run(overload(address, args.times * rate, args.seconds))
    limit, after = SETTLED * share(calm.ttft, 0.5) / 1000, crowded.after
    settled = [all(ttft <= limit for _, ttft in after[i : i + IN_A_ROW]) for i in range(len(after))]
    figures = {
        "machine": machine(),
        "capacity_requests_s": round(rate, 1),
        "asked_requests_s": round(args.times * rate, 1),
        "at_capacity_ms": latencies(calm),
        "overloaded_ms": latencies(crowded),
        "refused": len(crowded.refused),
        "refused_ms": {f"p{100 * of:g}": share(crowded.refused, of) for of in (0.5, 0.99, 1.0)},
        "served": len(crowded.ttft),
        "lost": crowded.lost,
        "itself_again_after_s": round(after[settled.index(True)][0], 2) if any(settled) else None,
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
