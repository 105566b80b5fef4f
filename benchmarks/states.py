"""What states take in prefill: the time of convolution, delta rule and gated norm as a share of that of the products of
the same layers. Four layers of a shape with gated delta nets, three of which keep a state; weights do not matter."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import CONFIGS, Costs, write

from infer import LLM, SamplingParams
from infer_kernels_cpu.provider import CpuKernels

STATES = ("causal_conv", "gated_delta_rule", "gated_rms_norm")
PRODUCTS = ("linear", "gated_linear")
SHAPES = [name for name, config in CONFIGS.items() if Costs(config).delta_shapes]
SMALL = {"num_hidden_layers": 4, "vocab_size": 4096}


def watch(seconds: dict[str, float]) -> None:
    """Count the seconds of each kernel."""

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*given, **more)
            finally:
                seconds[name] += time.perf_counter() - begin

        return call

    for name in (*STATES, *PRODUCTS):
        setattr(CpuKernels, name, timed(name, getattr(CpuKernels, name)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.states", description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--quantization", nargs="+", choices=("none", "int8", "int4"), default=["none", "int4"])
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    seconds: dict[str, float] = defaultdict(float)
    watch(seconds)
    print(f"{'shape':14}{'weights':>8}{'state us':>10}{'products us':>13}{'share':>8}   per token and layer")
    for shape in args.shape:
        config = {**CONFIGS[shape], **SMALL}
        costs = Costs(config)
        delta = 3 * (sum(n * k for n, k in costs.delta_shapes.values()))
        delta += 3 * sum(n * k for n, k in (costs.linear_shapes["gate_up"], costs.linear_shapes["down"]))
        part = delta / costs.layer_weights
        for quantization in args.quantization:
            with tempfile.TemporaryDirectory() as made:
                llm = LLM(
                    str(write(Path(made), config)),
                    model={"load_format": "dummy", "quantization": quantization},
                    cache={"paged": {"prefix_caching": False}},
                    engine={"max_batch_size": 1, "max_seq_len": args.prompt + 1, "prefill_chunk_size": args.prompt},
                    kernels={"backend": "cpu"},
                )
                with llm:
                    found = []
                    for _ in range(args.repeat + 1):
                        seconds.clear()
                        llm.generate([[*range(args.prompt)]], SamplingParams(temperature=0, max_tokens=1))
                        states = sum(seconds[name] for name in STATES)
                        found.append((states, part * sum(seconds[name] for name in PRODUCTS)))
            each = [1e6 * statistics.median(column) / args.prompt / 3 for column in zip(*found[1:], strict=True)]
            share = statistics.median(states / products for states, products in found[1:])
            print(f"{shape:14}{quantization:>8}{each[0]:10.1f}{each[1]:13.1f}{share:8.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
