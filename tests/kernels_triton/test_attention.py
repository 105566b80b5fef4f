"""Attention: its results, and that a query's bits do not depend on how it is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention import Scene, spec
from tests.examples import examples, slowly
from torch import Tensor

from infer.contracts.attention import AttentionSpec, KVDtype
from infer.errors import SettingsError
from infer_kernels_triton.provider import TritonKernels

MIXED = [(0, 1), (130, 1), (300, 1), (0, 5), (7, 3), (127, 2), (60, 70), (0, 140), (255, 130), (31, 1)]
DECODES = [(0, 1), (63, 1), (64, 1), (200, 1), (511, 1)]
SINKS = (0.5, -1e4, 3.0, 1e4)
ALONE = 0
"""Of programs: sequences are not split."""


def make(device: str, programs: int | None = None) -> TritonKernels:
    kernels = TritonKernels(torch.device(device))
    if programs is not None:
        kernels._programs = programs
    return kernels


def on(device: str, spec: AttentionSpec) -> AttentionSpec:
    return spec if spec.sinks_H is None else replace(spec, sinks_H=spec.sinks_H.to(device))


def close(actual: Tensor, expected: Tensor) -> None:
    """Within what rounding the weights to the values' type does, as every fused attention does."""
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=bound, atol=bound)


def attend(
    extends: list[tuple[int, int]],
    spec: AttentionSpec,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    kv_dtype: KVDtype = "auto",
) -> None:
    spec = on(device, spec)
    scene = Scene(spec, extends, block_size, dtype, kernels=make(device), device=device, kv_dtype=kv_dtype)
    found = scene.attend()
    close(found, scene.attend64())
    unsplit = Scene(spec, extends, block_size, dtype, kernels=make(device, ALONE), device=device, kv_dtype=kv_dtype)
    assert torch.equal(found, unsplit.attend())


def first_in_each(first: Sequence[Any], others: Sequence[Any], *dtypes: torch.dtype) -> list[Any]:
    """Cases of bfloat16, and the first of them in other types, too. ``first`` alone is quick."""
    slow = [(case, torch.bfloat16) for case in others] + [(first[0], dtype) for dtype in dtypes]
    return [
        *((case, torch.bfloat16) for case in first),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in slow),
    ]


@pytest.mark.parametrize(("window", "dtype"), first_in_each([9], [None, 1, 33, 63, 64, 65], torch.float32))
@pytest.mark.parametrize("extends", [*slowly(MIXED), DECODES], ids=["mixed", "decodes"])
def test_windows(extends: list[tuple[int, int]], window: int | None, dtype: torch.dtype, device: str) -> None:
    attend(extends, spec(window=window), 16, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "dtype"), first_in_each([16], [1, 500], torch.float32, torch.float16))
def test_blocks_and_soft_cap_and_sinks(block_size: int, dtype: torch.dtype, device: str) -> None:
    attend(MIXED, spec(cap=0.7, sinks=SINKS if block_size == 16 else ()), block_size, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "dtype"),
    first_in_each(
        [(spec(6, 2, cap=0.7, window=33, sinks=SINKS), 16)],
        [(spec(6, 2, 20), 500), (spec(2, 2, 128), 1)],
        torch.float32,
        torch.float16,
    ),
)
def test_quantized_keys_and_values(where: tuple[AttentionSpec, int], dtype: torch.dtype, device: str) -> None:
    attend(MIXED, *where, dtype, device, "int8")


def test_small_weights_do_not_vanish_with_int8_in_float16(device: str) -> None:
    """31 tokens of the value 1 and, each, a weight beside the last one's that float16 holds, but not times a scale."""
    scene = Scene(spec(size=16), [(31, 1)], 16, torch.float16, kernels=make(device), device=device, kv_dtype="int8")
    for x, first, last in ((scene.k[0], 0.0, 50.8), (scene.v[0], 1.0, 0.0), (scene.q[0], 0.0, 1.0)):
        x[:] = first
        x[-1, :, slice(None) if first else 0] = last
    expected = scene.attend64()
    assert 8e-5 < expected.min() <= expected.max() < 1e-4
    torch.testing.assert_close(scene.attend().cpu().double(), expected, rtol=2e-2, atol=0)


HEADS = [(1, 1, 64), (8, 1, 96), (4, 4, 128), (32, 2, 16), (70, 1, 16)]


@pytest.mark.parametrize(("heads", "dtype"), first_in_each([(6, 2, 20), (3, 1, 256)], HEADS, torch.float32))
def test_head_counts_and_sizes(heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Query heads, K/V heads and their size."""
    attend([(40, 1), (90, 1), (0, 33), (50, 30)], spec(*heads), 16, dtype, device)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, "auto"),
        *slowly((torch.float32, "auto"), (torch.bfloat16, "int8"), (torch.float16, "int8")),
    ],
)
def test_large_heads_are_cut_in_two(dtype: torch.dtype, kv_dtype: KVDtype, device: str) -> None:
    """As those of latent attention, with one that is not of a whole number of tiles."""
    for size in (576, 530):
        extends = [(40, 1), (300, 1), (0, 33), (50, 30)]
        attend(extends, spec(5, 1, size, cap=0.7, window=65, sinks=(*SINKS, 0.0)), 16, dtype, device, kv_dtype)


def test_no_larger_heads(device: str) -> None:
    with pytest.raises(SettingsError, match="A head of this model has 578 values in the cache"):
        attend([(40, 1)], spec(1, 1, 578), 16, torch.bfloat16, device)


@pytest.mark.slow
def test_large_scores(device: str) -> None:
    scene = Scene(spec(cap=None), DECODES, 16, kernels=make(device), device=device)
    scene.q = [q * 1e4 for q in scene.q]
    close(scene.attend(), scene.attend64())


@settings(max_examples=examples(10, 5))
@given(
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 33, 64]),
    st.sampled_from([ALONE, 4, 1000]),
    st.sampled_from(["auto", "int8"]),
    st.sampled_from([(), SINKS]),
)
def test_any_cut_and_any_company(
    device: str,
    data: st.DataObject,
    dtype: torch.dtype,
    window: int | None,
    programs: int,
    kv_dtype: KVDtype,
    sinks: tuple[float, ...],
) -> None:
    """A sequence in one go, and in pieces among others, in other blocks."""
    length = data.draw(st.integers(2, 150))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=3)))
    where = on(device, spec(window=window, sinks=sinks))
    whole = Scene(where, [(0, length)], 16, dtype, seed=3, kernels=make(device), device=device, kv_dtype=kv_dtype)
    expected = whole.attend()
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        others = data.draw(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 20])), max_size=2))
        place = data.draw(st.integers(0, len(others)))
        extends = [*others[:place], (begin, end - begin), *others[place:]]
        pieces = Scene(where, extends, 7, dtype, kernels=make(device, programs), device=device, kv_dtype=kv_dtype)
        pieces.k[place], pieces.v[place] = whole.k[0][:end], whole.v[0][:end]
        pieces.q[place] = whole.q[0][begin:end]
        row = sum(n for _, n in extends[:place])
        assert torch.equal(pieces.attend()[row : row + end - begin], expected[begin:end])
