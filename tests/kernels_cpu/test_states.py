"""Kernels of recurrent layers: against float64, and that bits depend neither on chunks, company, threads nor levels."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from functools import singledispatch

import pytest
import torch
from tests.attention import random
from tests.examples import slowly
from tests.support import DTYPES
from torch import Tensor

from infer.device import same_bits
from infer.kernels.reference import ReferenceKernels
from infer_kernels_cpu import native
from infer_kernels_cpu.provider import CpuKernels
from infer_testing import check_kernels
from infer_testing.recurrent import Conv, Delta, Layer, Space, conv, delta, sliced, space, state_rows

LEVELS = {level: CpuKernels(level) for level in native.levels()}
CPU = torch.device("cpu")
LAYERS: dict[str, Layer] = {
    "conv": conv(300, 4, bias=True),
    "conv of many channels": conv(2500, 4),
    "conv of 1": conv(70, 1),
    "conv of 2": conv(70, 2),
    "conv of 3": conv(70, 3, silu=False),
    "conv of 7": conv(70, 7, bias=True),
    "delta, tiny": delta(1, 2, 8, 8),
    "delta, odd": delta(2, 4, 13, 45, max_beta=2.0),
    "delta": delta(2, 2, 128, 128),
    "delta, tiny, by channel": delta(2, 2, 8, 8, channel_decay=True),
    "delta, odd, by channel": delta(1, 3, 13, 45, channel_decay=True),
    "delta, by channel": delta(2, 2, 128, 128, channel_decay=True),
    "space, tiny": space(4, 8, 2, 16, clamped=True),
    "space, odd": space(3, 21, 1, 10),
    "space": space(2, 64, 1, 256),
}
LENGTH = 100
layers = pytest.mark.parametrize("name", LAYERS)
levels = pytest.mark.parametrize(
    "level", [native.chosen(), *slowly(*(level for level in LEVELS if level != native.chosen()))]
)
floats = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


@singledispatch
def exactly(layer: object, inputs: Sequence[Tensor], state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each token's result and the state after it, in float64, of a sequence that begins with ``state``."""
    raise TypeError(layer)


