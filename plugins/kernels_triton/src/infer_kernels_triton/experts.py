"""Mixtures of experts: each token's experts are chosen and summed without the host knowing which.

Pairs of a token and an expert are sorted by expert. One grid of as many tiles as there may be then computes the
products of all experts: each program finds out which expert its tile belongs to. A row's products are added one after
the other in the order of K, as in ``matmul``, and a token's experts in the order of its row.

Shapes: T tokens, D hidden size, X experts, J of those that a token has, P = T J pairs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.contracts.kernels import Expert, ExpertActivation, Routing
from infer.weight import GroupedWeight, Weight
from infer_kernels_triton.configs import LinearConfig, LinearTile, reachable
from infer_kernels_triton.elementwise import gated
from infer_kernels_triton.matmul import chain

log = logging.getLogger(__name__)

SCAN = 1024
"""Pairs that a program of ``plan_kernel`` looks at at a time."""
LOWEST = -3.0e38
"""What a score that is NaN or too low counts as, so that it is still above those that stand for no expert."""


@dataclass(frozen=True)
class PackedExperts:
    """A layer's experts, one after the other in each tensor."""

    gate_up_XNK: Tensor
    down_XNK: Tensor
    gate_up_bias_XN: Tensor | None
    down_bias_XN: Tensor | None


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    shares_ptr,
    X,
    scale,
    least,
    J: tl.constexpr,
    J_PAD: tl.constexpr,
    X_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """One program chooses one token's experts. ``least`` is added to the sum of the chosen scores."""
    row = tl.program_id(0).to(tl.int64)
    size_x = tl.arange(0, X_PAD)
    size_j = tl.arange(0, J_PAD)
    real = size_x < X
    logit = tl.load(logits_ptr + row * X + size_x, mask=real, other=float("-inf")).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-logit)) if SIGMOID else tl.exp(logit - tl.max(logit, 0))
    by = score if SIGMOID else logit
    if bias_ptr is not None:
        by += tl.load(bias_ptr + size_x, mask=real, other=0.0)
    by = tl.where(by > LOWEST, by, LOWEST)
    by = tl.where(real, by, float("-inf"))
    chosen = tl.zeros([J_PAD], tl.int32)
    share = tl.zeros([J_PAD], tl.float32)
    total = 0.0
    for j in range(J):
        best = tl.min(tl.where(by == tl.max(by, 0), size_x, X_PAD), 0)
        own = tl.sum(tl.where(size_x == best, score, 0.0), 0)
        by = tl.where(size_x == best, float("-inf"), by)
        chosen = tl.where(size_j == j, best, chosen)
        share = tl.where(size_j == j, own, share)
        total += own
    if RENORMALIZE:
        share = share / (total + least)
    elif not SIGMOID:
        share = share / tl.sum(tl.where(real, score, 0.0), 0)
    tl.store(experts_ptr + row * J + size_j, chosen, mask=size_j < J)
    tl.store(shares_ptr + row * J + size_j, share * scale, mask=size_j < J)


@triton.jit(do_not_specialize=["P"])
def plan_kernel(experts_ptr, pairs_ptr, bounds_ptr, P, SCAN: tl.constexpr):
    """One program writes the pairs of one expert, in their order, behind those of the experts before it; expert x has
    pairs[bounds[x]:bounds[x + 1]]."""
    expert = tl.program_id(0)
    size_p = tl.arange(0, SCAN)
    less = tl.zeros([SCAN], tl.int32)
    for begin in range(0, P, SCAN):
        pair = begin + size_p
        found = tl.load(experts_ptr + pair, mask=pair < P, other=1 << 30)
        less += (found < expert).to(tl.int32)
    place = tl.sum(less, 0)
    tl.store(bounds_ptr + expert, place)
    if expert == tl.num_programs(0) - 1:
        tl.store(bounds_ptr + expert + 1, P)
    for begin in range(0, P, SCAN):
        pair = begin + size_p
        mine = (tl.load(experts_ptr + pair, mask=pair < P, other=1 << 30) == expert).to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["J"])
