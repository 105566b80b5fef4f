"""python -m benchmarks.peers.online [--shape NAME] [--workload NAME ...] [--scale X] [--repeat N] [--json FILE]

infer's server and vLLM's on one checkpoint, in turns: the workloads of `infer bench`, at the rates that infer's
calibration finds. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import environment, installed
from benchmarks.shapes import CONFIGS, write_weights

from infer_bench.bench import WORKLOADS, machine, measure, median_run, server, table

START_S = 300


@contextmanager
def vllm(python: str, checkpoint: Path, max_seq_len: int) -> Iterator[str]:
    """Run vLLM's server with its defaults. Yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", str(max_seq_len)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment("vllm"))
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(START_S):
                try:
                    urllib.request.urlopen(f"{url}/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(1)
                if process.poll() is not None:
                    break
            else:
                process.kill()
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read().decode()[-2000:]}")
            yield url
        finally:
            process.terminate()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.online", description=__doc__)
    parser.add_argument("--shape", choices=list(CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of infer's")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter that has it")
    parser.add_argument("--checkpoint", type=Path, help="where the weights are, or are to be; default: made anew")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.vocab_size, args.seed, args.shared = CONFIGS[args.shape]["vocab_size"], 0, None
    names = args.workload or list(WORKLOADS)
    pythons = installed(["infer", "vllm"], args.python)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {peer: [] for peer in pythons} for name in names}
    rates: dict[str, float | None] = dict.fromkeys(names)
    with tempfile.TemporaryDirectory() as made:
        checkpoint = args.checkpoint or Path(made) / args.shape
        if not (checkpoint / "config.json").exists():
            write_weights(checkpoint, CONFIGS[args.shape])
        chosen = [f"model.path={checkpoint}", f"engine.max_seq_len={args.max_seq_len}", *args.set]
        settings = [f"--{item}" for item in chosen]
        for _ in range(args.repeat):
            for peer, python in pythons.items():
                with server(settings) if peer == "infer" else vllm(python, checkpoint, args.max_seq_len) as url:
                    for name in names:
                        figures, rates[name] = measure(url, name, args, rates[name])
                        runs[name][peer].append(figures)
    for name in names:
        medians = {peer: median_run(each) for peer, each in runs[name].items()}
        print(f"\n{args.shape}, {name} (scale {args.scale}, {rates[name]:.2f} requests/s)\n{table(medians)}")
        for error in sorted({error for median in medians.values() for error in median["errors"]}):
            print(f"error: {error}")
    if args.json:
        report = {"machine": machine(), "shape": args.shape, "scale": args.scale, "settings": args.set}
        args.json.write_text(json.dumps(report | {"rates": rates, "runs": runs}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
