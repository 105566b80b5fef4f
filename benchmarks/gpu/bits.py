"""python -m benchmarks.gpu.bits [--json FILE]: which ways to multiply give the same bits, and from how many rows on.

Each way multiplies the same rows, and the figures say how many of its rows equal, bit for bit, those of the provider's
own product. If all are equal, the way may replace the provider's product for that number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.gpu import lines
from benchmarks.gpu.dry import DEVICE, DRY, SHAPES
from benchmarks.gpu.timing import Run, seconds
from benchmarks.shapes import Costs
from torch import Tensor

from infer_kernels_triton.configs import LinearConfig, LinearTile, multiprocessors
from infer_kernels_triton.matmul import linear
from infer_kernels_triton.provider import TritonKernels

Product = Callable[[Tensor, Tensor], Tensor]
ROWS = (1, 2, 3) if DRY else (1, 2, 8, 16, 17, 32, 64, 65, 128, 256, 512, 2048)
SIZES = sorted(set(Costs(SHAPES["Llama-3.2-1B"]).linear_shapes.values()))[: 1 if DRY else None]


def canceling(rows: int, columns: int, seed: int) -> Tensor:
    """Values of many magnitudes, so that another order of summation gives other bits."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, columns, device=DEVICE, generator=generator)
    return (x * torch.exp2(8 * torch.randn(rows, columns, device=DEVICE, generator=generator))).to(torch.bfloat16)


def tiled(block_m: int, block_n: int, block_k: int = 64, warps: int = 4) -> Product:
    config = LinearConfig(block_k, (LinearTile(block_m, block_n, warps, stages=1 if DRY else 3),))
    return lambda x, weight: linear(x, weight, None, config, multiprocessors(DEVICE))


def swapped(product: Product) -> Product:
    """The product with weight and input exchanged, so that few input rows fill the narrow side of a tile."""
    return lambda x, weight: product(weight, x).T.contiguous()


def vendors(library: str, split_k: bool) -> Product:
    """torch's product by the given library; without ``split_k``, sums over K are not split."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if DRY:
            return torch.nn.functional.linear(x, weight)
        matmul = torch.backends.cuda.matmul
        before = torch.backends.cuda.preferred_blas_library()
        try:
            torch.backends.cuda.preferred_blas_library(library)
            matmul.allow_bf16_reduced_precision_reduction = True if split_k else (False, False)
            return torch.nn.functional.linear(x, weight)
        finally:
            torch.backends.cuda.preferred_blas_library(before)
            matmul.allow_bf16_reduced_precision_reduction = True

    return product


def ways() -> dict[str, Product]:
    """All ways to multiply, by name. Tiles of 16 and 32 rows use mma.sync everywhere; from 64 rows on, Hopper uses
    wgmma and Blackwell tcgen05."""
    found = {f"tile {m}x{n}": tiled(m, n) for m, n in ((16, 32), (32, 32), (64, 16), (64, 32), (64, 64), (64, 128))}
    found |= {
        "tile 64x256": tiled(64, 256),
        "tile 128x128": tiled(128, 128, warps=8),
        "tile 128x256": tiled(128, 256, warps=8),
        "tile 64x32x128": tiled(64, 32, 128),
    }
    found |= {f"swapped 64x{n}": swapped(tiled(64, n)) for n in (16, 32, 64)}
    for library in ("cublas", "cublaslt"):
        found |= {library: vendors(library, True), f"{library} without split-K": vendors(library, False)}
    return found


def always(run: Run) -> Callable[[], Run]:
    return lambda: run


def compare(n: int, k: int) -> Iterator[dict[str, Any]]:
    kernels = TritonKernels(DEVICE)
    x, weight = canceling(ROWS[-1], k, 1), canceling(n, k, 2)
    packed = kernels.pack(weight)
    expected = kernels.linear(x, packed)
    for name, product in {"provider": lambda x, _: kernels.linear(x, packed), **ways()}.items():
        for rows in ROWS:
            line: dict[str, Any] = {"way": name, "size": f"{rows}x{n}x{k}"}
            try:
                same = (product(x[:rows], weight) == expected[:rows]).all(dim=1)
                line["rows equal"] = f"{int(same.sum())}/{rows}"
                line["us"] = None if DRY else 1e6 * seconds(always(partial(product, x[:rows], weight)), 2 * n * k, 0.02)
            except Exception as error:  # report it and go on: other ways may work
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            yield line


def measure() -> Iterator[dict[str, Any]]:
    for n, k in SIZES:
        yield from compare(n, k)


if __name__ == "__main__":
    sys.exit(lines.main("python -m benchmarks.gpu.bits", "Which ways to multiply give the same bits.", measure()))
