"""python -m benchmarks.simulated [--model MODEL] [--fit SECONDS] [--scale SCALE] [--json FILE] [--key.of.setting value]

What ``infer simulate`` says beside what ``infer bench`` measures, at the same rates. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infer_bench.bench import WORKLOADS, aligned, machine

FIGURES = (
    ("output tok/s", ("output_tok_s",)),
    ("TTFT p50 ms", ("ttft_ms", "p50")),
    ("TTFT p99 ms", ("ttft_ms", "p99")),
    ("ITL p50 ms", ("itl_ms", "p50")),
    ("ITL p99 ms", ("itl_ms", "p99")),
    ("latency p50 ms", ("latency_ms", "p50")),
)


def figure(figures: Mapping[str, Any], path: Sequence[str]) -> float:
    found: Any = figures
    for key in path:
        found = found[key]
    return float(found)


def infer(*argv: str) -> dict[str, Any]:
    """What a command writes as JSON."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "infer.commands.cli", *argv, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--fit", default="30", metavar="SECONDS")
    parser.add_argument("--scale", default="1")
    parser.add_argument("--json", type=Path)
    args, settings = parser.parse_known_args(argv)
    common = ["--model", args.model, "--scale", args.scale, "--log.level", "warning", *settings]
    rows = [["", "measured", "simulated", "off by"]]
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        costs = str(Path(folder) / "costs.toml")
        one = ["--workload", "baseline", "--costs", costs]
        fitted = infer("simulate", *common, *one, "--fit", args.fit)["costs"]
        for name in WORKLOADS:
            measured = infer("bench", *common, "--workload", name)["workloads"][name]
            rate, play = measured["rate"], ["--workload", name, "--costs", costs]
            simulated = infer("simulate", *common, *play, "--rate", str(rate))["workloads"][name]["runs"]["as set"]
            found[name] = {"rate": rate, "measured": measured["median"]["as set"], "simulated": simulated}
            rows.append([name, "", "", ""])
            for title, path in FIGURES:
                a, b = (figure(found[name][kind], path) for kind in ("measured", "simulated"))
                rows.append([f"  {title}", f"{a:.1f}", f"{b:.1f}", f"{100 * (b / a - 1):+.0f} %"])
    print(f"fitted to {fitted['passes']} passes, half of them within {100 * fitted['error']:.0f} %")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n{aligned(rows)}")
    if args.json:
        report = {"machine": machine(), "load": os.getloadavg(), "costs": fitted, "workloads": found}
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
