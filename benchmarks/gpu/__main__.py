"""python -m benchmarks.gpu [--only kernels|models] [--shape NAME ...] [--products exact|vendor]
[--quantization none|int8|int4] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import kernels, models
from benchmarks.gpu.dry import DRY, SHAPES
from benchmarks.gpu.timing import Ceilings

from infer_bench.bench import machine


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table."""
    cells = [list(rows[0])] + [[_cell(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Kernels and models on this GPU.")
    parser.add_argument("--only", choices=["kernels", "models"])
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="may be repeated; default: all")
    parser.add_argument("--products", choices=["exact", "vendor"], help="of the models; default: both")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none", help="of the models")
    parser.add_argument("--json", type=Path, help="write all figures here, as they come")
    args = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no GPU here.", file=sys.stderr)
        return 1
    ceilings = Ceilings.measure()
    import triton

    device = {
        "gpu": "none" if DRY else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
    report: dict[str, Any] = {"machine": machine() | device, "ceilings": asdict(ceilings), "kernels": {}, "models": {}}
    print(f"{device['gpu']}: {ceilings.bandwidth / 1e9:.0f} GB/s, {ceilings.flops / 1e12:.0f} TFLOP/s in bf16")

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))

    for name in args.shape or SHAPES:
        config = SHAPES[name]
        if args.only != "models":
            lines: list[dict[str, Any]] = []
            report["kernels"][name] = lines
            print(f"\n{name}: kernels")
            for line in kernels.measure(config, ceilings):
                if not lines:
                    print(*line, sep="  ")
                lines.append(line)
                print(*map(_cell, line.values()), sep="  ", flush=True)
                save()
        if args.only != "kernels":
            report["models"][name] = found = {}
            for exact in (True, False) if args.products is None else (args.products == "exact",):
                figures = found["exact" if exact else "vendor's products"] = models.measure(
                    config, ceilings, exact, args.quantization
                )
                products = "row-exact" if exact else "the vendor's"
                print(f"\n{name}, {args.quantization}: {products} products; exact: {figures['exact']}; ", end="")
                print(f"ready in {figures['ready s']:.1f} s")
                show(figures["decode"])
                show(figures["busy"])
                show([figures["offline"]])
                save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
