"""Memory of the host."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.serving import HANG_S
from tests.support import CPU
from torch import Tensor

from infer.device import HUGE_PAGE, LARGE, THREAD, clear_first_pages, free_memory, zeros

LINUX = [*map(int, re.findall(r"\d+", platform.release())[:2])] if sys.platform == "linux" else [0]

GIVING_BACK = """
import re
from pathlib import Path
import torch
from infer.device import blocks_given_back

def resident():
    return int(re.findall(r"^RssAnon:\\s+(\\d+) kB$", Path("/proc/self/status").read_text(), re.M)[0]) << 10

with blocks_given_back():
    before = resident()
    blocks = [torch.ones(768 << 10, dtype=torch.uint8) for _ in range(256)]
    full = resident() - before
    blocks = blocks[::8]
    print(full, resident() - before, len(blocks))
"""


def resident(tensor: Tensor, offset: int) -> bool:
    """Whether the system has given the page of this byte some memory."""
    page = (tensor.data_ptr() + offset) // mmap.PAGESIZE * mmap.PAGESIZE
    found = ctypes.c_ubyte()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(found)) == 0
    return bool(found.value & 1)


@pytest.mark.skipif(LINUX < [5, 14], reason="the system clears no page before it is written")
def test_the_first_pages_of_large_tensors_are_cleared_beforehand() -> None:
    untouched, written = (zeros((LARGE + 1,), torch.uint8, CPU, share=share) for share in (0.5, 0.0))
    small = zeros((LARGE,), torch.uint8, CPU)
    written[5] = 7
    clear_first_pages([untouched, written, small])
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(HANG_S)
    assert resident(untouched, 0)
    assert not resident(untouched, 2 * HUGE_PAGE)
    assert not resident(small, 0)
    assert (int(untouched.sum()), int(written.sum())) == (0, 7)


@pytest.mark.slow
def test_blocks_of_a_small_experts_size_are_given_back_while_others_stay() -> None:
    """In a process of its own, where nobody else takes memory meanwhile."""
    said = subprocess.run([sys.executable, "-c", GIVING_BACK], capture_output=True, text=True, check=True).stdout
    full, left, kept = map(int, said.split())
    assert kept == 32
    assert full > 180 << 20
    assert left < full // 4


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

    # Version 1 counts a group's files alone and with those of the groups in it. A container need not see its own path.
    (tmp_path / "own").write_text("5:cpu,memory:/docker/1\n1:name=systemd:/docker/1\n0::/\n")
    (tmp_path / "memory").mkdir()
    of = {"limit_in_bytes": "900000", "usage_in_bytes": "500000", "stat": "inactive_file 1\ntotal_inactive_file 100000"}
    for name, value in of.items():
        (tmp_path / f"memory/memory.{name}").write_text(f"{value}\n")
    assert free_memory(cpu) == 500_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "given", "polls"),
    [
        ("from infer import LLM", {}, 0),
        pytest.param("from infer.commands.cli import main; main(['plugins'])", {}, 0, marks=pytest.mark.slow),
        pytest.param("from infer import LLM", {"OMP_WAIT_POLICY": "ACTIVE"}, 30_000_000_000, marks=pytest.mark.slow),
    ],
    ids=["library", "command", "as asked"],
)
def test_openmp_does_not_poll_beside_the_kernels(program: str, given: dict[str, str], polls: int) -> None:
    program += "; import os; print(os.environ.get('OMP_WAIT_POLICY'))"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[0] == str(polls)
    assert done.stdout.split()[-1] == str(given.get("OMP_WAIT_POLICY")), "other processes do not inherit it"
