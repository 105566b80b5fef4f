"""Matrix products: their results against float64, and that each row's bits depend on that row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.attention import random
from tests.examples import slowly
from tests.products import within_rounding
from triton.runtime.interpreter import InterpreterBuilder

from infer_kernels_triton.configs import INTERPRETER, LinearConfig, LinearTile, configs
from infer_kernels_triton.matmul import linear
from infer_kernels_triton.provider import TritonKernels

ROWS = [1, 2, 15, 16, 17, 33, 130]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16))],
    ids=["bf16", "fp32", "fp16"],
)
@pytest.mark.parametrize("bias", [True, *slowly(False)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (64, 128), (50, 96), *slowly((130, 70))])
def test_products_and_their_rows(n: int, k: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    x = random(ROWS[-1], k, dtype=dtype).to(device)
    weight, b = random(n, k, dtype=dtype, seed=1).to(device), random(n, dtype=dtype, seed=2).to(device)
    packed = kernels.pack(weight, b if bias else None)
    whole = kernels.linear(x, packed)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(whole.double(), expected, rtol=bound, atol=bound)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])


def canceling(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values over many magnitudes: another order of adding gives other bits."""
    return (random(*shape, seed=seed) * torch.exp2(6 * random(*shape, seed=seed + 1))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float32)], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("n", "k"), [(45, 77), *slowly((130, 96))])
def test_every_tile_gives_the_same_bits(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """Each of the table, and tiles of other sizes, over several blocks of rows, columns and K, and parts of blocks."""
    config = configs(torch.device(device))[dtype.itemsize].linear
    x, weight = canceling(70, k, dtype=dtype, seed=1).to(device), canceling(n, k, dtype=dtype, seed=3).to(device)
    tiles = [*config.tiles]
    if device == "cpu":
        tiles += [LinearTile(64, 16, 1, 1), LinearTile(16, 64, 1, 1)]
    first, *others = (linear(x, weight, None, LinearConfig(config.block_k, (tile,)), 1) for tile in tiles)
    for tile, found in zip(tiles[1:], others, strict=True):
        assert torch.equal(found, first), tile
    assert torch.equal(linear(x[-9:], weight, None, config, 1), first[-9:])
    assert within_rounding(first.bfloat16(), x, weight)


@pytest.mark.parametrize(("rows", "k"), [(1, 64), (19, 40)])
def test_rows_that_a_tile_lacks_are_not_read(rows: int, k: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cpu":
        pytest.skip("only the interpreter says what is read")
    memory, weight, tile = random(64, k), random(40, k, seed=1), INTERPRETER.linear.tiles[0]
    x = memory[:rows]
    read, load = [], InterpreterBuilder.create_masked_load

    def noting(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        places = (pointers.data[mask.data].astype(np.int64) - memory.data_ptr()) // memory.itemsize
        read.extend(places[(places >= 0) & (places < memory.numel())])
        return load(self, pointers, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting)
    linear(x, weight, None, LinearConfig(INTERPRETER.linear.block_k, (tile,)), 1)
    tiles_n = -(-40 // tile.block_n)
    assert sorted(read) == sorted([*range(x.numel())] * tiles_n)


def test_rows_of_a_wider_tensor(device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    wide = random(5, 3, 96).to(device)
    weight = random(20, 32, seed=1).to(device)
    packed = kernels.pack(weight)
    part = wide[:, 1, 32:64]
    assert torch.equal(kernels.linear(part, packed), kernels.linear(part.contiguous(), packed))
    assert kernels.linear(wide[..., :32], packed).shape == (5, 3, 20)


def test_no_rows(device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    assert kernels.linear(torch.empty(0, 32, device=device), kernels.pack(random(20, 32).to(device))).shape == (0, 20)


def test_what_rounding_may_do_to_a_product() -> None:
    """Ten thousand additions in fp32, each cut off as matrix units do, are within; one tile left out is not."""
    k = 12288
    x, weight = (random(2, k, dtype=torch.bfloat16, seed=seed).abs() for seed in (1, 2))
    products = (x[:, None].double() * weight[None].double()).numpy()
    total = np.zeros((2, 2))
    for i in range(k):
        total += products[..., i]
        mantissa, exponent = np.frexp(total)
        total = np.ldexp(np.floor(mantissa * 2.0**24), exponent - 24)
    assert within_rounding(torch.from_numpy(total).bfloat16(), x, weight)
    left_out = torch.from_numpy(products[..., : k - 64].sum(-1))
    assert not within_rounding(left_out.bfloat16(), x, weight)
