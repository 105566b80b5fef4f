"""Times transformers on a checkpoint: CHECKPOINT CELLS, where CELLS is JSON,
[[batch, prompt tokens, decode steps], ...]; then standard input has one of them per line."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main() -> None:
    path = sys.argv[1]
    began = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.train(False)
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    for batch, prompt, count in map(json.loads, sys.stdin):
        ids = torch.randint(3, 8000, (batch, prompt))
        start = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - start
        gaps = []
        for _ in range(count):
            start = time.perf_counter()
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            gaps.append(time.perf_counter() - start)
        report = {"batch": batch, "prompt": prompt, "prefill_s": prefill, "decode_s": statistics.median(gaps)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
