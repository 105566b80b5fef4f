"""python -m benchmarks.watched [--shape NAME] [--streams N] [--seconds S] [--turn N] [--json FILE]

What a decode step costs more while somebody watches the engine: a server under load, whose observer is on and off in
turns of a few steps, off, on, on, off, so that both see the same machine. The watcher reads what the console's page
reads and throws it away, so that the client's own work is not in the figures. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http_loss import request
from benchmarks.shapes import CONFIGS, write
from tests.console.records import step

from infer import hookimpl
from infer.contracts.records import StepRecord
from infer_bench.bench import machine
from infer_console.live import Live
from infer_console.messages import Kept, Maps, Messages, cells
from infer_server.testing import serving

PROMPT, NEW = 32, 1800
SETTLE = 3 / 8
"""The share of a turn's steps that do not count, at its beginning: the event loop still sends what was before."""
CLOCKS = ("step", "engine_thread", "process")


class Clock:
    """An observer that notes, after each step, how many sequences decoded, and three clocks in ns: the wall's, that of
    the engine's thread and that of the process."""

    INFER_PLUGIN_API = 2

    def __init__(self, turn: int) -> None:
        self.steps: list[tuple[int, int, int, int]] = []
        self._turn = turn

    @property
    def on(self) -> bool:
        """Whether the next step is of a turn that is watched."""
        return len(self.steps) // self._turn % 4 in (1, 2)

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        alone = 0 if record.chunks else record.decodes
        self.steps.append((alone, time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()))


def serve(path: str, streams: int, turn: int) -> None:
    """Serve until standard input ends; then print the steps."""
    clock, engine = Clock(turn), {"max_batch_size": streams, "max_seq_len": 2048}
    watched = Live.infer_step_finished

    def in_turns(live: Live, record: StepRecord) -> None:
        if clock.on:
            watched(live, record)

    Live.infer_step_finished = in_turns  # type: ignore[assignment, method-assign]
    model = {} if path == "demo" else {"load_format": "dummy"}
    with serving(path, plugins=[clock], model=model, engine=engine) as server:
        print(server.url, flush=True)
        sys.stdin.read()
    print(json.dumps(clock.steps))


@contextlib.contextmanager
def watching(address: tuple[str, int]) -> Iterator[None]:
    """Read the engine's steps as the page does, and forget them."""
    stream = socket.create_connection(address)
    lines = ["GET /console/api/steps?last=2000 HTTP/1.1", f"Host: {address[0]}", "X-Infer-Console: 1", "", ""]
    stream.sendall("\r\n".join(lines).encode())
    began = stream.recv(1 << 16)
    assert began.startswith(b"HTTP/1.1 200"), began[:300]
    room = bytearray(1 << 20)

    def forget() -> None:
        with contextlib.suppress(OSError):
            while stream.recv_into(room):
                pass

    reader = threading.Thread(target=forget)
    reader.start()
    try:
        yield
    finally:
        stream.shutdown(socket.SHUT_RDWR)
        reader.join()
        stream.close()


@contextlib.contextmanager
def load(address: tuple[str, int], streams: int) -> Iterator[None]:
    """Have so many prompts answered, again and again, from the moment when all have begun."""
    draw, end = random.Random(0), threading.Event()

    def ask() -> None:
        while not end.is_set():
            prompts = [[draw.randrange(3, 4000) for _ in range(PROMPT)] for _ in range(streams)]
            asked = [request(address, prompt, NEW) for prompt in prompts]
            for stream in asked:
                while not end.is_set() and stream.recv(1 << 16):
                    pass
                stream.close()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        time.sleep(1.0)
        yield
    finally:
        end.set()
        asking.join()


