"""Recorded passes: what is replayed, what is refused, and that an engine on them answers as it did."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from tests.attention import random
from tests.support import CONFIGS, CPU, DTYPES, FAMILIES, build_model, make_engine, paged_pool
from torch import Tensor

from infer.engine.graphs import DecodeGraphs
from infer_kernels_cpu.memory import Buffers
from infer_kernels_cpu.provider import CpuKernels

MAX_BATCH = 5


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels()


def replayed(kernels: CpuKernels, run: Callable[[], Tensor], change: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """What a recorded pass yields after a change to its input, and what it would yield if it were run."""
    record = kernels.recorder()
    assert record is not None
    first, replay = record(run)
    assert torch.equal(first, run())
    assert replay is not None
    change()
    again = replay()
    assert again.data_ptr() == first.data_ptr()
    return again, run()


@torch.inference_mode()
def test_native_calls_and_torchs_own_are_replayed_in_order(kernels: CpuKernels) -> None:
    x, weight, scale = random(3, 8), random(8), torch.ones(3, 1)
    packed = kernels.pack(random(8, 8, seed=1))

    def run() -> Tensor:
        y = kernels.rms_norm(kernels.linear(x, packed) * scale, weight, 1e-6)
        y += x.flip(0)
        parts = torch.split_with_sizes(kernels.linear(y, packed), [4, 4], dim=-1)
        turned = kernels.linear(torch.cat(parts[::-1], dim=-1), packed).t().reshape(3, 8)
        return kernels.linear(turned[:, :4].contiguous().repeat(1, 2), packed)

    found, expected = replayed(kernels, run, lambda: (x.copy_(random(3, 8, seed=5)), scale.fill_(0.5)))
    assert torch.equal(found, expected)


@torch.inference_mode()
def test_memory_of_a_pass_is_used_again_within_it_only(kernels: CpuKernels) -> None:
    x, packed = random(3, 64), kernels.pack(random(64, 64, seed=1))

    def run() -> Tensor:
        y = x
        for _ in range(5):
            y = kernels.linear(y, packed)
        return y

    record = kernels.recorder()
    assert record is not None
    first, replay_first = record(run)
    expected = first.clone()
    second, replay_second = record(run)
    assert first.data_ptr() != second.data_ptr()
    assert replay_first is not None
    assert replay_second is not None
    for replay in (replay_first, replay_second, replay_first):
        kernels.linear(random(3, 64, seed=7), packed)
        assert torch.equal(replay(), expected)


@torch.inference_mode()
def test_a_pass_that_reads_a_value_is_refused(kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> None:
    x, record = random(3, 8), kernels.recorder()
    assert record is not None
    out, replay = record(lambda: x * 2 if x.sum().item() > 0 else x)
    assert replay is None
    assert torch.equal(out, x * 2 if x.sum() > 0 else x)
    assert "decode passes are not replayed: the model calls aten.item" in caplog.text


@torch.inference_mode()
def test_a_failed_pass_leaves_nothing_behind(kernels: CpuKernels) -> None:
    x, packed = random(1, 8), kernels.pack(random(8, 8, seed=1))
    before, record = kernels._empty, kernels.recorder()
    assert record is not None

    def fail() -> Tensor:
        kernels.linear(x, packed)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        record(fail)
    assert kernels._empty == before
    tape = kernels.native.infer_tape()
    kernels.linear(x, packed)
    assert kernels.native.infer_tape_length(tape) == 0
    kernels.native.infer_free_tape(tape)


@torch.inference_mode()
def test_other_threads_are_not_recorded(kernels: CpuKernels) -> None:
    x, packed = random(1, 8), kernels.pack(random(8, 8, seed=1))
    other_out = torch.zeros(1, 8)

    def other() -> None:
        with torch.inference_mode(), CpuKernels().results_in(Buffers(small=0)):
            other_out.copy_(CpuKernels().linear(x, packed))

    def run() -> Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return kernels.linear(x, packed)

    record = kernels.recorder()
    assert record is not None
    _, replay = record(run)
    assert replay is not None
    other_out.zero_()
    replay()
    assert not other_out.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_answers_as_it_does_without(family: str, dtype: torch.dtype, kernels: CpuKernels) -> None:
    """Batches of every size, some of whose sequences are preempted."""
    model = build_model(CONFIGS[family], dtype, kernels)
    answers = []
    for recorded in (False, True):
        pool = paged_pool(model, dtype, MAX_BATCH, num_blocks=22)
        pool.storage.kernels = kernels
        record = kernels.recorder()
        assert record is not None
        graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, record) if recorded else None
        stepper = make_engine(model, dtype, pool=pool, kernels=kernels, graphs=graphs, max_batch_size=MAX_BATCH)
        answers.append(stepper.run_six())
        assert any(record.preemptions for record in stepper.finished)
        if graphs is not None:
            assert set(graphs._replays) == set(range(1, MAX_BATCH + 1))
            assert all(graphs._replays.values())
    assert answers[0] == answers[1]


def test_recording_does_not_import_torchs_compiler() -> None:
    """It would take most of a second and a hundred megabytes, with the first answer."""
    program = (
        "import sys; from infer import LLM, SamplingParams\n"
        "with LLM('demo', kernels={'backend': 'cpu', 'threads': 1}) as llm:\n"
        "    print(len(llm.generate('def ', SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["4", "False"], done.stderr
