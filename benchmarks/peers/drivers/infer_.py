"""Times infer on a checkpoint: CHECKPOINT CELLS [QUANTIZATION [FAMILY]], where CELLS is JSON,
[[batch, prompt tokens, decode steps], ...]; then standard input has one of them per line."""

from __future__ import annotations

import json
import random
import resource
import sys
import time

from benchmarks.steps import Steps, timed

from infer import LLM


def main() -> None:
    path, cells = sys.argv[1], json.loads(sys.argv[2])
    began = time.perf_counter()
    steps, draw = Steps(), random.Random(0)
    longest = max(prompt + 64 for _, prompt, _ in cells)
    engine = {"max_batch_size": max(batch for batch, _, _ in cells), "max_seq_len": longest}
    chunk = {"prefill_chunk_size": 2048, "max_tokens_per_step": 2048}
    given = {"quantization": "none", "family": "auto"} | dict(
        zip(("quantization", "family"), sys.argv[3:], strict=False)
    )
    model = {key: value for key, value in given.items() if value != "none"}
    with LLM(
        path, plugins=[steps], model=model, engine=engine | chunk, cache={"paged": {"prefix_caching": False}}
    ) as llm:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"ready_s": time.perf_counter() - began, "peak_bytes": peak}), flush=True)
        for batch, prompt, count in map(json.loads, sys.stdin):
            prefill, decode = timed(llm, steps, draw, batch, prompt, count)
            report = {"batch": batch, "prompt": prompt, "prefill_s": prefill, "decode_s": decode}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
