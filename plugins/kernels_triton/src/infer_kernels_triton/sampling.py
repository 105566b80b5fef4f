"""Drawing a token per row without sorting the vocabulary.

Filters are thresholds, and a threshold is found bit by bit: it is the largest value such that enough tokens, or enough
probability, are at or above it. Of the tokens at top-k's threshold, the first ones are kept. The draw goes through the
remaining tokens in vocabulary order. One program per row reads the logits several times; they are in the L2 cache,
since they have just been written.

Shapes: N rows, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.contracts.kernels import Draws

SIGNIFICANT = {torch.float32: 32, torch.float16: 19, torch.bfloat16: 16}
"""In how many leading bits of a float32 logits of each dtype can differ."""
BLOCK = 4096


@triton.jit
def _load(logits_ptr, begin, V, BLOCK: tl.constexpr):
    """A block of logits and their keys: integers in the same order. 0 and -0 have the same key."""
    index = begin + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + index, mask=index < V, other=float("-inf")).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return x, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(logits_ptr, V, top, heat, edge, most, threshold, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens whose key is at least ``threshold``, or the sum of their weights exp((x - top) / heat). Of
    those whose key is at most ``edge``, only ids up to ``most`` count."""
    total = tl.zeros([], tl.float64)
    for begin in range(0, V, BLOCK):
        x, key = _load(logits_ptr, begin, V, BLOCK)
        weight = tl.full([BLOCK], 1.0, tl.float32) if COUNT else tl.exp((x - top) / heat)
        index = begin + tl.arange(0, BLOCK)
        real = (key >= threshold) & (index < V) & ((key > edge) | (index <= most))
        total += tl.sum(tl.where(real, weight, 0.0)).to(tl.float64)
    return total


