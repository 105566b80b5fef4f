"""python -m benchmarks.overhead [--json FILE]

What a decode step costs in addition to the model: the scheduler, the cache's block manager, the batch's arrays,
sampling, text and events. Measured with a model that computes nothing, and again with one that computes a matrix
product, which evicts the engine's data from the CPU's caches. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from infer import LLM, SamplingParams, hookimpl
from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext, ModelRegistration, Pass
from infer.contracts.records import StepRecord
from infer.weight import Weight
from infer_bench.bench import machine

LIMITS = {1: None, 64: 150, 256: 500}
"""How many microseconds a step may cost, by its number of sequences."""
PROMPT, NEW = 128, 100
SIZE = 1024
"""The size of the square product, which takes some milliseconds."""
VOCABULARY = 4096
REPEAT = 5


class Nothing:
    """A ModelProtocol that computes nothing, or only a product if there is a ``weight``. All sequences get the same
    tokens."""

    weight: Tensor | None = None
    busy: ClassVar[list[float]] = []
    """Seconds of each product."""

    def __init__(self, context: ModelContext) -> None:
        self.attention = [AttentionSpec(1, 1, 16, 1.0)]
        self.vocab_size = VOCABULARY
        self._hidden = torch.zeros(PROMPT * max(LIMITS), 1)
        self._logits = torch.rand(max(LIMITS), VOCABULARY).to(context.dtype)

    def forward(self, batch: Pass) -> Tensor:
        return self._hidden[: len(batch.token_ids_T if batch.rows_N is None else batch.rows_N)]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        began = time.thread_time()
        if Nothing.weight is not None:
            torch.mm(Nothing.weight, Nothing.weight)
        self.busy.append(time.thread_time() - began)
        return self._logits[: len(hidden_ND)]

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        assert not list(tensors)


class Plugin:
    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.at: list[tuple[int, float]] = []
        """Per step: how many sequences decoded (0 for other steps), and the thread's CPU time at its end, in
        seconds."""

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self.at.append((len(record.work) if record.work[0].kind == "decode" else 0, time.thread_time()))

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        def make(config: Mapping[str, Any], context: ModelContext, settings: Any) -> Nothing:
            return Nothing(context)

        return [ModelRegistration("nothing", make, "computes nothing", architectures=("NothingForCausalLM",))]


def microseconds(llm: LLM, plugin: Plugin, batch: int, params: SamplingParams) -> float:
    """The engine thread's median CPU time, in microseconds, from one step of ``batch`` decodes to the next, without the
    product's."""
    plugin.at.clear()
    Nothing.busy.clear()
    llm.generate([[5 + i % 500] * PROMPT for i in range(batch)], params)
    steps = zip(pairwise(plugin.at), Nothing.busy[-len(plugin.at) + 1 :], strict=True)
    return 1e6 * statistics.median(b[1] - a[1] - product for (a, b), product in steps if a[0] == b[0] == batch)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--tokenizer", default="plugins/demo/src/infer_demo/checkpoint/tokenizer.json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    drawn = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=NEW, ignore_eos=True)
    kinds = {
        "greedy": (greedy, None),
        "drawn": (drawn, None),
        "after a product": (greedy, torch.rand(SIZE, SIZE)),
    }
    config = {"architectures": ["NothingForCausalLM"], "max_position_embeddings": 1024, "torch_dtype": "bfloat16"}
    plugin, found = Plugin(), {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder,
            plugins=[plugin],
            model={"load_format": "dummy", "tokenizer": args.tokenizer},
            engine={"max_batch_size": max(LIMITS)},
        )
    with llm:
        print("us per step" + "".join(f"{kind:>17}" for kind in kinds) + f"{'limit':>8}")
        for batch, limit in LIMITS.items():
            for kind, (params, Nothing.weight) in kinds.items():
                found[f"{kind} {batch}"] = [microseconds(llm, plugin, batch, params) for _ in range(REPEAT)]
            medians = [statistics.median(found[f"{kind} {batch}"]) for kind in kinds]
            print(f"{batch:11}" + "".join(f"{m:17.0f}" for m in medians) + f"{limit or '':>8}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "limits_us": LIMITS, "us_per_step": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
