"""python -m benchmarks.overhead [--json FILE]

What a decode step costs besides the model: the scheduler, the cache's books, the batch's arrays, sampling, text and
events, on a model that computes nothing. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.steps import Steps, decode_gaps
from torch import Tensor

from infer import LLM, SamplingParams, hookimpl
from infer.bench import machine
from infer.hookspecs import ModelRegistration
from infer.protocols import AttentionSpec, KVCacheView, ModelContext

LIMITS = {1: None, 64: 150, 256: 500}
"""Microseconds that a step of so many sequences may cost."""
PROMPT, NEW, WARM_UP = 128, 200, 20
VOCABULARY = 1024
REPEAT = 5


class Nothing:
    """A ModelProtocol without a layer's work: the same tokens for everyone."""

    def __init__(self, context: ModelContext) -> None:
        self.attention: Sequence[AttentionSpec] = [AttentionSpec(1, 1, 16, 1.0)]
        self.vocab_size = VOCABULARY
        self._hidden = torch.zeros(PROMPT * max(LIMITS), 1)
        self._logits = torch.rand(max(LIMITS), VOCABULARY).to(context.dtype)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, cache: KVCacheView, rows_N: Tensor | None = None
    ) -> Tensor:
        return self._hidden[: len(token_ids_T if rows_N is None else rows_N)]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._logits[: len(hidden_ND)]

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        assert not list(tensors)


class Plugin:
    INFER_PLUGIN_API = 1

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        def make(config: Mapping[str, Any], context: ModelContext, settings: Any) -> Nothing:
            return Nothing(context)

        return [ModelRegistration("nothing", make, "computes nothing", architectures=("NothingForCausalLM",))]


def microseconds(llm: LLM, steps: Steps, batch: int, params: SamplingParams) -> float:
    """From one step to the next, the median."""
    steps.records.clear()
    llm.generate([[5 + i % 500] * PROMPT for i in range(batch)], params)
    time.sleep(0.05)  # the last step is told after its events
    return 1e6 * statistics.median(decode_gaps(steps, batch)[WARM_UP:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--tokenizer", default="plugins/demo/src/infer_demo/checkpoint/tokenizer.json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        "sampled": SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=NEW, ignore_eos=True),
    }
    config = {"architectures": ["NothingForCausalLM"], "max_position_embeddings": 1024, "torch_dtype": "bfloat16"}
    steps, found = Steps(), {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder,
            plugins=[steps, Plugin()],
            model={"load_format": "dummy", "tokenizer": args.tokenizer},
            engine={"max_batch_size": max(LIMITS)},
        )
    with llm:
        print(f"{'sequences':>9}" + "".join(f"{kind + ', us':>14}" for kind in kinds) + f"{'limit':>8}")
        for batch, limit in LIMITS.items():
            for kind, params in kinds.items():
                times = [microseconds(llm, steps, batch, params) for _ in range(REPEAT)]
                found[f"{kind} {batch}"] = times
            medians = [statistics.median(found[f"{kind} {batch}"]) for kind in kinds]
            print(f"{batch:9}" + "".join(f"{m:14.0f}" for m in medians) + f"{limit or '':>8}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "limits_us": LIMITS, "us_per_step": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
