"""python -m benchmarks.watched [--shape NAME] [--streams N] [--seconds S] [--rounds N] [--json FILE]

What a decode step costs more while somebody watches the engine: a server under load, for short times in turns
unwatched, watched, watched, unwatched. The watcher reads what the console's page reads and throws it away, so that the
client's own work is not in the figures. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from infer.commands.bench import machine
from infer.hookspecs import StepRecord
from infer.server.testing import serving
from infer_console.telling import Kept, Maps, Telling, cells

PROMPT, NEW = 32, 1800
SETTLE_S = 0.03


class Clock:
    """An observer that notes, after each step, how many sequences decoded and nothing else, and three clocks in ns: the
    wall's, that of the engine's thread and that of the process."""

    INFER_PLUGIN_API = 1

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, int]] = []

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        alone = 0 if record.chunks else record.decodes
        self.steps.append((alone, time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()))


def serve(path: str, streams: int) -> None:
    """Serve until standard input ends; then print the steps."""
    clock, engine = Clock(), {"max_batch_size": streams, "max_seq_len": 2048}
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


def window(address: tuple[str, int], seconds: float, watched: bool) -> tuple[int, int]:
    """Let the server work for so long. Returns when that began and ended, in ns."""
    with watching(address) if watched else contextlib.nullcontext():
        time.sleep(SETTLE_S)
        began = time.perf_counter_ns()
        time.sleep(seconds)
        return began, time.perf_counter_ns()


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


def costs(steps: Sequence[Sequence[int]], streams: int, began: int, ended: int) -> dict[str, float] | None:
    """Medians in µs of the steps in which all streams decode; None if there are too few."""
    rows = [
        [(b - a) / 1e3 for a, b in zip(before[1:], after[1:], strict=True)]
        for before, after in itertools.pairwise(steps)
        if before[0] == after[0] == streams and began < before[1] and after[1] < ended
    ]
    if len(rows) < 5:
        return None
    return dict(zip(("step", "engine_thread", "process"), map(statistics.median, zip(*rows, strict=True)), strict=True))


def own(streams: int, blocks: int = 65536) -> dict[str, float]:
    """CPU time in µs that watching itself takes, on this thread and alone: of the engine's thread after each step and
    for each map of a cache of so many blocks, and of the event loop for each step. It says what the noise of a server's
    steps hides, but not what the threads cost each other."""

    def timed(act: Callable[[StepRecord], object], times: int) -> float:
        records = [step(n, *ids) for n in range(times)]
        began = time.thread_time_ns()
        for record in records:
            act(record)
        return (time.thread_time_ns() - began) / 1e3 / times

    ids = [f"cmpl-{n:024d}" for n in range(streams)]
    states, telling, kept = bytes(range(4)) * (blocks // 4), Telling(), Kept(2000, 2 << 20)
    maps, fresh = Maps(), deque[object](maxlen=512)
    maps.after(step(0, *ids))

    def note(record: StepRecord) -> None:
        fresh.append(maps.after(record) or record)

    return {
        "engine_thread_a_step": timed(note, 5000),
        "engine_thread_a_map": timed(lambda record: cells(record.index, states), 50),
        "event_loop_a_step": timed(lambda record: [*map(kept.keep, telling.tell(record))], 5000),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__)
    parser.add_argument("--shape", choices=["demo", *CONFIGS], default="Qwen3-0.6B")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn")
    parser.add_argument("--rounds", type=int, default=6, help="of four turns")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.serve, args.streams)
        return 0
    turns: list[tuple[bool, tuple[int, int]]] = []
    with tempfile.TemporaryDirectory() as made:
        path = "demo" if args.shape == "demo" else str(write(Path(made), CONFIGS[args.shape]))
        command = [sys.executable, "-m", "benchmarks.watched", "--serve", path, "--streams", str(args.streams)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            where = urlsplit(server.stdout.readline().strip())
            address = (where.hostname or "", where.port or 0)
            with load(address, args.streams):
                for watched in (False, True, True, False) * args.rounds:
                    turns.append((watched, window(address, args.seconds, watched)))
            server.stdin.close()
            steps = json.loads(server.stdout.read())
    seen = [(watched, costs(steps, args.streams, *when)) for watched, when in turns]
    rounds = [seen[i : i + 4] for i in range(0, len(seen), 4)]
    whole = [each for each in rounds if all(cost for _, cost in each)]
    report: dict[str, Any] = {"machine": machine(), "shape": args.shape, "streams": args.streams, "rounds": len(whole)}
    print(f"{'µs a step':16}{'unwatched':>12}{'watched':>12}{'ratio of a round, quartiles':>32}")
    for name in ("step", "engine_thread", "process"):
        sums = [
            [sum(cost[name] for w, cost in each if cost and w == is_) / 2 for is_ in (False, True)] for each in whole
        ]
        quartiles = statistics.quantiles([b / a for a, b in sums], n=4)
        unwatched, watched_ = (statistics.median(column) for column in zip(*sums, strict=True))
        report[name] = {"unwatched_us": unwatched, "watched_us": watched_, "ratio_quartiles": quartiles}
        said = " ".join(f"{ratio:8.4f}" for ratio in quartiles)
        print(f"{name:16}{unwatched:12.1f}{watched_:12.1f}     {said}")
    report["own_us"] = own(args.streams)
    print("CPU time of watching itself, in µs:", ", ".join(f"{name} {us:.2f}" for name, us in report["own_us"].items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
