"""GPU_DRY_RUN=1 runs the GPU tests and benchmarks at tiny sizes on the CPU, which tests the scripts, not the GPU."""

from __future__ import annotations

import os

import torch
from benchmarks.shapes import CONFIGS

DRY = os.environ.get("GPU_DRY_RUN") == "1"
DEVICE = torch.device("cpu" if DRY else "cuda")
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHAPES = {name: dict(config) | (TINY if DRY else {}) for name, config in CONFIGS.items()}
