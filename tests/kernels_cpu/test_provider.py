"""What surrounds the native code: missing libraries, reused memory, threads."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attention import Scene, random, spec

import infer_kernels_cpu
from infer import LLM
from infer.commands.cli import main
from infer.contracts.attention import AttentionSpec, KVDtype
from infer.contracts.kernels import KernelsRegistration
from infer_kernels_cpu import native
from infer_kernels_cpu.memory import SMALL, Buffers
from infer_kernels_cpu.provider import CpuKernels

CPUINFO = Path("/proc/cpuinfo")


def registration() -> KernelsRegistration:
    (found,) = infer_kernels_cpu.infer_kernels()
    return found


def test_it_was_built_here() -> None:
    assert registration().unavailable is None
    assert CpuKernels().level == native.chosen()


def test_the_level_and_why_are_told_wherever_kernels_are(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    about = native.about()
    assert about.startswith(f"level {native.chosen()}")
    for command in ("plugins", "doctor"):
        assert main([command, "--model.path", "demo", "--kernels.backend", "cpu"]) == 0
        assert about in capsys.readouterr().out
    with caplog.at_level(logging.INFO), LLM("demo", kernels={"backend": "cpu"}):
        assert f"kernels cpu: {about}" in caplog.messages


def test_without_libraries_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert "no C++ compiler" in str(registration().unavailable)
    assert not registration().about


def test_a_level_that_could_not_be_built_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "portable.so").symlink_to(native.FOLDER / "portable.so")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert native.levels() == ["portable"]


def test_a_variable_asks_for_a_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(native.VARIABLE, "portable")
    assert CpuKernels().level == "portable"
    assert registration().about == "level portable, as INFER_CPU_LEVEL says"
    monkeypatch.setenv(native.VARIABLE, "")
    assert CpuKernels().level == native.levels()[-1]
    monkeypatch.setenv(native.VARIABLE, "avx9")
    assert main(["generate", "--model.path", "demo", "x"]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert (
        sentence == f"infer: INFER_CPU_LEVEL is 'avx9'; what was built and runs here is {', '.join(native.levels())}."
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for levels of x86-64")
@pytest.mark.parametrize(
    ("has", "level", "why"),
    [
        (0, "portable", "lacks AVX2 and FMA, which avx2 needs"),
        (1, "avx2", "lacks AVX-VNNI, which avx2_vnni needs"),  # Haswell to Comet Lake, Zen to Zen 3
        (3, "avx2_vnni", "lacks AVX-512 F, BW, VL and DQ, which avx512 needs"),  # Alder Lake and later Core processors
        (5, "avx512", "lacks AVX-512 VNNI, which avx512_vnni needs"),  # Skylake-X
        (13, "avx512_vnni", "lacks fast AVX-512 BF16, which avx512_bf16 needs"),  # Cascade Lake, Ice Lake, Tiger Lake
        (29, "avx512_bf16", "lacks AMX, which amx needs"),  # Zen 4
        (31, "avx512_bf16", "lacks AMX, which amx needs"),  # Zen 5
        (47, "amx", "the best there is"),  # Sapphire Rapids
    ],
)
def test_a_processor_gets_the_best_level_that_it_can_run(
    has: int, level: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = {feature for i, feature in enumerate(native.FEATURES) if has >> i & 1}
    monkeypatch.setattr(native, "features", lambda: features)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert native.levels()[-1] == level
    assert why in native.about()
    assert all(native.LEVELS[each] <= features for each in native.levels())


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="reads what Linux says of x86-64")
def test_what_the_kernel_says_of_the_processor_is_found() -> None:
    """An older kernel knows fewer names. AMX it may keep from a process."""
    lines = dict(re.findall(r"^(vendor_id|flags)\s*: (.*)$", CPUINFO.read_text(), re.MULTILINE))
    flags, intel = {*lines["flags"].split()}, lines["vendor_id"] == "GenuineIntel"
    needs = {
        "AVX2 and FMA": {"avx2", "fma"},
        "AVX-VNNI": {"avx_vnni"},
        "AVX-512 F, BW, VL and DQ": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "AVX-512 VNNI": {"avx512_vnni"},
        "fast AVX-512 BF16": {"avx512_bf16"},
    }
    expected = {name for name, needed in needs.items() if needed <= flags}
    if intel:  # its products of pairs of bfloat16 take twice as long as multiplying floats
        expected.discard("fast AVX-512 BF16")
        assert "fast AVX-512 BF16" not in native.features()
    assert expected <= native.features()


@pytest.mark.slow
def test_a_process_may_begin_with_any_level_that_it_can_run() -> None:
    program = f"""
