"""How much memory a process holds at most while it loads a quantized model and serves it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import shapes

SHAPE = {
    **shapes.CONFIGS["Llama-3.2-1B"],
    "vocab_size": 64_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
}
PROGRAM = """
import re, sys
from pathlib import Path
from infer import LLM, SamplingParams

settings = {"model": {"quantization": "int4"}, "engine": {"max_batch_size": 2, "max_seq_len": 1024}}
with LLM(sys.argv[1], **settings) as llm:
    llm.generate([[*range(1000)]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    positions = llm.served.cache_tokens
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(int(peak[1]) << 10, positions)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_int4(tmp_path: Path) -> None:
    """The file has 370 MB, and its codes and scales 132."""
    folder = shapes.write_weights(tmp_path / "model", SHAPE)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], check=True, capture_output=True, text=True)
    peak, positions = map(int, done.stdout.split())
    costs = shapes.Costs(SHAPE)
    weights = costs.layer_weights * (4 + 16 / 32) / 8 + costs.head_weights * (8 + 16 / 64) / 8
    cache = positions * costs.num_hidden_layers * 2 * costs.num_key_value_heads * costs.head_dim * 2
    assert cache < 100e6
    assert peak <= 1.15 * (weights + cache) + 0.42e9, (peak, weights, cache)  # the process itself takes 0.3 to 0.36
