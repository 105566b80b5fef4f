"""Kernels of recurrent layers, against the reference over odd shapes, and that bits do not depend on chunks."""

from __future__ import annotations

import pytest
import torch
from tests.attention import random
from tests.examples import slowly
from torch import Tensor

from infer.contracts.states import StateRows
from infer.device import same_bits
from infer.kernels.reference import ReferenceKernels
from infer_kernels_triton.provider import TritonKernels
from infer_testing import check_kernels
from infer_testing.recurrent import Layer, conv, delta, sliced, space, state_rows

REFERENCE = ReferenceKernels()
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
LAYERS: dict[str, Layer] = {
    "conv": conv(300, 4, bias=True),
    "conv of 3": conv(70, 3, silu=False),
    "delta, tiny": delta(1, 2, 8, 8),
    "delta, odd": delta(2, 4, 13, 45, max_beta=2.0),
    "delta, by channel": delta(2, 2, 13, 45, channel_decay=True),
    "space, tiny": space(4, 8, 2, 16, clamped=True),
    "space, odd": space(3, 45, 1, 10),
}
FAST = ("conv", "delta, tiny", "delta, by channel", "space, odd")
SLOW = ("conv of 3", "delta, odd", "space, tiny")
layers = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, BF16) for name in FAST),
        *slowly(*((name, BF16) for name in SLOW)),
        *slowly(*((name, dtype) for name in ("conv of 3", "delta, tiny", "space, tiny") for dtype in (FP32, FP16))),
    ],
    ids=str,
)
"""Each layer in one type, and one of each kind in the others: loads and stores are what a type changes."""
LENS, READ = (1, 11, 0, 3), (0, 1, 0, 0)
SAVE = {0: 2, 3: 3, 11: 1, 14: 4}
"""One token; a chunk in place, with a checkpoint on the way; nothing; and a chunk that begins like the first."""


@pytest.fixture
def kernels(device: str) -> TritonKernels:
    return TritonKernels(torch.device(device))


def same(actual: Tensor, expected: Tensor) -> None:
    """But for a rounding of the result's type, and sums in another order before it."""
    close = {"rtol": 1e-5, "atol": 1e-5} if actual.dtype == torch.float32 else {}
    torch.testing.assert_close(actual.cpu(), expected.cpu(), **close)  # type: ignore[arg-type]


def given(layer: Layer, device: str, dtype: torch.dtype) -> tuple[Layer, list[Tensor], Tensor, StateRows]:
    where = torch.device(device)
    inputs = [random(sum(LENS), n, dtype=dtype, seed=i).to(device) for i, n in enumerate(layer.widths)]
    states = random(6, *layer.shape, dtype=layer.state_dtype(dtype), seed=9).to(device)
    return layer.to(where, dtype), inputs, states, state_rows(LENS, READ, SAVE, where)


@layers
def test_results_and_states(kernels: TritonKernels, device: str, name: str, dtype: torch.dtype) -> None:
    layer, inputs, states, rows = given(LAYERS[name], device, dtype)
    expected_states = states.clone()
    same(layer.run(kernels, sliced(inputs), states, rows), layer.run(REFERENCE, inputs, expected_states, rows))
    same(states, expected_states)
    assert same_bits(states[[0, 5]], expected_states[[0, 5]])


@layers
def test_bits_do_not_depend_on_chunks_and_company(
    kernels: TritonKernels, device: str, name: str, dtype: torch.dtype
) -> None:
    layer, inputs, states, rows = given(LAYERS[name], device, dtype)
    alone = states.clone()
    expected = layer.run(kernels, inputs, states, rows)
    begin = 1
    for end, save in ((4, 3), (5, 5), (12, 1)):
        read = {1: 1, 4: 3, 5: 5}[begin]
        part = state_rows([end - begin], [read], {end - begin - 1: save}, torch.device(device))
        found = layer.run(kernels, [x[begin:end] for x in inputs], alone, part)
        assert same_bits(found, expected[begin:end])
        begin = end
    assert same_bits(alone[[1, 3]], states[[1, 3]])


@pytest.mark.parametrize("dtype", [BF16, *slowly(FP32, FP16)], ids=["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("size", "group", "width"), [(64, 16, 16), (96, 48, 96), (60, 20, 10), (5, 5, 5)])
def test_gated_norms(
    kernels: TritonKernels, device: str, size: int, group: int, width: int, gate_first: bool, dtype: torch.dtype
) -> None:
    x, gate = (random(5, size, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
    weight = random(width, dtype=dtype, seed=3).to(device)
    apart = sliced([x, gate])
    found = kernels.gated_rms_norm(apart[0], apart[1], weight, 1e-5, group, gate_first)
    same(found, REFERENCE.gated_rms_norm(x, gate, weight, 1e-5, group, gate_first))
    assert same_bits(found[-1:], kernels.gated_rms_norm(x[-1:], gate[-1:], weight, 1e-5, group, gate_first))


def test_small_steps_are_not_rounded_to_nothing(kernels: TritonKernels, device: str) -> None:
    """e^-20 beside 1 is nothing in fp32, but log(1 + e^-20) is not."""
    layer, inputs, states, rows = given(space(2, 8, 1, 16), device, torch.float32)
    inputs[1].fill_(-20.0)
    states.zero_()
    expected_states = states.clone()
    layer.run(kernels, inputs, states, rows)
    layer.run(REFERENCE, inputs, expected_states, rows)
    torch.testing.assert_close(states.cpu(), expected_states.cpu(), rtol=1e-4, atol=0)
    assert states[1].any()


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 5, 7, 11])
def test_the_kit_finds_nothing(kernels: TritonKernels, device: str, case: int) -> None:
    """In one type: what another changes is above. The cases have each of the kit's sizes of delta rules and state
    spaces, and each kind of layer in chunks."""
    names = ("causal_conv", "gated_delta_rule", "state_space", "gated_rms_norm", "states_are_exact", "states_of_nan")
    check_kernels(kernels, device=torch.device(device), dtypes=(BF16,), only=names, case=case)