import torch
from infer_kernels_cpu.provider import CpuKernels
kernels, ones = CpuKernels({native.chosen()!r}), torch.ones(64, 64, dtype=torch.bfloat16)
assert (kernels.linear(ones, kernels.pack(ones)) == 64).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(ValueError, match=r"level 'mmx' was not built, or"):
        native.load("mmx")


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    buffers = Buffers()
    one = buffers.empty(SMALL, dtype=torch.bfloat16)
    place, part = one.data_ptr(), one[5:]
    del one
    gc.collect()
    other = buffers.empty(SMALL, dtype=torch.bfloat16)
    assert other.data_ptr() != place, "a part of the first is still held"
    part.fill_(1)
    other.fill_(2)
    assert bool((part == 1).all())
    del part
    gc.collect()
    again = buffers.empty(SMALL - 3, 1, dtype=torch.bfloat16)
    assert again.data_ptr() == place
    assert again.shape == (SMALL - 3, 1)


def test_more_rows_than_memory_for_one_block_holds() -> None:
    """Results large enough to be kept, over several blocks of rows and panels, on two threads."""
    torch.set_num_threads(2)
    try:
        kernels = CpuKernels()
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = random(700, 257, dtype=dtype), random(1000, 257, dtype=dtype, seed=1)
            packed = kernels.pack(weight)
            found = kernels.linear(x, packed)
            expected = x.double() @ weight.double().T
            assert torch.linalg.norm(found.double() - expected) < 3e-3 * torch.linalg.norm(expected)
            ids = torch.randint(0, 1000, (900,))
            assert torch.equal(kernels.embedding(ids, packed), weight[ids])
    finally:
        torch.set_num_threads(1)


def test_several_callers_at_a_time() -> None:
    """One has the team, the others compute alone: all get the same bits."""
    kernels = CpuKernels()
    xs, weight = (
        [random(n, 64, dtype=torch.bfloat16, seed=n) for n in (1, 5, 40, 200)],
        random(512, 64, dtype=torch.bfloat16),
    )
    packed = kernels.pack(weight)
    expected = [kernels.linear(x, packed) for x in xs]

    def ask(i: int) -> bool:
        torch.set_num_threads(2)  # of this thread
        return all(torch.equal(kernels.linear(xs[i], packed), expected[i]) for _ in range(300))

    with ThreadPoolExecutor(len(xs)) as pool:
        assert all(pool.map(ask, range(len(xs))))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's way to give threads large stacks")
def test_threads_that_cannot_start_leave_the_work_to_those_that_there_are() -> None:
    """A container may allow few of them. Here their stacks are larger than the address space."""
    code = """
import ctypes, torch
from infer_kernels_cpu.provider import CpuKernels
kernels, x, weight = CpuKernels(), torch.ones(40, 64), torch.ones(512, 64)
packed = kernels.pack(weight)
expected = kernels.linear(x, packed)
libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)
assert libc.pthread_attr_init(attributes) == 0
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0
torch.set_num_threads(4)
assert torch.equal(kernels.linear(x, packed), expected)
print("computed")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "computed\n", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_memory_that_a_kernel_does_not_get_is_said() -> None:
    code = """
