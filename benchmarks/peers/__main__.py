"""python -m benchmarks.peers [--shape NAME] [--repeat N] [--peer NAME ...] [--python NAME=PATH ...] [--json FILE]

infer, vLLM's CPU build, llama.cpp and transformers on one checkpoint: decode steps and prefill, each engine in an
environment of its own and alone on the machine, in turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.engines import DRIVERS, PEERS, environment, installed
from benchmarks.shapes import CONFIGS, Costs, write_weights

from infer.bench import machine

CELLS = [(1, 128, 24), (4, 128, 24), (8, 128, 24), (16, 128, 24), (4, 512, 12), (1, 2048, 12), (4, 2048, 12)]
"""Sequences, prompt tokens of each, decode steps."""


def play(peer: str, python: str, checkpoint: Path, cells: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    """What one run of a driver measured: seconds by "ready", "prefill BxP" and "decode BxP"."""
    command = [python, str(DRIVERS / PEERS[peer]), str(checkpoint), json.dumps([*cells, *cells])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(peer))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        raise RuntimeError(f"{peer}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found = {"ready": float(lines[0]["ready_s"])}
    for line in lines[-len(cells) :]:  # once through warms up
        cell = f"{line['batch']}x{line['prompt']}"
        found |= {f"prefill {cell}": line["prefill_s"], f"decode {cell}": line["decode_s"]}
    return found


def ceilings() -> dict[str, float]:
    """What this machine does at best: bytes read per second, bf16 operations per second."""
    import time

    def seconds(run: Any, repeat: int) -> float:
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    values = torch.ones(1 << 28)
    n = 2048
    with torch.inference_mode():
        x, weight = (torch.randn(n, n).bfloat16() for _ in range(2))
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = seconds(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), 12)
        read = seconds(values.sum, 12)
    return {"bandwidth": values.nbytes / read, "flops": 2 * n**3 / product}


def bounds(costs: Costs, best: Mapping[str, float], cells: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    """The least time each figure could take here."""
    found = {}
    for batch, prompt, _ in cells:
        flops, nbytes = batch * costs.flops(prompt, 1), costs.decode_bytes([prompt] * batch)
        found[f"decode {batch}x{prompt}"] = max(nbytes / best["bandwidth"], flops / best["flops"])
        found[f"prefill {batch}x{prompt}"] = batch * costs.flops(0, prompt) / best["flops"]
    return found


def table(medians: Mapping[str, Mapping[str, float]], least: Mapping[str, float]) -> list[str]:
    """Milliseconds; the bound over infer's own; how many times as long as infer the others take."""
    own = medians["infer"]
    others = [peer for peer in medians if peer != "infer"]
    lines = [f"{'':18}{'infer ms':>10}{'bound':>8}" + "".join(f"{peer + ' ms':>17}{'':8}" for peer in others)]
    for figure, seconds in own.items():
        share = f"{least[figure] / seconds:.2f}" if figure in least else ""
        cells = [f"{1e3 * medians[p][figure]:17.1f}{medians[p][figure] / seconds:7.2f}x" for p in others]
        lines.append(f"{figure:18}{1e3 * seconds:10.1f}{share:>8}" + "".join(cells))
    for kind in ("decode", "prefill"):
        shown = [figure for figure in own if figure.startswith(kind)]
        means = [statistics.geometric_mean(medians[p][f] / own[f] for f in shown) for p in others]
        lines.append(f"{kind + ', mean':36}" + "".join(f"{mean:24.2f}x" for mean in means))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--shape", choices=list(CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="may be repeated; default: all")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter that has it")
    parser.add_argument("--checkpoint", type=Path, help="where the weights are, or are to be; default: made anew")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    pythons = installed(["infer", *(args.peer or PEERS)], args.python)
    with tempfile.TemporaryDirectory() as made:
        checkpoint = args.checkpoint or Path(made) / args.shape
        if not (checkpoint / "config.json").exists():
            write_weights(checkpoint, CONFIGS[args.shape])
        best = ceilings()
        least = bounds(Costs(CONFIGS[args.shape]), best, CELLS)
        runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in pythons}
        for _ in range(args.repeat):
            for peer, python in pythons.items():
                runs[peer].append(play(peer, python, checkpoint, CELLS))
    medians = {p: {f: statistics.median(run[f] for run in each) for f in each[0]} for p, each in runs.items()}
    print(f"{args.shape}, medians of {args.repeat}: reads {best['bandwidth'] / 1e9:.1f} GB/s, ", end="")
    print(f"multiplies {best['flops'] / 1e9:.0f} GFLOP/s")
    print("\n".join(table(medians, least)))
    if args.json:
        report = {"machine": machine(), "shape": args.shape, "ceilings": best, "bounds": least, "runs": runs}
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
