"""Memory of the host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from infer.device import blocks_given_back, free_memory


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


def test_memory_is_as_much_as_the_tightest_control_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the process's own group and those it lies in; what they hold of files can be dropped."""
    own = tmp_path / "system.slice" / "infer.service"
    own.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/system.slice/infer.service\n")
    monkeypatch.setattr("infer.device.CGROUPS", tmp_path)
    monkeypatch.setattr("infer.device.OWN_CGROUP", tmp_path / "own")
    cpu, machine = torch.device("cpu"), free_memory(torch.device("cpu"))

    def group(folder: Path, limit: object, used: int, files: int) -> None:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon {used - files}\ninactive_file {files}\n")

    assert machine > 1 << 20
    group(own, 900_000, 500_000, 100_000)
    assert free_memory(cpu) == 500_000
    group(own.parent, 700_000, 600_000, 0)
    assert free_memory(cpu) == 100_000
    group(own.parent, "max", 600_000, 0)
    group(own, 100, 200, 0)
    assert free_memory(cpu) == 0