def experts_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    bounds_ptr,
    X,
    J,
    N,
    K,
    stride_x,
    GATHER: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes a tile [BLOCK_M, BLOCK_N] of one expert's results. With ``GATHER``, x has a row per token,
    and the results are in the order of ``pairs``. Otherwise x is in that order, and the results are in the pairs'."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    size_x = tl.arange(0, X_PAD)
    begin_x = tl.load(bounds_ptr + size_x, mask=size_x < X, other=0)
    end_x = tl.load(bounds_ptr + 1 + size_x, mask=size_x < X, other=0)
    tiles_x = tl.cdiv(end_x - begin_x, BLOCK_M)
    ends_x = tl.cumsum(tiles_x, 0)
    if tile >= tl.max(ends_x, 0):
        return
    expert = tl.sum((ends_x <= tile).to(tl.int32), 0)
    own = size_x == expert
    first = tl.sum(tl.where(own, begin_x + (tile - ends_x + tiles_x) * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(own, end_x, 0), 0)
    place_m = first + tl.arange(0, BLOCK_M)
    real_m = place_m < last
    pair_m = tl.load(pairs_ptr + place_m, mask=real_m, other=0)
    from_m = pair_m // J if GATHER else place_m
    to_m = place_m if GATHER else pair_m
    column_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    size_k = tl.arange(0, BLOCK_K)
    x_ptr += from_m.to(tl.int64)[:, None] * stride_x + size_k[None, :]
    # Columns past the end wrap around to the first ones, so that their loads need no mask. They are not stored.
    w_ptr += expert.to(tl.int64) * N * K + (column_n % N).to(tl.int64)[None, :] * K + size_k[:, None]
    acc = chain(x_ptr, real_m, w_ptr, size_k, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    real_n = column_n < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + column_n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + to_m.to(tl.int64)[:, None] * N + column_n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real_m[:, None] & real_n[None, :],
    )


@triton.jit
def combine_kernel(results_ptr, shares_ptr, out_ptr, D, J: tl.constexpr, BLOCK: tl.constexpr):
    """One program sums BLOCK columns of one token's results."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < D
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(J):
        share = tl.load(shares_ptr + row * J + j)
        total += share * tl.load(results_ptr + (row * J + j) * D + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + column, total.to(out_ptr.dtype.element_ty), mask=real)


def route(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None, least: float) -> tuple[Tensor, Tensor]:
    """``KernelsProtocol.route``."""
    logits_TX = logits_TX.contiguous()
    (T, X), J = logits_TX.shape, routing.top
    experts_TJ = torch.empty((T, J), dtype=torch.int32, device=logits_TX.device)
    shares_TJ = torch.empty((T, J), dtype=torch.float32, device=logits_TX.device)
    sigmoid = routing.score == "sigmoid"
    if T:
        route_kernel[(T,)](
            logits_TX,
            bias_X,
            experts_TJ,
            shares_TJ,
            X,
            routing.scale,
            least if sigmoid else 0.0,
            J=J,
            J_PAD=triton.next_power_of_2(J),
            X_PAD=triton.next_power_of_2(X),
            SIGMOID=sigmoid,
            RENORMALIZE=routing.renormalize,
            LOWEST=LOWEST,
            enable_fp_fusion=True,
        )
    return experts_TJ, shares_TJ


def pack(
    experts: Iterable[Expert], count: int, configs: Callable[[torch.dtype], LinearConfig], multiprocessors: int
) -> PackedExperts:
    """The experts in tensors of all of them; grouped weights are dequantized. Compiles every kernel of their products
    that ``gated_experts`` may launch."""
    stacks: list[Tensor | None] = []
    for index, expert in enumerate(experts):
        parts = (*map(_plain, expert[:2]), *expert[2:])
        stacks = stacks or [None if part is None else part.new_empty((count, *part.shape)) for part in parts]
        for stack, part in zip(stacks, parts, strict=True):
            if stack is not None and part is not None:
                stack[index] = part
    gate_up, down, gate_up_bias, down_bias = stacks
    assert gate_up is not None
    assert down is not None
    if not gate_up.is_meta:
        dtype, run = gate_up.dtype, functools.partial(experts_kernel.warmup, grid=(1,))
        config = configs(dtype)
        for weight, bias, gather in ((gate_up, gate_up_bias, True), (down, down_bias, False)):
            X, N, K = weight.shape
            tiles = reachable(config, X * N, multiprocessors)
            for c in tiles.union(config.tile(1, used * N, multiprocessors) for used in range(1, X)):
                _launch(run, c, config.block_k, dtype, weight, bias, dtype, torch.int32, torch.int32, 3, K, gather)
    return PackedExperts(gate_up, down, gate_up_bias, down_bias)


def gated_experts(
    x_TD: Tensor,
    experts_TJ: Tensor,
    shares_TJ: Tensor,
    packed: PackedExperts,
    activation: ExpertActivation,
    config: LinearConfig,
    multiprocessors: int,
) -> Tensor:
    """``KernelsProtocol.gated_experts``."""
    if x_TD.stride(-1) != 1:
        x_TD = x_TD.contiguous()
    (T, J), (X, _, D) = experts_TJ.shape, packed.gate_up_XNK.shape
    P, device = T * J, x_TD.device
    out_TD = torch.empty((T, D), dtype=x_TD.dtype, device=device)
    if not T:
        return out_TD
    pairs, bounds = (torch.empty(size, dtype=torch.int32, device=device) for size in (P, X + 1))
    plan_kernel[(X,)](experts_TJ.contiguous(), pairs, bounds, P, SCAN=SCAN)

    def product(x: Tensor, weight_XNK: Tensor, bias_XN: Tensor | None, gather: bool) -> Tensor:
        """The products of all pairs, as if each of as many experts as there may be had as many rows."""
        size = weight_XNK.shape[1]
        c = config.tile(triton.cdiv(P, X), min(P, X) * size, multiprocessors)
        most = min(P, X) + P // c.block_m  # tiles of rows: each expert may have one that is not full
        out = torch.empty((P, size), dtype=x.dtype, device=device)
        run = experts_kernel[(most * triton.cdiv(size, c.block_n),)]
        _launch(run, c, config.block_k, x, weight_XNK, bias_XN, out, pairs, bounds, J, x.stride(0), gather)
        return out

    hidden = product(x_TD, packed.gate_up_XNK, packed.gate_up_bias_XN, True)
    if activation == "relu2":
        hidden = hidden.relu_().square_()
    else:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = gated(gate, up, activation)
    results = product(hidden, packed.down_XNK, packed.down_bias_XN, False)
    block = min(1024, triton.next_power_of_2(D))
    combine_kernel[(T, triton.cdiv(D, block))](
        results, shares_TJ.contiguous(), out_TD, D, J=J, BLOCK=block, enable_fp_fusion=True
    )
    return out_TD


def _plain(weight: Weight) -> Tensor:
    if isinstance(weight, GroupedWeight):
        _warn(str(weight))
        return replace(weight, int8_activations=False).dequantize()
    return weight


@functools.cache
def _warn(weights: str) -> None:
    log.warning("%s of experts are dequantized: these kernels hold experts as plain weights.", weights)


def _launch(
    run: Callable[..., object],
    c: LinearTile,
    block_k: int,
    x: Tensor | torch.dtype,
    weight_XNK: Tensor,
    bias_XN: Tensor | None,
    out: Tensor | torch.dtype,
    pairs: Tensor | torch.dtype,
    bounds: Tensor | torch.dtype,
    J: int,
    stride_x: int,
    gather: bool,
) -> None:
    X, N, K = weight_XNK.shape
    run(
        x,
        weight_XNK,
        bias_XN,
        out,
        pairs,
        bounds,
        X,
        J,
        N,
        K,
        stride_x,
        GATHER=gather,
        EVEN_K=K % block_k == 0,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        BLOCK_K=block_k,
        X_PAD=triton.next_power_of_2(X),
        PRECISION="ieee" if weight_XNK.dtype == torch.float32 else "tf32",
        num_warps=c.warps,
        num_stages=c.stages,
        enable_fp_fusion=True,
    )
