"""python -m benchmarks.growth [--shape NAME] [--json FILE]

How the cost of a step grows: decode with context length and with batch size, prefill with prompt length, each with a
fit of the terms that the arithmetic suggests. Writes a picture next to the JSON. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import plots
from benchmarks.shapes import CONFIGS, write
from benchmarks.steps import Steps, timed

from infer import LLM
from infer_bench.bench import machine

CONTEXTS = (128, 512, 1024, 2048, 3072, 4096)
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 3072, 4096)
SHORT = 64
NEW, REPEAT = 12, 3


def fit(
    name: str, of: str, x: Sequence[int], seconds: Sequence[float], terms: Sequence[tuple[str, Callable[[Any], Any]]]
) -> dict[str, Any]:
    """Fit the sum of the terms by least squares of relative errors."""
    n, y = np.array(x, dtype=float), np.array(seconds)
    columns = np.stack([term(n) for _, term in terms], axis=1)
    factors, *_ = np.linalg.lstsq(columns / y[:, None], np.ones_like(y), rcond=None)
    fitted = columns @ factors
    formula = " + ".join(f"{1e3 * f:.3g} ms{label}" for f, (label, _) in zip(factors, terms, strict=True))
    return {
        "name": name,
        "of": of,
        "x": list(x),
        "seconds": list(seconds),
        "fitted": fitted.tolist(),
        "formula": formula,
        "largest_error": float(np.abs(fitted / y - 1).max()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--shape", choices=list(CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    steps, longest = Steps(), max(CONTEXTS + PROMPTS) + NEW + 2
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write(Path(folder), CONFIGS[args.shape])),
            plugins=[steps],
            model={"load_format": "dummy"},
            engine={"max_batch_size": max(BATCHES), "max_seq_len": longest, "prefill_chunk_size": longest},
            cache={"paged": {"prefix_caching": False}},
        )
    with llm:
        draw = random.Random(0)

        def median(batch: int, prompt: int) -> tuple[float, float]:
            runs = [timed(llm, steps, draw, batch, prompt, NEW) for _ in range(REPEAT + 1)]
            prefill, decode = zip(*runs[1:], strict=True)  # the first run of a size takes longer
            return statistics.median(prefill), statistics.median(decode)

        of_context = [median(1, n)[1] for n in CONTEXTS]
        of_batch = [median(n, SHORT)[1] for n in BATCHES]
        of_prompt = [median(1, n)[0] for n in PROMPTS]

    def one(n: Any) -> Any:
        return np.ones_like(n)

    def same(n: Any) -> Any:
        return n

    panels = [
        fit("decode, one sequence", "context", CONTEXTS, of_context, [("", one), (" n", same)]),
        fit(f"decode after {SHORT} tokens", "batch", BATCHES, of_batch, [("", one), (" n", same)]),
        fit("prefill, one sequence", "prompt", PROMPTS, of_prompt, [("", one), (" n", same), (" n^2", np.square)]),
    ]
    for panel in panels:
        print(f"{panel['name']} of {panel['of']} n: {panel['formula']} (within {100 * panel['largest_error']:.0f}%)")
        for x, seconds, fitted in zip(panel["x"], panel["seconds"], panel["fitted"], strict=True):
            print(f"{x:8}{1e3 * seconds:10.2f} ms{1e3 * fitted:10.2f} fitted")
    if args.json:
        report = {"machine": machine(), "shape": args.shape, "panels": panels}
        args.json.write_text(json.dumps(report, indent=1))
        plots.growth(report, args.json.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
