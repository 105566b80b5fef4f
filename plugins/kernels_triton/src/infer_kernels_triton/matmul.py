"""x @ w.T in which a row's bits do not depend on how many rows there are.

Vendor libraries choose an algorithm by the number of rows, and with it the order of summation. Here every tile
adds the products of a row one after the other in the order of K, in steps of the same size, so that tiles may be chosen
by rows and columns. Rows that a tile lacks are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer_kernels_triton.configs import LinearConfig, LinearTile, reachable

GROUP = 8
"""How many tiles of rows go through the columns together, so that rows and columns stay in the L2 cache."""


@triton.jit
def tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The rows and the columns of this program's tile."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    row_m = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return row_m, column_n


@triton.jit
def chain(
    x_ptr,
    real_m,
    w_ptr,
    size_k,
    K,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums of a tile, fp32 [BLOCK_M, BLOCK_N], in the order of K. Pointers to x are [BLOCK_M, BLOCK_K], to w
    [BLOCK_K, BLOCK_N]. Of x, only rows that are real are read; the others are zeros."""
    # Without this, some compilers cannot tell the accumulators before the loop from those in it, and wait after every
    # product.
    tl.assume(K > 0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptr + begin, mask=real_m[:, None], other=0.0)
            w = tl.load(w_ptr + begin)
        else:
            x = tl.load(x_ptr + begin, mask=real_m[:, None] & (size_k[None, :] < K - begin), other=0.0)
            w = tl.load(w_ptr + begin, mask=size_k[:, None] < K - begin, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M"])  # otherwise it is compiled again for one row, and for multiples of 16
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_x,
    stride_w,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes a tile [BLOCK_M, BLOCK_N] of the result."""
    row_m, column_n = tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    size_k = tl.arange(0, BLOCK_K)
    real_m = row_m < M
    x_ptr += row_m.to(tl.int64)[:, None] * stride_x + size_k[None, :]
    # Columns past the end wrap around to the first ones, so that their loads need no mask. They are not stored.
    w_ptr += (column_n % N).to(tl.int64)[None, :] * stride_w + size_k[:, None]
    acc = chain(x_ptr, real_m, w_ptr, size_k, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    real_n = column_n < N
    if BIAS:
        acc += tl.load(bias_ptr + column_n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row_m.to(tl.int64)[:, None] * N + column_n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real_m[:, None] & real_n[None, :],
    )


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, config: LinearConfig, multiprocessors: int
) -> Tensor:
    """x @ w.T + bias, [T, N]. The rows of x may have any stride."""
    x = x_TK.flatten(0, -2)
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, N = len(x), len(weight_NK)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if M:
        c = config.tile(M, N, multiprocessors)
        grid = (triton.cdiv(M, c.block_m) * triton.cdiv(N, c.block_n),)
        _launch(linear_kernel[grid], c, config.block_k, x, weight_NK, bias_N, out, M, x.stride(0))
    return out.view(*x_TK.shape[:-1], N)


def warm_up(weight_NK: Tensor, bias_N: Tensor | None, config: LinearConfig, multiprocessors: int) -> None:
    """Compile every kernel that ``linear`` may launch for this weight."""
    dtype, (N, K) = weight_NK.dtype, weight_NK.shape
    run = functools.partial(linear_kernel.warmup, grid=(1,))
    for c in reachable(config, N, multiprocessors):
        _launch(run, c, config.block_k, dtype, weight_NK, bias_N, dtype, c.block_m, K)


def _launch(
    run: Callable[..., object],
    c: LinearTile,
    block_k: int,
    x: Tensor | torch.dtype,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out: Tensor | torch.dtype,
    rows: int,
    stride_x: int,
) -> None:
    N, K = weight_NK.shape
    run(
        x,
        weight_NK,
        bias_N,
        out,
        rows,
        N,
        K,
        stride_x,
        weight_NK.stride(0),
        EVEN_K=K % block_k == 0,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        BIAS=bias_N is not None,
        PRECISION="ieee" if weight_NK.dtype == torch.float32 else "tf32",
        num_warps=c.warps,
        num_stages=c.stages,
        enable_fp_fusion=True,
    )