@triton.jit
def _threshold(
    logits_ptr, V, top, heat, edge, most, wanted, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key such that ``wanted`` tokens (with COUNT), or tokens of weight ``wanted``, have at least that key,
    of those that ``_above`` counts."""
    zero = tl.zeros([], tl.int32)
    enough = _above(logits_ptr, V, top, heat, edge, most, zero, COUNT, BLOCK) >= wanted
    threshold = tl.where(enough, zero, tl.full([], -0x80000000, tl.int32))
    for i in range(1, BITS):
        higher = threshold + (tl.full([], 1, tl.int32) << (31 - i))
        enough = _above(logits_ptr, V, top, heat, edge, most, higher, COUNT, BLOCK) >= wanted
        threshold = tl.where(enough, higher, threshold)
    return threshold


@triton.jit
def _last_tied(logits_ptr, V, low, high, wanted, BLOCK: tl.constexpr):
    """The id of the ``wanted``-th token, in vocabulary order, whose key is from ``low`` to ``high``."""
    last = tl.zeros([], tl.int32) + V
    before = tl.zeros([], tl.int32)
    for begin in range(0, V, BLOCK):
        _, key = _load(logits_ptr, begin, V, BLOCK)
        index = begin + tl.arange(0, BLOCK)
        tied = ((key >= low) & (key <= high) & (index < V)).to(tl.int32)
        last = tl.minimum(last, tl.min(tl.where((tied > 0) & (before + tl.cumsum(tied) == wanted), index, V)))
        before += tl.sum(tied)
    return last


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    token_ptr,
    stride_n,
    V,
    GREEDY: tl.constexpr,
    RANKED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program draws one row's token."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride_n
    index = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    broken = tl.zeros([], tl.int32)
    for begin in range(0, V, BLOCK):
        x = tl.load(logits_ptr + begin + index, mask=begin + index < V, other=float("-inf")).to(tl.float32)
        highest = tl.max(x)
        first = begin + tl.min(tl.where(x == highest, index, BLOCK))
        token = tl.where(highest > top, first, token)
        top = tl.maximum(top, highest)
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32)))
    finite = (broken == 0) & (top > float("-inf")) & (top < float("inf"))
    if not GREEDY:
        heat = tl.load(temperature_ptr + row)
        if finite & (heat > 0.0):
            threshold = tl.full([], -0x80000000, tl.int32)
            edge = threshold
            most = tl.zeros([], tl.int32) + V
            if RANKED:
                top_k = tl.load(top_k_ptr + row)
                top_p = tl.load(top_p_ptr + row)
                if (top_k > 0) & (top_k < V):
                    wanted = top_k.to(tl.float64)
                    threshold = _threshold(logits_ptr, V, top, heat, edge, most, wanted, True, BITS, BLOCK)
                    tied = threshold | ((1 << (32 - BITS)) - 1)  # keys of negative numbers end with ones
                    above = _above(logits_ptr, V, top, heat, edge, most, tied + 1, True, BLOCK)
                    most = _last_tied(logits_ptr, V, threshold, tied, (wanted - above).to(tl.int32), BLOCK)
                    edge = tied
                if top_p < 1.0:
                    mass = _above(logits_ptr, V, top, heat, edge, most, threshold, False, BLOCK) * top_p.to(tl.float64)
                    found = _threshold(logits_ptr, V, top, heat, edge, most, mass, False, BITS, BLOCK)
                    threshold = tl.maximum(threshold, found)
            min_p = tl.load(min_p_ptr + row)
            total = tl.zeros([], tl.float64)
            last = tl.zeros([], tl.int32)
            for begin in range(0, V, BLOCK):
                x, key = _load(logits_ptr, begin, V, BLOCK)
                weight = tl.exp((x - top) / heat)
                kept = (key >= threshold) & (weight >= min_p) & (weight > 0.0)
                kept &= (key > edge) | (begin + index <= most)
                total += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64))
                last = tl.maximum(last, tl.max(tl.where(kept, begin + index, 0)))
            # Take the first kept token whose cumulative weight passes the target. By rounding there may be none; then
            # take the last kept one.
            target = tl.load(uniform_ptr + row) * total
            before = tl.zeros([], tl.float64)
            token = last
            for begin in range(0, V, BLOCK):
                x, key = _load(logits_ptr, begin, V, BLOCK)
                weight = tl.exp((x - top) / heat)
                kept = (key >= threshold) & (weight >= min_p) & (weight > 0.0)
                kept &= (key > edge) | (begin + index <= most)
                weight = tl.where(kept, weight, 0.0).to(tl.float64)
                passed = kept & (before + tl.cumsum(weight) > target)
                token = tl.minimum(token, tl.min(tl.where(passed, begin + index, last)))
                before += tl.sum(weight)
    tl.store(token_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample(logits_NV: Tensor, draws: Draws, first: bool) -> Tensor:
    """``KernelsProtocol.sample``. The ``first`` call compiles the kernels that any draws may need."""
    N, V = logits_NV.shape
    token_N = torch.empty(N, dtype=torch.int64, device=logits_NV.device)

    def launch(run: Callable[..., object], logits: Tensor | torch.dtype, greedy: bool, ranked: bool) -> None:
        dtype = logits if isinstance(logits, torch.dtype) else logits.dtype
        run(
            logits,
            draws.temperature_N,
            draws.top_k_N,
            draws.top_p_N,
            draws.min_p_N,
            draws.uniform_N,
            token_N,
            logits_NV.stride(0),
            V,
            GREEDY=greedy,
            RANKED=ranked,
            BITS=SIGNIFICANT[dtype],
            BLOCK=min(BLOCK, triton.next_power_of_2(V)),
            num_warps=8,
            enable_fp_fusion=True,
        )

    if first:
        for dtype in {logits_NV.dtype, torch.float32}:  # edited logits are float32
            for greedy, ranked in ((True, False), (False, False), (False, True)):
                launch(functools.partial(sample_kernel.warmup, grid=(1,)), dtype, greedy, ranked)
    launch(sample_kernel[(N,)], logits_NV, draws.greedy, draws.ranked and not draws.greedy)
    return token_N
