"""Times vLLM on a CPU: CHECKPOINT CELLS [FORMAT], where CELLS is JSON,
[[batch, prompt tokens, decode steps], ...]; then standard input has one of them per line. With a FORMAT (AWQ, W8A8), a
quantized copy of the checkpoint is made first."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path

from benchmarks.peers.drivers.quantized import quantized
from vllm import LLM, SamplingParams


def main() -> None:
    path, cells = sys.argv[1], json.loads(sys.argv[2])
    if sys.argv[3:]:
        path = str(quantized(Path(path), sys.argv[3]))
    began = time.perf_counter()
    llm = LLM(
        path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(prompt + 64 for _, prompt, _ in cells),
        max_num_batched_tokens=2048 + 16,
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    draw, engine, name = random.Random(0), llm.llm_engine, 0
    for batch, prompt, count in map(json.loads, sys.stdin):
        params = SamplingParams(temperature=0, max_tokens=count + 2 * batch, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        for _ in range(batch):
            ids = [draw.randrange(3, 8000) for _ in range(prompt)]
            engine.add_request(str(name), {"prompt_token_ids": ids}, params)
            name += 1
        times: list[tuple[float, bool, bool]] = []
        seen: dict[str, int] = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            grown = [o for o in outputs if len(o.outputs[0].token_ids) > seen.get(o.request_id, 0)]
            seen |= {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
            decodes = len(grown) == batch and all(len(o.outputs[0].token_ids) > 1 for o in grown)
            times.append((now, decodes, len(seen) == batch))
        first = next(now for now, _, begun in times if begun)
        pairs = itertools.pairwise(times)
        gaps = [b[0] - a[0] for a, b in pairs if b[1] and a[2]]
        report = {"batch": batch, "prompt": prompt, "prefill_s": first - start, "decode_s": statistics.median(gaps)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
