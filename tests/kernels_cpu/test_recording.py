"""Recorded passes: which are replayed, which are refused, and that an engine's answers do not change."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.attention import Scene, random, spec
from tests.support import (
    CONFIGS,
    CPU,
    DTYPES,
    MAX_SEQ_LEN,
    build_model,
    families,
    make_engine,
    paged_pool,
    random_prompt,
)
from torch import Tensor

from infer.cache import ExtendView
from infer.contracts.attention import KV, AttentionSpec, KVDtype, Ragged, Rotary
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Activation
from infer.engine.graphs import DecodeGraphs
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedPool, PagedSettings
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
    assert not isinstance(replay, str)
    change()
    again = replay()
    assert isinstance(again, Tensor)
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
    assert not isinstance(replay_first, str)
    assert not isinstance(replay_second, str)
    for replay in (replay_first, replay_second, replay_first):
        kernels.linear(random(3, 64, seed=7), packed)
        again = replay()
        assert isinstance(again, Tensor)
        assert torch.equal(again, expected)


@torch.inference_mode()
def test_gates_and_values_of_longer_rows_are_read_anew_by_a_replay(kernels: CpuKernels) -> None:
    x = random(3, 90)

    def run() -> Tensor:
        one_gate = kernels.gated(x[:, :1].expand(3, 40), x[:, 50:], "sigmoid")
        return kernels.gated(x[:, 5:45], one_gate, "softplus")

    found, expected = replayed(kernels, run, lambda: x.copy_(random(3, 90, seed=5)))
    assert torch.equal(found, expected)


@torch.inference_mode()
def test_keys_and_values_are_quantized_anew_by_a_replay(kernels: CpuKernels) -> None:
    """Also by the kernel that does not rotate them, which is torch's."""
    scene = Scene(spec(), [(20, 1), (3, 1)], 16, kernels=kernels, kv_dtype="int8")
    scene.attend()
    view, q, k = scene.view(), torch.cat(scene.q), random(2, 2, 16, seed=1)
    found, expected = replayed(kernels, lambda: view.attend(0, q, k, 2 * k), lambda: k.copy_(random(2, 2, 16, seed=5)))
    assert torch.equal(found, expected)


def _decide(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


MASK = torch.tensor([True, False, True])
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor.tolist": lambda x: x * x[0].tolist()[0],
    "Tensor.numpy": lambda x: x + float(x.numpy().max()),
    "Tensor.__array__": lambda x: x + float(np.asarray(x).max()),
    "Tensor.item": lambda x: x * x.sum().item(),
    "Tensor.__bool__": _decide,
    "Tensor.__repr__": lambda x: x * len(str(x)),
    "Tensor.__format__": lambda x: x * len(f"{x.sum()}"),
    "Tensor.__float__": lambda x: x * float(x.sum()),
    "aten.item": lambda x: x[: x.argmax()],
    "Tensor.__contains__": lambda x: x * (0.5 in x),
    "aten.equal": lambda x: x * torch.equal(x, -x),
    "aten.nonzero": lambda x: x[(x > 0).nonzero()[:, 0]],
    "aten.argwhere": lambda x: x[torch.argwhere(x > 0)[:, 0]],
    "aten.where": lambda x: x[torch.where(x > 0)[0]],
    "aten.index.Tensor": lambda x: x[MASK],
    "aten.masked_select": lambda x: x.masked_select(x > 0),
    "aten.repeat_interleave.Tensor": lambda x: x[torch.repeat_interleave(MASK.long())],
    "aten._unique2": lambda x: x[torch.unique(MASK.long())],
    "aten.bincount": lambda x: x * torch.bincount(MASK.long()).sum(),
    "aten.narrow.Tensor": lambda x: x.narrow(0, MASK.sum() - 1, 1),
    "makes a tensor": lambda x: x * torch.tensor([2.0] * 8)[: x.shape[-1]],
}


