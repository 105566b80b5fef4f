"""python -m benchmarks.additions [--shape NAME] [--rank R ...] [--adapters N] [--disk] [--rows N] [--rounds N]
[--quantization WHAT] [--json FILE]

What a decode step costs with adapters, or with a cache that is kept on disk, beside what it costs without: engines of
the same model take turns. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.shapes import CONFIGS, expected, write
from benchmarks.watched import CLOCKS, Clock, interval
from safetensors.torch import save_file

from infer import LLM, SamplingParams
from infer.contracts.request import Event
from infer_bench.bench import machine

PROMPT, NEW = 8, 12


class Kind(NamedTuple):
    """An engine, its clock, and the adapters that its requests ask for in turns, if they ask for any."""

    llm: LLM
    clock: Clock
    adapters: Sequence[str | None] = (None,)


def write_adapter(folder: Path, config: Mapping[str, Any], rank: int) -> Path:
    """An adapter of that rank, with random factors, of all linear layers but those of experts, as PEFT saves it."""
    folder.mkdir()
    factors = {}
    for name, shape in expected(config).items():
        path, _, kind = name.rpartition(".")
        if path.endswith("_proj") and kind == "weight" and ".experts." not in path:
            for factor, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                factors[f"base_model.model.{path}.lora_{factor}.weight"] = 0.01 * torch.randn(
                    size, dtype=torch.bfloat16
                )
    save_file(factors, folder / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 3)[1] for name in factors})
    made = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(made))
    return folder


def turn(kind: Kind, rows: int, draw: random.Random) -> list[float]:
    """The median cost of a step that decodes so many rows, in µs by each clock."""
    kind.clock.steps.clear()
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    prompts = [[draw.randrange(3, 4000) for _ in range(PROMPT)] for _ in range(rows)]
    wanted = [kind.adapters[i % len(kind.adapters)] for i in range(rows)]
    asked = [kind.llm.request(prompt, params, adapter=one) for prompt, one in zip(prompts, wanted, strict=True)]
    events: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    left = kind.llm.loop.submit_all(asked, events.put)  # together, so that all are decoded in the same steps
    while left:
        left -= sum(event.finish_reason is not None for event in events.get())
    steps = [(a, b) for a, b in pairwise(kind.clock.steps) if a[0] == b[0] == rows]
    return [statistics.median((b[i] - a[i]) / 1e3 for a, b in steps) for i in range(1, 1 + len(CLOCKS))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.additions", description=__doc__)
    parser.add_argument("--shape", choices=["demo", *CONFIGS], default="Qwen3-0.6B")
    parser.add_argument("--rank", type=int, nargs="*", default=[], help="ranks of adapters to try, each by itself")
    parser.add_argument("--adapters", type=int, default=8, help="how many adapters a batch has")
    parser.add_argument("--disk", action="store_true", help="try cache.paged.disk")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    draw, kinds = random.Random(0), dict[str, Kind]()
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = CONFIGS.get(args.shape, {})
        path = str(write(made / "base", config)) if config else "demo"
        model = {"load_format": "dummy", "quantization": args.quantization} if config else {}
        engine = {"max_batch_size": args.rows, "max_seq_len": 256}

        def add(name: str, asked: Sequence[str | None] = (None,), **how: Any) -> None:
            clock = Clock(1)
            llm = LLM(path, plugins=[clock], model=model, engine=engine, **how)
            kinds[name] = Kind(stack.enter_context(llm), clock, asked)

        add("base")
        for rank in args.rank:
            folder = write_adapter(made / f"rank {rank}", config, rank)
            names = [f"a{i}" for i in range(args.adapters)]
            loaded = {"load": [f"{name}={folder}" for name in names], "max_loaded": len(names), "max_rank": rank}
            add(f"rank {rank}", names, adapters=loaded)
        if args.disk:
            add("disk", cache={"paged": {"disk": str(made / "disk")}})
        rounds = []
        for _ in range(args.rounds + 1):
            order = [*kinds]
            draw.shuffle(order)
            rounds.append({name: turn(kinds[name], args.rows, draw) for name in order})
    report: dict[str, Any] = {"machine": machine(), "shape": args.shape, "rows": args.rows, "rounds": rounds[1:]}
    print(f"{args.rounds} rounds{'clock':>16}{'base, µs':>12}{'µs a step':>12}{'speed':>9}{'95 % of that':>18}")
    for name in [*kinds][1:]:
        for i, clock in enumerate(CLOCKS):
            pairs = [(each["base"][i], each[name][i]) for each in report["rounds"]]
            base, own = (statistics.median(column) for column in zip(*pairs, strict=True))
            speeds = [a / b for a, b in pairs]
            low, high = interval(speeds)
            found = f"{base:12.0f}{own:12.0f}{statistics.median(speeds):9.3f}{low:9.3f} to {high:.3f}"
            print(f"{name:10}{clock:>15}{found}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
