"""Serve mixed traffic and print, as JSON, what variants a first, short request compiled and which came later.

The engine computes with the reference kernels; what the Triton provider would launch beside them is only written down.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from tests.kernels_triton.compile_kernels import make, recording
from tests.support import (
    CONFIGS,
    CPU,
    Recorder,
    build_model,
    make_engine,
    paged_pool,
    random_prompt,
)

from infer.engine.graphs import DecodeGraphs
from infer.kernels.reference import ReferenceKernels

MAX_BATCH = 4
LAUNCHED = {"linear", "rms_norm", "add_rms_norm", "rope_store_kv", "gated", "extend_attention", "sample"}


class Both(ReferenceKernels):
    """The reference's results, after the Triton provider has been asked as well."""

    def __init__(self, launching: Any) -> None:
        self._launching = launching

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in LAUNCHED:
            return method

        def call(*args: Any) -> Any:
            getattr(self._launching, name)(*args)
            return method(*args)

        return call

    def pack(self, *args: Any) -> Any:
        self._launching.pack(*args)
        return super().pack(*args)


def main() -> None:
    torch.set_num_threads(1)
    report = {}
    for family, recorded in (("qwen3", False), ("gemma3", True)):
        with recording(90) as found:
            kernels = Both(make(90))
            model = build_model(CONFIGS[family], torch.bfloat16, kernels)
            pool = paged_pool(model, torch.bfloat16, MAX_BATCH, max_chunk=48, spare=2)
            pool.storage.kernels = kernels
            graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, Recorder()) if recorded else None
            keys: dict[str, Any] = {"max_batch_size": MAX_BATCH, "prefill_chunk_size": 48}
            stepper = make_engine(model, torch.bfloat16, pool=pool, kernels=kernels, graphs=graphs, **keys)
            stepper.submit(random_prompt(3), "first", max_tokens=2, temperature=0.0)
            stepper.run()
            start = {launched.key: launched.source.name for launched in found}
            begun = len(found)
            stepper.submit(random_prompt(270), "long", max_tokens=45, temperature=0.0)
            while len(stepper.tokens("long") if "long" in stepper.events else []) < 2:
                stepper.engine.step()
            for i, length in enumerate([1, 16, 17, 64, 65, 130, 3, 32]):
                stepper.submit(
                    random_prompt(length, seed=i),
                    str(i),
                    max_tokens=20 + 7 * i % 23,
                    temperature=float(i % 3 > 0),
                    top_p=0.9 if i % 2 else 1.0,
                    logprobs=2 if i % 4 == 0 else None,
                    prompt_logprobs=1 if i % 5 == 0 else None,
                    presence_penalty=0.5 * (i % 6 == 1),
                    seed=i,
                )
            stepper.run()
            later = {launched.key: str(launched) for launched in found[begun:]}
            report[family] = {
                "start": sorted(start.values()),
                "launches": len(found) - begun,
                "later": [what for key, what in later.items() if key not in start],
                "preempted": sum(record.preemptions for record in stepper.finished),
                "split": sum(launched.given.get("SPLIT", False) for launched in found[begun:]),
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