import resource, torch
from pathlib import Path
from infer_kernels_cpu import native
library, logits = native.load(native.chosen()), torch.zeros(1, 1 << 22)
one, token = torch.ones(1), torch.zeros(1, dtype=torch.int64)
kept = (logits, one, torch.zeros(1, dtype=torch.int64), one, torch.zeros(1), torch.full((1,), 0.5).double(), token)
pointers = [each.data_ptr() for each in kept]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20),) * 2)
library.infer_sample(0, pointers[0], 1, 1 << 22, *pointers[1:])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == -signal.SIGABRT
    assert "infer: out of memory: a kernel needs 16777216 bytes" in run.stderr


@pytest.mark.slow
def test_nobody_waits_for_threads_that_do_not_run() -> None:
    """A forked process has none of its parent's: whoever counted on them would wait for ever."""
    code = """
import os, torch
from infer_kernels_cpu.provider import CpuKernels
torch.set_num_threads(2)
kernels, x, weight = CpuKernels(), torch.randn(40, 64), torch.randn(512, 64)
packed = kernels.pack(weight)
expected = kernels.linear(x, packed)
if (child := os.fork()) == 0:
    os._exit(0 if all(torch.equal(kernels.linear(x, packed), expected) for _ in range(50)) else 1)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_segments_are_shared_out_and_merged_alike(dtype: torch.dtype) -> None:
    """A long decode of one K/V head is split over threads, or is not, beside others."""
    extends = [(1700, 1), (0, 3), (1100, 2), (600, 1)]
    for where in (spec(4, 1, 64), spec(4, 1, 64, window=700)):
        together = Scene(where, extends, 16, dtype, kernels=CpuKernels())
        expected = together.attend()
        torch.testing.assert_close(expected.double(), together.attend64(), rtol=2e-2, atol=2e-2)
        torch.set_num_threads(2)
        try:
            split = Scene(where, extends[:1], 16, dtype, kernels=CpuKernels())
            split.q, split.k, split.v = together.q[:1], together.k[:1], together.v[:1]
            assert torch.equal(split.attend(), expected[:1])
        finally:
            torch.set_num_threads(1)


def alone(together: Scene, sequence: int, first: int, count: int) -> Scene:
    """The scene's queries [first, first + count) of a sequence, without company."""
    start = together.extends[sequence][0] + first
    end = start + count
    scene = replace(together, extends=[(start, count)])
    scene.k, scene.v = [together.k[sequence][:end]], [together.v[sequence][:end]]
    scene.q = [together.q[sequence][first : first + count]]
    return scene


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("block_size", [16, 24, 8])
@pytest.mark.parametrize(
    "where",
    [
        spec(2, 2, 64),
        spec(8, 8, 32, window=100),
        spec(8, 2, 128, cap=0.7, sinks=(0.5, -1)),
        spec(16, 1, 96),
        spec(17, 1, 48),
    ],
    ids=["64", "window", "capped", "16 rows", "17 rows"],
)
def test_few_rows_have_the_bits_of_many(where: AttentionSpec, block_size: int, kv_dtype: KVDtype) -> None:
    """Some levels multiply few rows by keys and values as they lie in the cache. Steps begin at multiples of 128."""
    few = [(126, 5), (127, 2), (127, 3), (250, 1), (383, 4)]
    many = [(0, 140), (120, 33), (500, 18)]
    scene = Scene(where, few + many, block_size, torch.bfloat16, kv_dtype=kv_dtype)
    expected = scene.attend64()
    for level in native.levels():
        together = replace(scene, kernels=CpuKernels(level))
        found = together.attend()
        torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)
        assert torch.equal(replace(together, extends=few).attend(), found[:15])
        for sequence, first in ((5, 15), (6, 155), (7, 188)):
            for row, count in ((0, 1), (7, 1), (17, 1), (6, 5), (7, 3)):
                own = alone(together, sequence, row, count).attend()
                assert torch.equal(own, found[first + row : first + row + count])


def test_more_heads_than_a_tile_has_rows() -> None:
    for level in native.levels():
        together = Scene(spec(300, 1, 32), [(120, 12)], 16, torch.bfloat16, kernels=CpuKernels(level))
        found = together.attend()
        torch.testing.assert_close(found.double(), together.attend64(), rtol=3e-2, atol=3e-2)
        assert torch.equal(alone(together, 0, 9, 1).attend()[0], found[9])