def turns(steps: Sequence[Sequence[int]], streams: int, length: int) -> Iterator[list[float] | None]:
    """The mean costs of a step of each turn, in µs by each clock; None if another work than decoding was in it."""
    for first in range(0, len(steps) - length, length):
        turn = steps[first + int(SETTLE * length) : first + length]
        pure = all(step[0] == streams for step in turn)
        yield (
            [(b - a) / 1e3 / (len(turn) - 1) for a, b in zip(turn[0][1:], turn[-1][1:], strict=True)] if pure else None
        )


def ratios(costs: Sequence[list[float] | None]) -> list[tuple[float, ...]]:
    """For each clock, what every round of four turns took watched, as a multiple of what it took unwatched."""
    rounds = [costs[i : i + 4] for i in range(0, len(costs) - 3, 4)]
    whole = [[turn for turn in each if turn] for each in rounds]
    return [tuple((b + c) / (a + d) for a, b, c, d in zip(*each, strict=True)) for each in whole if len(each) == 4]


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Of the median: 95 %, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def own(streams: int, blocks: int = 65536) -> dict[str, float]:
    """CPU time in µs that watching itself takes, on this thread and alone: of the engine's thread after each step and
    for each map of a cache of so many blocks, and of the event loop for each step. What the threads cost each other is
    not in it."""

    def timed(act: Callable[[StepRecord], object], times: int) -> float:
        records = [step(n, *ids) for n in range(times)]
        began = time.thread_time_ns()
        for record in records:
            act(record)
        return (time.thread_time_ns() - began) / 1e3 / times

    ids = [f"cmpl-{n:024d}" for n in range(streams)]
    states, messages, kept = bytes(range(4)) * (blocks // 4), Messages(), Kept(2000, 2 << 20)
    maps, fresh = Maps(), deque[object](maxlen=512)
    maps.after(step(0, *ids))

    def note(record: StepRecord) -> None:
        fresh.append(maps.after(record) or record)

    return {
        "engine_thread_a_step": timed(note, 5000),
        "engine_thread_a_map": timed(lambda record: cells(record.index, states), 50),
        "event_loop_a_step": timed(lambda record: [*map(kept.keep, messages.of(record))], 5000),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__)
    parser.add_argument("--shape", choices=["demo", *CONFIGS], default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--turn", type=int, default=64, help="steps of a turn: fewer of them if they are long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.serve, args.streams, args.turn)
        return 0
    with tempfile.TemporaryDirectory() as made:
        path = "demo" if args.shape == "demo" else str(write(Path(made), CONFIGS[args.shape]))
        command = [sys.executable, "-m", "benchmarks.watched", "--serve", path, "--streams", str(args.streams)]
        command += ["--turn", str(args.turn)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            where = urlsplit(server.stdout.readline().strip())
            address = (where.hostname or "", where.port or 0)
            with watching(address), load(address, args.streams):
                time.sleep(args.seconds)
            server.stdin.close()
            steps = json.loads(server.stdout.read())
    costs = [*turns(steps, args.streams, args.turn)]
    rounds = ratios(costs)
    if not rounds:
        print("Too few steps for a round of four turns: give more --seconds.", file=sys.stderr)
        return 1
    report: dict[str, Any] = {"machine": machine(), "shape": args.shape, "streams": args.streams, "rounds": len(rounds)}
    print(f"{len(rounds)} rounds{'µs a step':>20}{'watched / unwatched':>24}{'95 % of that':>20}")
    for i, (name, ratio) in enumerate(zip(CLOCKS, zip(*rounds, strict=True), strict=True)):
        cost, median, (low, high) = (
            statistics.median(c[i] for c in costs if c),
            statistics.median(ratio),
            interval(ratio),
        )
        report[name] = {"us": cost, "ratio": median, "interval": [low, high]}
        print(f"{name:16}{cost:20.1f}{median:24.4f}{low:12.4f}{high:8.4f}")
    report["own_us"] = own(args.streams)
    print("CPU time of watching itself, in µs:", ", ".join(f"{name} {us:.2f}" for name, us in report["own_us"].items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
