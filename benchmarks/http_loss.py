"""python -m benchmarks.http_loss [--shape NAME] [--streams N] [--repeat N] [--json FILE]

How much throughput is lost between `LLM.generate` and as many streams over HTTP. The client costs next to nothing: it
leaves answers in the sockets' buffers until they are complete. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.shapes import CONFIGS, write

from infer import LLM, SamplingParams
from infer_bench.bench import machine, server

PROMPT, NEW = 32, 128


def offline(folder: str, prompts: Sequence[list[int]], repeat: int) -> list[float]:
    """Seconds of each run."""
    engine = {"max_batch_size": len(prompts), "max_seq_len": 512}
    with LLM(folder, model={"load_format": "dummy"}, engine=engine) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        times = []
        for _ in range(repeat + 1):
            began = time.perf_counter()
            llm.generate(prompts, params)
            times.append(time.perf_counter() - began)
    return times[1:]


def request(address: tuple[str, int], prompt: list[int], new: int = NEW) -> socket.socket:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {address[0]}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(data)}",
    ]
    stream = socket.create_connection(address)
    stream.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return stream


def read(stream: socket.socket) -> None:
    """Read an answer to its end, and check that it is complete."""
    answer = b"".join(iter(lambda: stream.recv(1 << 16), b""))
    stream.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    assert b"data: [DONE]" in answer, answer[-300:]
    assert answer.count(b'"text"') == NEW, answer.count(b'"text"')


def online(folder: str, prompts: Sequence[list[int]], repeat: int) -> list[float]:
    """Seconds of each run."""
    settings = {"model.path": folder, "model.load_format": "dummy", "engine.max_batch_size": len(prompts)}
    with server([f"--{key}={value}" for key, value in (settings | {"engine.max_seq_len": 512}).items()]) as url:
        where, times = urlsplit(url), []
        assert where.hostname is not None
        assert where.port is not None
        for _ in range(repeat + 1):
            began = time.perf_counter()
            for stream in [request((where.hostname, where.port), prompt) for prompt in prompts]:
                read(stream)
            times.append(time.perf_counter() - began)
    return times[1:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_loss", description=__doc__)
    parser.add_argument("--shape", choices=list(CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 8000) for _ in range(PROMPT)] for _ in range(args.streams)]
    seconds: dict[str, list[float]] = {"offline": [], "http": []}
    with tempfile.TemporaryDirectory() as made:
        folder = str(write(Path(made), CONFIGS[args.shape]))
        for _ in range(args.repeat):
            seconds["offline"] += offline(folder, prompts, 2)
            seconds["http"] += online(folder, prompts, 2)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:8}{args.streams * NEW / median:9.1f} tok/s{1e3 * median / NEW:9.2f} ms a token of each stream")
    print(f"loss    {100 * (1 - medians['offline'] / medians['http']):9.1f}%")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "shape": args.shape, "seconds": seconds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
