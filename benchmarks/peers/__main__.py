"""python -m benchmarks.peers [--shape NAME] [--repeat N] [--peer NAME ...] [--python NAME=PATH ...] [--cell BxP ...]
    [--busy N ...] [--json FILE]

infer, vLLM's CPU build, llama.cpp and transformers on one checkpoint: decode steps and prefill, each engine in an
environment and a process of its own, idle while another has its turn. With --busy, beside so many processes that do
nothing but keep a core busy. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks import plots
from benchmarks.peers.engines import DRIVERS, PEERS, USUAL, engine_of, environment, installed
from benchmarks.shapes import CONFIGS, Costs, write_weights

from infer.device import zeros
from infer_bench.bench import machine

Cell = tuple[int, int, int]
"""(sequences, prompt tokens of each, decode steps)."""
SHORT, LONG = 24, 12
CELLS: list[Cell] = [(1, 128, SHORT), (4, 128, SHORT), (8, 128, SHORT), (16, 128, SHORT)]
CELLS += [(4, 512, LONG), (1, 2048, LONG), (4, 2048, LONG)]


class Peer:
    """An engine in a process of its own, which is idle except in ``run``. So engines can take turns cell by cell, and
    whatever else happens on the machine affects all of them."""

    def __init__(self, name: str, python: str, checkpoint: Path, cells: Sequence[Cell]) -> None:
        self._name = name
        self._command = [python, str(DRIVERS / PEERS[name][0]), str(checkpoint), json.dumps(cells), *PEERS[name][1:]]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environment(name)
        )
        self.ready_s = self._read()["ready_s"]

    def run(self, cell: Cell) -> dict[str, float]:
        """Measure one cell. Returns seconds by "prefill BxP" and "decode BxP"."""
        assert self._process.stdin is not None
        print(json.dumps(cell), file=self._process.stdin, flush=True)
        found, title = self._read(), f"{cell[0]}x{cell[1]}"
        return {f"prefill {title}": found["prefill_s"], f"decode {title}": found["decode_s"]}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # engines print lines of their own, too
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        self._process.wait()
        self._log.seek(0)
        why = self._log.read().decode()[-2000:]
        raise RuntimeError(f"{self._name}: {' '.join(self._command)} failed:\n{why}")


@contextmanager
def neighbors(count: int) -> Iterator[None]:
    """Run ``count`` busy processes meanwhile, each of which would take a whole core."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Ceilings:
    """What this machine can do at best: bytes read, bf16 operations and int8 operations per second."""

    def __init__(self) -> None:
        self._values = zeros((1 << 28,), torch.float32, torch.device("cpu"))
        self._values.fill_(1.0)
        self._x, weight = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
        self._codes_x, codes = torch.ones(2048, 2048, dtype=torch.uint8), torch.ones(2048, 2048, dtype=torch.int8)
        self._codes = torch.ops.onednn.qlinear_prepack(codes, [2048, 2048])
        self._scales, self._zeros = torch.ones(2048), torch.zeros(2048, dtype=torch.int64)
        with torch.inference_mode():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        product = _seconds(lambda: torch.ops.mkldnn._linear_pointwise(self._x, self._packed, None, "none", [], ""), 9)
        x = (self._codes_x, 1.0, 0)
        out: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
        weight = (self._codes, self._scales, self._zeros, None)
        codes = _seconds(lambda: torch.ops.onednn.qlinear_pointwise(*x, *weight, *out), 9)
        bandwidth = self._values.nbytes / _seconds(self._values.sum, 9)
        return {"bandwidth": bandwidth, "flops": 2 * 2048**3 / product, "int8 flops": 2 * 2048**3 / codes}