@exactly.register
def _(layer: Conv, inputs: Sequence[Tensor], state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for x_C in inputs[0].double():
        columns_WC = torch.cat((state.double(), x_C[None]))
        out_C = (columns_WC.T * layer.weight_CW.double()).sum(1)
        if layer.bias_C is not None:
            out_C = out_C + layer.bias_C.double()
        state = columns_WC[1:]
        yield (out_C * torch.sigmoid(out_C) if layer.silu else out_C), state


@exactly.register
def _(layer: Delta, inputs: Sequence[Tensor], state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    (H, K, V), rule = layer.shape, layer.rule
    keys, each = rule.num_key_heads * K, H // rule.num_key_heads
    for qkv, a, b in zip(*(x.double() for x in inputs), strict=True):
        q, k, v = torch.split_with_sizes(qkv, (keys, keys, H * V))
        q, k = (x.view(-1, K).repeat_interleave(each, 0) for x in (q, k))
        q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        a = (a + rule.dt_bias_A.double()).view(H, -1)  # of a head, or of each of its K rows
        state = state.double() * torch.exp(-rule.rate_H.double()[:, None] * softplus(a))[:, :, None]
        change = (v.view(H, V) - torch.einsum("hkv,hk->hv", state, k)) * rule.max_beta * torch.sigmoid(b)[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, change)
        yield torch.einsum("hkv,hk->hv", state, q) / K**0.5, state


@exactly.register
def _(layer: Space, inputs: Sequence[Tensor], state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    (H, N, P), groups = layer.shape, layer.space.num_groups
    for xbc, dt in zip(*(x.double() for x in inputs), strict=True):
        x, b, c = torch.split_with_sizes(xbc, (H * P, groups * N, groups * N))
        b, c = (x.view(-1, N).repeat_interleave(H // groups, 0) for x in (b, c))
        dt = softplus(dt + layer.space.dt_bias_H.double()).clamp(layer.space.dt_min, layer.space.dt_max)
        decay = torch.exp(-layer.space.rate_H.double() * dt)
        state = state.double() * decay[:, None, None] + torch.einsum("hn,hp->hnp", b, x.view(H, P) * dt[:, None])
        yield torch.einsum("hnp,hn->hp", state, c) + layer.space.skip_H.double()[:, None] * x.view(H, P), state


def inputs_of(layer: Layer, length: int, dtype: torch.dtype, seed: int = 7) -> list[Tensor]:
    return [random(length, width, dtype=dtype, seed=seed + i) for i, width in enumerate(layer.widths)]


def states_of(layer: Layer, rows: int, dtype: torch.dtype) -> Tensor:
    return random(rows, *layer.shape, dtype=layer.state_dtype(dtype), seed=3)


def whole(kernels: ReferenceKernels, layer: Layer, dtype: torch.dtype, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """The results of one chunk that begins with the state in row 0, and the states of all tokens, from row 1 on."""
    states = states_of(layer, length + 1, dtype)
    rows = state_rows([length], [0], {t: t + 1 for t in range(length)})
    return layer.run(kernels, inputs_of(layer, length, dtype), states, rows), states


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    apart = torch.linalg.norm(found.double() - expected.double())
    assert apart <= tolerance * torch.linalg.norm(expected.double())


@levels
@layers
@floats
def test_results_and_states_are_those_of_float64_and_of_the_reference(
    level: str, name: str, dtype: torch.dtype
) -> None:
    layer = LAYERS[name].to(CPU, dtype)
    found, states = whole(LEVELS[level], layer, dtype)
    exact = list(exactly(layer, inputs_of(layer, LENGTH, dtype), states_of(layer, LENGTH + 1, dtype)[0]))
    near = 2e-6 if dtype == torch.float32 else 4e-3
    close(found, torch.stack([out for out, _ in exact]), near)
    close(states[1:], torch.stack([state for _, state in exact]), 2e-6)
    reference, reference_states = whole(ReferenceKernels(), layer, dtype)
    close(found, reference, near)
    close(states, reference_states, 2e-6)


@levels
@layers
@floats
def test_bits_do_not_depend_on_where_a_sequence_is_cut(level: str, name: str, dtype: torch.dtype) -> None:
    """Every state that is saved in the middle of a chunk is that of a chunk that ends there, in place or not."""
    layer, kernels = LAYERS[name].to(CPU, dtype), LEVELS[level]
    expected, states = whole(kernels, layer, dtype)
    inputs = inputs_of(layer, LENGTH, dtype)
    for size in (1, 2, 7, 8, 9, 32, 33, 64):
        for move in (0, 1):
            moving = torch.cat((states[:1], torch.full_like(states[:1], torch.nan)))
            for i, begin in enumerate(range(0, LENGTH, size)):
                end = min(LENGTH, begin + size)
                rows = state_rows([end - begin], [i * move % 2], {end - begin - 1: (i + 1) * move % 2})
                found = layer.run(kernels, [x[begin:end] for x in inputs], moving, rows)
                assert same_bits(found, expected[begin:end])
                assert same_bits(moving[(i + 1) * move % 2], states[end])


@levels
@layers
@floats
def test_bits_do_not_depend_on_company_threads_and_strides(level: str, name: str, dtype: torch.dtype) -> None:
    layer, kernels = LAYERS[name].to(CPU, dtype), LEVELS[level]
    expected, all_states = whole(kernels, layer, dtype)
    own = inputs_of(layer, LENGTH, dtype)
    before = torch.get_num_threads()
    for threads in (1, 2):
        for others in (1, 6):
            lens = [*([5] * others), 20, 0, *([1] * others)]
            first, total = 5 * others, sum(lens)
            inputs = inputs_of(layer, total, dtype, seed=90)
            for x, mine in zip(inputs, own, strict=True):
                x[first : first + 20] = mine[:20]
            states = torch.cat((all_states[:1], states_of(layer, 4 * len(lens), dtype)))
            ends = torch.tensor(lens).cumsum(0).tolist()
            save = {end - 1: 1 + 2 * b for b, (end, n) in enumerate(zip(ends, lens, strict=True)) if n}
            save[first + 9] = 2
            read = [0 if b == others else 1 + 2 * b for b in range(len(lens))]
            torch.set_num_threads(threads)
            try:
                found = layer.run(kernels, sliced(inputs), states, state_rows(lens, read, save))
            finally:
                torch.set_num_threads(before)
            assert same_bits(found[first : first + 20], expected[:20])
            assert same_bits(states[2], all_states[10])
            assert same_bits(states[1 + 2 * others], all_states[20])
            assert same_bits(states[0], all_states[0])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="all levels but portable have fused operations there")
@layers
def test_levels_with_fused_operations_yield_the_same_bits(name: str) -> None:
    fused = [level for level in LEVELS if level != "portable"]
    layer = LAYERS[name].to(CPU, torch.float32)
    found = [whole(LEVELS[level], layer, torch.float32) for level in fused]
    for out, states in found[1:]:
        assert same_bits(out, found[0][0])
        assert same_bits(states, found[0][1])


@levels
@pytest.mark.parametrize("gate_first", [False, True], ids=["gate last", "gate first"])
@pytest.mark.parametrize(
    ("size", "group", "width"), [(2048, 128, 128), (48, 8, 8), (96, 48, 96), (90, 45, 15), (5, 5, 5)]
)
@floats
def test_gated_norms(level: str, size: int, group: int, width: int, gate_first: bool, dtype: torch.dtype) -> None:
    kernels, rows, before = LEVELS[level], 40, torch.get_num_threads()
    x, gate = (3 * random(rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(width, dtype=dtype, seed=3)
    found = kernels.gated_rms_norm(x, gate, weight, 1e-5, group, gate_first)
    open64 = gate.double() * torch.sigmoid(gate.double())
    exact = (x.double() * open64 if gate_first else x.double()).view(rows, -1, group)
    exact = (exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(rows, -1, width) * weight.double()
    exact = exact.view(rows, size) * (1 if gate_first else open64)
    close(found, exact, 2e-6 if dtype == torch.float32 else 4e-3)
    torch.set_num_threads(2)
    try:
        apart = sliced([x, gate])
        many = kernels.gated_rms_norm(apart[0], apart[1], weight, 1e-5, group, gate_first)
    finally:
        torch.set_num_threads(before)
    assert same_bits(many, found)
    for row in range(0, rows, 7):
        one = kernels.gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, 1e-5, group, gate_first)
        assert same_bits(one[0], found[row])


@levels
def test_extreme_factors(level: str) -> None:
    """Steps, decays and gates far out: no result is NaN that is none in the reference."""
    layer, kernels = delta(1, 3, 8, 8), LEVELS[level]
    far = torch.tensor([-1e4, -100, -20, -1, 0, 1, 20, 100, 1e4, float("inf"), -float("inf")])
    qkv, a = random(len(far), layer.widths[0]), far[:, None].expand(-1, 3)
    states, expected_states = states_of(layer, 2, torch.float32), states_of(layer, 2, torch.float32)
    rows = state_rows([len(far)], [0], {len(far) - 1: 1})
    found = layer.run(kernels, (qkv, a, a), states, rows)
    torch.testing.assert_close(found, layer.run(ReferenceKernels(), (qkv, a, a), expected_states, rows))
    torch.testing.assert_close(states, expected_states)
    x, weight = torch.ones(2, 10), torch.ones(10)
    gate = far[:-1].expand(2, -1)
    for first in (False, True):
        out = kernels.gated_rms_norm(x, gate, weight, 1e-5, 10, first)
        torch.testing.assert_close(
            out, ReferenceKernels().gated_rms_norm(x, gate, weight, 1e-5, 10, first), equal_nan=True
        )


@torch.inference_mode()
@pytest.mark.parametrize("name", ["conv", "delta, tiny", "space, tiny"])
def test_a_replay_follows_the_rows_whose_values_are_not_recorded(name: str) -> None:
    """Nor are the sequences' numbers of tokens."""
    layer, kernels = LAYERS[name], CpuKernels()
    record = kernels.recorder()
    assert record is not None
    product = torch.cat(inputs_of(layer, 6, torch.float32), 1)
    states = states_of(layer, 12, torch.float32)
    rows = state_rows([1, 1, 2, 2], [0, 1, 2, 3], {0: 0, 1: 1, 3: 2, 5: 3})

    def run() -> Tensor:
        return layer.run(kernels, torch.split_with_sizes(product, layer.widths, 1), states, rows)

    out, replay = record(run)
    assert not isinstance(replay, str)
    for seed, (lens, read, save) in enumerate(
        [([3, 0, 1, 2], [8, 9, 8, 7], {1: 4, 2: 5, 3: 3, 5: 7}), ([1, 2, 3, 0], [1, 0, 3, 0], {0: 1, 2: 0, 5: 4})]
    ):
        product.copy_(torch.cat(inputs_of(layer, 6, torch.float32, seed=100 + seed), 1))
        for x, new in zip(rows, state_rows(lens, read, save), strict=True):
            x.copy_(new)
        before = states.clone()
        found = replay()
        assert isinstance(found, Tensor)
        assert found.data_ptr() == out.data_ptr()
        kept, found = states.clone(), found.clone()
        states.copy_(before)
        assert same_bits(found, run())
        assert same_bits(kept, states)


@torch.inference_mode()
def test_a_gated_norm_is_replayed() -> None:
    kernels = CpuKernels()
    x, gate, weight = random(3, 32), random(3, 40)[:, 4:36], random(16)
    record = kernels.recorder()
    assert record is not None
    _, replay = record(lambda: kernels.gated_rms_norm(x, gate, weight, 1e-6, 16, False))
    assert not isinstance(replay, str)
    x.copy_(random(3, 32, seed=5))
    found = replay()
    assert isinstance(found, Tensor)
    assert same_bits(found, kernels.gated_rms_norm(x, gate, weight, 1e-6, 16, False))


@layers
def test_states_may_be_parts_of_longer_rows(name: str) -> None:
    """As where a row has the states of all layers."""
    layer, kernels = LAYERS[name], CpuKernels()
    inputs, own = inputs_of(layer, 3, torch.float32), states_of(layer, 3, torch.float32)
    shared = torch.zeros(3, 2, *layer.shape)
    shared[:, 1] = own
    rows = state_rows([3], [0], {0: 1, 2: 2})
    found = layer.run(kernels, inputs, shared[:, 1], rows)
    assert same_bits(found, layer.run(kernels, inputs, own, rows))
    assert same_bits(shared[:, 1].contiguous(), own)
    assert not shared[:, 0].any()


def test_padding_may_save_one_row_many_times() -> None:
    layer, kernels, before = LAYERS["delta"], CpuKernels(), torch.get_num_threads()
    inputs, states = inputs_of(layer, 8, torch.float32), states_of(layer, 4, torch.float32)
    expected_states = states.clone()
    expected = layer.run(kernels, [x[:1] for x in inputs], expected_states, state_rows([1], [0], {0: 0}))
    torch.set_num_threads(2)
    try:
        rows = state_rows([1] * 8, [0] + [1] * 7, {0: 0} | dict.fromkeys(range(1, 8), 2))
        found = layer.run(kernels, inputs, states, rows)
    finally:
        torch.set_num_threads(before)
    assert same_bits(found[:1], expected)
    assert same_bits(states[[0, 1, 3]], expected_states[[0, 1, 3]])


MISFITS: dict[str, Callable[[CpuKernels, Tensor], object]] = {
    "channels": lambda k, x: conv(8, 4).run(k, [x[:, :-1]], torch.zeros(2, 3, 8), state_rows([1, 1], [0, 1], {})),
    "columns": lambda k, x: conv(8, 4).run(k, [x], torch.zeros(2, 4, 8), state_rows([1, 1], [0, 1], {})),
    "weights": lambda k, x: conv(8, 4).run(k, [x.bfloat16()], torch.zeros(2, 3, 8), state_rows([1, 1], [0, 1], {})),
    "columns' dtype": lambda k, x: conv(8, 4).run(
        k, [x], torch.zeros(2, 3, 8, dtype=torch.bfloat16), state_rows([1, 1], [0, 1], {})
    ),
    "tokens": lambda k, x: conv(8, 4).run(k, [x], torch.zeros(2, 3, 8), state_rows([1, 2], [0, 1], {})),
    "sequences": lambda k, x: conv(8, 4).run(k, [x], torch.zeros(2, 3, 8), state_rows([1, 1], [0, 1, 1], {})),
    "delta's channels": lambda k, x: _delta(k, x, x[:, :1]),
    "a's heads": lambda k, x: _delta(k, x[:, :6], x),
    "a's dtype": lambda k, x: _delta(k, x[:, :6], x[:, :1].bfloat16()),
    "delta's state": lambda k, x: _delta(k, x[:, :6], x[:, :1], torch.bfloat16),
    "space's channels": lambda k, x: _space(k, x, x[:, :1]),
    "dt's heads": lambda k, x: _space(k, x[:, :6], x),
    "space's state": lambda k, x: _space(k, x[:, :6], x[:, :1], torch.bfloat16),
    "gate": lambda k, x: k.gated_rms_norm(x, x[:, :4], x[0], 1e-6, 8, False),
    "groups": lambda k, x: k.gated_rms_norm(x, x, x[0], 1e-6, 3, False),
    "norm's weights": lambda k, x: k.gated_rms_norm(x, x, x[0, :3], 1e-6, 8, False),
}


def _delta(kernels: CpuKernels, qkv: Tensor, a: Tensor, dtype: torch.dtype = torch.float32) -> None:
    rows = state_rows([1, 1], [0, 1], {})
    delta(1, 1, 2, 2).run(kernels, [qkv, a, a], torch.zeros(2, 1, 2, 2, dtype=dtype), rows)


def _space(kernels: CpuKernels, xbc: Tensor, dt: Tensor, dtype: torch.dtype = torch.float32) -> None:
    rows = state_rows([1, 1], [0, 1], {})
    space(1, 2, 1, 2).run(kernels, [xbc, dt], torch.zeros(2, 1, 2, 2, dtype=dtype), rows)


@pytest.mark.parametrize("misfit", MISFITS)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(misfit: str) -> None:
    with pytest.raises(AssertionError):
        MISFITS[misfit](CpuKernels(), random(2, 8))


@pytest.mark.slow
@levels
def test_the_kit_finds_nothing_with_two_threads(level: str) -> None:
    names = ("causal_conv", "gated_delta_rule", "state_space", "gated_rms_norm", "states_are_exact", "states_of_nan")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_kernels(LEVELS[level], only=names, seed=1)
    finally:
        torch.set_num_threads(before)