@pytest.mark.parametrize("read", READS)
@torch.inference_mode()
def test_a_pass_in_which_values_decide_is_refused(kernels: CpuKernels, read: str) -> None:
    x, record = random(3, 8), kernels.recorder()
    assert record is not None
    out, why = record(lambda: READS[read](x))
    assert torch.equal(out, READS[read](x))
    assert isinstance(why, str)
    assert why.startswith(f"{__name__}.{'_decide' if read == 'Tensor.__bool__' else '<lambda>'} ")
    assert read in why


@torch.inference_mode()
def test_integer_indices_and_constants_are_no_reason_to_refuse(kernels: CpuKernels) -> None:
    x, rows, table = random(3, 8), torch.tensor([2, 0, 2]), random(5, 8, seed=1)

    def run() -> Tensor:
        y = x[rows] * torch.tensor(0.5) + table[rows, :]
        y[rows > 0] = 1.0
        y[:, 3] = 2.0
        return torch.where(x > 0, y, table.index_select(0, rows)).index_add(0, rows, x)

    found, expected = replayed(kernels, run, lambda: (x.copy_(random(3, 8, seed=5)), rows.copy_(rows.flip(0) // 2)))
    assert torch.equal(found, expected)


@torch.inference_mode()
def test_a_shape_that_changes_is_not_broadcast(kernels: CpuKernels) -> None:
    """An operation that torch does not mark: nobody could know before."""
    widths = iter([1, 1, 3])
    library: Any = torch.library.Library("infer_test", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("some_rows(Tensor x) -> Tensor")
    library.impl("some_rows", lambda x: x[: next(widths)] * 2, "CPU")
    x, record = random(3, 8), kernels.recorder()
    assert record is not None
    _, replay = record(lambda: torch.ops.infer_test.some_rows(x))
    assert not isinstance(replay, str)
    assert isinstance(replay(), Tensor)
    assert replay() == "infer_test.some_rows.default yields [3, 8] where it yielded [1, 8]"


@torch.inference_mode()
def test_recordings_are_equal_if_they_do_the_same_with_the_same_numbers(kernels: CpuKernels) -> None:
    x, packed = random(3, 8), kernels.pack(random(8, 8, seed=1))
    record = kernels.recorder()
    assert record is not None

    def recorded(number: float, constant: float, column: int, times: int) -> object:
        def run() -> Tensor:
            y = x[:, column:] * number + torch.tensor(constant)
            for _ in range(times):
                kernels.linear(x, packed)
            return y

        return record(run)[1]

    first = recorded(0.5, 3.0, 1, 2)
    assert first == recorded(0.5, 3.0, 1, 2)
    for other in ((0.25, 3.0, 1, 2), (0.5, 2.0, 1, 2), (0.5, 3.0, 2, 2), (0.5, 3.0, 1, 3)):
        assert first != recorded(*other)


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
    assert not isinstance(replay, str)
    other_out.zero_()
    replay()
    assert not other_out.any()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*((dtype, "auto") for dtype in DTYPES), (torch.bfloat16, "int8")],
    ids=["fp32", "bf16", "int8"],
)
@families
def test_an_engine_answers_as_it_does_without(
    family: str, dtype: torch.dtype, kv_dtype: KVDtype, kernels: CpuKernels
) -> None:
    """Batches of every size, some of whose sequences are preempted."""
    model = build_model(CONFIGS[family], dtype, kernels)
    answers = []
    for recorded in (False, True):
        pool = paged_pool(model, dtype, MAX_BATCH, kv_dtype, max_chunk=64, spare=6)
        pool.storage.kernels = kernels
        record = kernels.recorder()
        assert record is not None
        graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, record) if recorded else None
        keys: dict[str, Any] = {"max_batch_size": MAX_BATCH, "prefill_chunk_size": 64}
        stepper = make_engine(model, dtype, pool=pool, kernels=kernels, graphs=graphs, **keys)
        for index, length in enumerate([3, 130, 140, 15, 1, 30, 60]):
            prompt = random_prompt(length, seed=index)
            tokens = 12 + 8 * index
            stepper.submit(prompt, str(index), temperature=1.0, seed=index, max_tokens=tokens, logprobs=5)
        stepper.run()
        answers.append({id: [(e.token_ids, e.logprobs) for e in events] for id, events in stepper.events.items()})
        assert any(record.preemptions for record in stepper.finished)
        if graphs is not None:
            assert set(graphs.recordings) == {(rows, False) for rows in range(1, MAX_BATCH + 1)}
            tried = [recording and recording.tried for recording in graphs.recordings.values()]
            assert tried == [True] * MAX_BATCH
    assert answers[0] == answers[1]


class HostAttention(CpuKernels):
    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        return ReferenceKernels.extend_attention(self, q_THE, k_cache, v_cache, ragged, spec)


class Buckets(CpuKernels):
    """The same from step to step, until the longest sequence enters the next bucket."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out_THE = super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)
        return out_THE * (1 + max(ragged.starts) // 16)


class Unheard(CpuKernels):
    """A kernel that no tape hears of."""

    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Activation) -> Tensor:
        found = super().gated_linear(x_TK, packed, activation)
        out = torch.empty_like(found)
        ctypes.memmove(out.data_ptr(), found.data_ptr(), found.nbytes)
        return out


class Wandering(PagedPool):
    """Its views are made anew each time."""

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> ExtendView:
        return super().decode_view(slots)


class HostPool(PagedPool):
    """Its views know on the host where they write."""

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> ExtendView:
        places = [self.length(slot) for slot in slots]
        view = super().decode_view(slots, rows)
        attend = view.attend

        def late(
            layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
        ) -> Tensor:
            out_THE = attend(layer, q_THE, k_TKE, v_TKE, rotary)
            for row, place in enumerate(places):
                k_cache = self.storage.k[layer]
                assert isinstance(k_cache, Tensor)
                out_THE[row] += k_cache.flatten(0, 1)[place % 7].sum()
            return out_THE

        view.attend = late  # type: ignore[method-assign]
        return view


MISFITS: dict[str, tuple[type[CpuKernels], type[PagedPool], str]] = {
    "attention in torch": (HostAttention, PagedPool, "extend_attention reads Ragged.starts"),
    "buckets of positions": (Buckets, PagedPool, f"{__name__}.Buckets.extend_attention reads Ragged.starts"),
    "a kernel unheard": (Unheard, PagedPool, "gave other bits"),
    "views that move": (CpuKernels, Wandering, "views of Wandering do not stay where they are (raggeds."),
    "places on the host": (CpuKernels, HostPool, "a pass does not do the same for every token, position, slot and"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_a_replay_cannot_follow_is_run(misfit: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same answers as without recordings, and one line in the log."""
    provider, pool_class, says = MISFITS[misfit]
    kernels = provider()
    model = build_model(CONFIGS["llama"], torch.float32, kernels)
    answers = []
    for recorded in (False, True):
        context = CacheContext(model.attention, MAX_BATCH, MAX_SEQ_LEN, torch.float32, CPU, kernels)
        pool = pool_class(context, PagedSettings.model_validate({"num_blocks": 30}))
        record = kernels.recorder()
        assert record is not None
        graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, record) if recorded else None
        stepper = make_engine(model, torch.float32, pool=pool, kernels=kernels, graphs=graphs, max_batch_size=MAX_BATCH)
        for turn in range(2):
            for index, length in enumerate([3, 40, 10, 15, 1]):
                id, prompt = f"{turn} {index}", random_prompt(length, seed=index)
                stepper.submit(prompt, id, temperature=1.0, seed=index, max_tokens=24, logprobs=5)
            stepper.run()
        answers.append({id: [(e.token_ids, e.logprobs) for e in events] for id, events in stepper.events.items()})
    assert answers[0] == answers[1]
    assert graphs is not None
    assert not any(graphs.recordings.values())
    assert len([r for r in caplog.records if "run, not replayed" in r.message]) == 1
    assert says in caplog.text


@pytest.mark.slow
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
