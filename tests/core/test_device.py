"""Memory of the host."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from infer.device import blocks_given_back


def resident() -> int:
    (found,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found) << 10


def test_blocks_of_a_small_experts_size_are_given_back_while_others_stay() -> None:
    with blocks_given_back():
        before = resident()
        blocks = [torch.ones(768 << 10, dtype=torch.uint8) for _ in range(256)]
        full = resident() - before
        blocks = blocks[::8]
        assert full > 180 << 20
        assert resident() - before < full // 4
        assert len(blocks) == 32