def _seconds(run: Any, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bounds(costs: Costs, best: Mapping[str, float], cells: Sequence[Cell]) -> dict[str, float]:
    """The least time, in seconds, that each figure could take on this machine: of quantized weights, with all
    operations at the rate of int8."""
    found, rate = {}, best["flops" if costs.quantization == "none" else "int8 flops"]
    for batch, prompt, _ in cells:
        flops, nbytes = batch * costs.flops(prompt, 1), costs.decode_bytes([prompt] * batch)
        found[f"decode {batch}x{prompt}"] = max(nbytes / best["bandwidth"], flops / rate)
        found[f"prefill {batch}x{prompt}"] = batch * costs.flops(0, prompt) / rate
    return found


def table(medians: Mapping[str, Mapping[str, float]], least: Mapping[str, float], base: str = "infer") -> list[str]:
    """Milliseconds of ``base``, the bound divided by them, and how many times as long the others take."""
    own = medians[base]
    others = [peer for peer in medians if peer != base]
    lines = [f"{'':20}{base + ' ms':>14}{'bound':>8}" + "".join(f"{peer + ' ms':>22}{'':8}" for peer in others)]
    for figure, seconds in own.items():
        share = f"{least[figure] / seconds:.2f}" if figure in least else ""
        cells = [f"{1e3 * medians[p][figure]:22.1f}{medians[p][figure] / seconds:7.2f}x" for p in others]
        lines.append(f"{figure:24}{1e3 * seconds:10.1f}{share:>8}" + "".join(cells))
    for kind in ("decode", "prefill"):
        shown = [figure for figure in own if figure.startswith(kind)]
        means = [statistics.geometric_mean(medians[p][f] / own[f] for f in shown) for p in others]
        lines.append(f"{kind + ', mean':42}" + "".join(f"{mean:29.2f}x" for mean in means))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--shape", choices=list(CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--peer", action="append", choices=list(PEERS), help=f"may be repeated; default: {', '.join(USUAL)}"
    )
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter that has it")
    parser.add_argument("--checkpoint", type=Path, help="where the weights are, or are to be; default: made anew")
    names = [f"{batch}x{prompt}" for batch, prompt, _ in CELLS]
    parser.add_argument("--cell", action="append", choices=names, help="may be repeated; default: all")
    parser.add_argument("--busy", action="append", type=int, help="busy processes beside; may be repeated; default: 0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    cells = [cell for cell, name in zip(CELLS, names, strict=True) if name in (args.cell or names)]
    pythons = installed(args.peer or list(USUAL), args.python)
    if not pythons:
        return 2
    with tempfile.TemporaryDirectory() as made:
        checkpoint = args.checkpoint or Path(made) / args.shape
        if not (checkpoint / "config.json").exists():
            write_weights(checkpoint, CONFIGS[args.shape])
        engines = {peer: Peer(peer, python, checkpoint, cells) for peer, python in pythons.items()}
        ceilings, reached = Ceilings(), []
        runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in engines}
        for turn in range(args.repeat + 1):  # the first warms up
            reached.append(ceilings.run())
            found: dict[str, dict[str, float]] = {peer: {} for peer in engines}
            order = [*engines.items()][:: -1 if turn % 2 else 1]  # whoever is first after a pause is slower
            for cell, busy in itertools.product(cells, args.busy or [0]):
                beside = f" beside {busy}" if busy else ""
                with neighbors(busy):
                    for peer, engine in order:
                        found[peer] |= {figure + beside: s for figure, s in engine.run(cell).items()}
            if turn:
                for peer, figures in found.items():
                    runs[peer].append(figures)
                report = _report(args.shape, engines, cells, reached, runs)
                if args.json:  # after every turn, so that whoever interrupts this keeps those that are done
                    args.json.write_text(json.dumps(report, indent=1))
        for engine in engines.values():
            engine.close()
    medians = {p: {f: statistics.median(run[f] for run in each) for f in each[0]} for p, each in runs.items()}
    best = _best(reached)
    print(f"{args.shape}, medians of {args.repeat}: reads {best['bandwidth'] / 1e9:.1f} GB/s, ", end="")
    print(f"multiplies {best['flops'] / 1e9:.0f} GFLOP/s, of int8 {best['int8 flops'] / 1e9:.0f}")
    print("ready: " + ", ".join(f"{peer} {seconds:.1f} s" for peer, seconds in report["ready_s"].items()))
    for base, shares in report["bounds"].items():
        print("\n".join(["", *table(medians, shares, base)]))
    if args.json:
        plots.peers(report, medians, args.json.with_suffix(".svg"))
    return 0


def _best(reached: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in reached) for name in reached[0]}


def _report(
    shape: str,
    engines: Mapping[str, Peer],
    cells: Sequence[Cell],
    reached: Sequence[Mapping[str, float]],
    runs: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Any]:
    quantized = {peer: (*PEERS[peer], "none")[1] for peer in engines if engine_of(peer) == "infer"}
    least = {peer: bounds(Costs(CONFIGS[shape], how), _best(reached), cells) for peer, how in quantized.items()}
    ready = {peer: engine.ready_s for peer, engine in engines.items()}
    described = {"machine": machine(), "shape": shape, "ready_s": ready, "ceilings": reached}
    return {**described, "bounds": least, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
