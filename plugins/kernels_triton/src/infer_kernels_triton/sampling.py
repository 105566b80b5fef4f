"""Drawing a token per row without sorting the vocabulary.

Several programs share a row, and each has a span of it. Filters are thresholds: the largest value such that enough
tokens, or enough probability, are at or above it. A threshold is found digit by digit. In each pass, the programs count
or weigh the tokens of their spans by the next digit; those of the following pass add up what all of them have found.
Of the tokens at top-k's threshold, the first ones are kept. The draw goes through the remaining tokens in vocabulary
order. All passes but the first find the logits in the L2 cache.

Weights are integers, so that sums are exact in any order: a row's token depends neither on how many programs there are
nor on the logits' dtype, which decides how values are laid out over threads.

Shapes: N rows, V vocabulary size, S spans per row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.contracts.kernels import Draws

DIGIT = tl.constexpr(4)
"""Bits of a digit."""
DIGITS = tl.constexpr(1 << 4)
ROUNDS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 4}
"""In how many leading digits of a float32 logits of each dtype can differ."""
SPAN = 4096
"""Tokens per program."""
BLOCK = 512
"""Tokens whose digits a program looks at at a time."""
UNIT = tl.constexpr(2.0**40)
"""The weight of the likeliest token. A vocabulary may have 2^22 tokens before a sum overflows."""


@triton.jit
def _load(logits_ptr, index, V, ROUNDS: tl.constexpr):
    """Logits and their places: integers in the same order, of ROUNDS digits. 0 and -0 have the same place."""
    x = tl.load(logits_ptr + index, mask=index < V, other=float("-inf")).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) | -0x80000000
    return x, bits.to(tl.uint32, bitcast=True) >> (32 - DIGIT * ROUNDS)


@triton.jit
def _top(tops_ptr, row, S, S_PAD: tl.constexpr):
    """A row's greatest logit, and whether all are finite, or -inf beside a finite one."""
    span = tl.arange(0, S_PAD)
    top = tl.max(tl.load(tops_ptr + row * S + span, mask=span < S, other=float("-inf")))
    return top, (top > float("-inf")) & (top < float("inf"))


@triton.jit
def _weigh(x, top, heat):
    """exp((x - top) / heat), and the same in units of 1 / UNIT."""
    weight = tl.exp((x - top) / heat)
    return weight, (weight * UNIT).to(tl.int64)


@triton.jit
def _next(found_ptr, prefix, wanted, share, S, S_PAD: tl.constexpr):
    """The digit after ``prefix`` of a threshold, appended to it, and what is still wanted of the tokens that share it.
    ``found_ptr`` points to what each span has found by digits. If ``share`` is 0 or more, that part of it is wanted."""
    span = tl.arange(0, S_PAD)[:, None]
    digit = tl.arange(0, DIGITS)
    found = tl.sum(tl.load(found_ptr + span * DIGITS + digit[None, :], mask=span < S, other=0), 0)
    total = tl.sum(found)
    if share >= 0.0:
        wanted = tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)
    at_least = total - tl.cumsum(found, 0) + found
    chosen = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32)) - 1, 0)
    return prefix * DIGITS + chosen, wanted - tl.sum(tl.where(digit > chosen, found, 0))


@triton.jit
def _likely(place, index, floor, last):
    """Which tokens of a span top-k keeps, of which those at its threshold up to ``last`` only."""
    floor = floor.to(tl.uint32)
    return (place > floor) | ((place == floor) & (index <= last))


@triton.jit
def _kept(exact, place, index, min_p, ranked, floors_ptr, lasts_ptr, floor, row, span, S):
    """Which tokens of a span all filters keep. ``floor`` is top-p's threshold, 0 for none."""
    kept = exact >= min_p
    if ranked:
        kept &= _likely(place, index, tl.load(floors_ptr + row * 2), tl.load(lasts_ptr + row * S + span))
        kept &= place >= floor.to(tl.uint32)
    return kept


@triton.jit
def tops_kernel(logits_ptr, tops_ptr, firsts_ptr, stride_n, V, S, SPAN: tl.constexpr):
    """One program finds the greatest logit of a span, infinite if one is NaN, and the first token that has it."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = span * SPAN + tl.arange(0, SPAN)
    x = tl.load(logits_ptr + row * stride_n + index, mask=index < V, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.where(x == x, x, float("inf")))
    tl.store(tops_ptr + row * S + span, top)
    tl.store(firsts_ptr + row * S + span, tl.min(tl.where(x == top, index, V)))


@triton.jit(do_not_specialize=["i"])
def narrow_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    tops_ptr,
    found_ptr,
    states_ptr,
    floors_ptr,
    lasts_ptr,
    stride_n,
    V,
    S,
    i,
    WEIGHED: tl.constexpr,
    ROUNDS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    S_PAD: tl.constexpr,
):
    """Round i of ROUNDS: one program finds the i-th digit of a row's threshold from what all have found in the round
    before, and counts the tokens of its span, or with WEIGHED weighs those that top-k keeps, by the digit after it.

    A state is the digits so far and what is wanted of the tokens that share them. Rounds write what is found, and
    states, to one place in two, and read the other."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature_ptr + row)
    top, finite = _top(tops_ptr, row, S, S_PAD)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    counted = (top_k > 0) & (top_k < V)
    if (heat <= 0.0) | (not finite):
        return
    step = i + (ROUNDS if WEIGHED else 0)
    own = row * 2 + step % 2
    before = row * 2 + (step + 1) % 2
    prefix = tl.zeros([], tl.int64)
    wanted = top_k
    floor = prefix
    last = tl.zeros([], tl.int32) + V
    if WEIGHED:
        if i > 0:
            floor = tl.load(floors_ptr + row * 2)
            last = tl.load(lasts_ptr + row * S + span)
        else:
            if counted:
                begun, wanted = tl.load(states_ptr + before * 2), tl.load(states_ptr + before * 2 + 1)
                floor, wanted = _next(found_ptr + before * S * DIGITS, begun, wanted, -1.0, S, S_PAD)
                # Of the tokens at the threshold, those before this span leave room for so many of it.
                spans = tl.arange(0, S_PAD)
                tied_ptr = found_ptr + before * S * DIGITS + floor % DIGITS
                tied = tl.load(tied_ptr + spans * DIGITS, mask=spans < span, other=0)
                room = wanted - tl.sum(tied)
                if room < tl.load(tied_ptr + span * DIGITS):
                    index = span * SPAN + tl.arange(0, SPAN)
                    _, place = _load(logits_ptr + row * stride_n, index, V, ROUNDS)
                    tie = (place == floor.to(tl.uint32)) & (index < V)
                    inside = tie & (tl.cumsum(tie.to(tl.int32), 0) <= room)
                    last = tl.max(tl.where(inside, index, -1))
            tl.store(lasts_ptr + row * S + span, last)
            if span == 0:
                tl.store(floors_ptr + row * 2, floor)
        if top_p >= 1.0:
            return
    elif not counted:
        return
    if i > 0:
        prefix, wanted = tl.load(states_ptr + before * 2), tl.load(states_ptr + before * 2 + 1)
        share = tl.where(i == 1, top_p.to(tl.float64), -1.0) if WEIGHED else -1.0
        prefix, wanted = _next(found_ptr + before * S * DIGITS, prefix, wanted, share, S, S_PAD)
    if span == 0:
        tl.store(states_ptr + own * 2, prefix)
        tl.store(states_ptr + own * 2 + 1, wanted)
    shift = ((ROUNDS - 1 - i) * DIGIT).to(tl.uint32)
    digit = tl.arange(0, DIGITS)
    found = tl.zeros([DIGITS], tl.int64)
    for begin in range(0, SPAN, BLOCK):
        index = span * SPAN + begin + tl.arange(0, BLOCK)
        x, place = _load(logits_ptr + row * stride_n, index, V, ROUNDS)
        here = place >> shift
        counts = (here >> DIGIT == prefix.to(tl.uint32)) & (index < V)
        if WEIGHED:
            counts &= _likely(place, index, floor, last)
        if tl.max(counts.to(tl.int32)) > 0:
            has = counts[:, None] & ((here & (DIGITS - 1)).to(tl.int32)[:, None] == digit[None, :])
            if WEIGHED:
                _, weight = _weigh(x, top, heat)
                found += tl.sum(tl.where(has, weight[:, None], 0), 0)
            else:
                found += tl.sum(has.to(tl.int32), 0)
    tl.store(found_ptr + (own * S + span) * DIGITS + digit, found)


@triton.jit(do_not_specialize=["ranked"])
def masses_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    tops_ptr,
    found_ptr,
    states_ptr,
    floors_ptr,
    lasts_ptr,
    masses_ptr,
    stride_n,
    V,
    S,
    ranked,
    ROUNDS: tl.constexpr,
    SPAN: tl.constexpr,
    S_PAD: tl.constexpr,
):
    """One program weighs the tokens of a span that all filters keep. With ``ranked``, it finds the last digit of
    top-p's threshold before."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature_ptr + row)
    top, finite = _top(tops_ptr, row, S, S_PAD)
    if (heat <= 0.0) | (not finite):
        return
    index = span * SPAN + tl.arange(0, SPAN)
    x, place = _load(logits_ptr + row * stride_n, index, V, ROUNDS)
    exact, weight = _weigh(x, top, heat)
    floor = tl.zeros([], tl.int64)
    if ranked:
        if tl.load(top_p_ptr + row) < 1.0:
            before = row * 2 + 1  # where the last of an even number of rounds has written
            prefix, wanted = tl.load(states_ptr + before * 2), tl.load(states_ptr + before * 2 + 1)
            floor, wanted = _next(found_ptr + before * S * DIGITS, prefix, wanted, -1.0, S, S_PAD)
        if span == 0:
            tl.store(floors_ptr + row * 2 + 1, floor)
    kept = _kept(exact, place, index, tl.load(min_p_ptr + row), ranked, floors_ptr, lasts_ptr, floor, row, span, S)
    tl.store(masses_ptr + row * S + span, tl.sum(tl.where(kept, weight, 0)))


@triton.jit(do_not_specialize=["ranked"])
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    tops_ptr,
    firsts_ptr,
    floors_ptr,
    lasts_ptr,
    masses_ptr,
    token_ptr,
    stride_n,
    V,
    S,
    ranked,
    ROUNDS: tl.constexpr,
    SPAN: tl.constexpr,
    S_PAD: tl.constexpr,
):
    """One program takes a row's likeliest token, or draws one: it finds the span, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, S_PAD)
    real = spans < S
    top, finite = _top(tops_ptr, row, S, S_PAD)
    likeliest = real & (tl.load(tops_ptr + row * S + spans, mask=real, other=float("-inf")) == top)
    token = tl.min(tl.where(likeliest, tl.load(firsts_ptr + row * S + spans, mask=real, other=0), V))
    heat = tl.load(temperature_ptr + row)
    if finite & (heat > 0.0):
        mass = tl.load(masses_ptr + row * S + spans, mask=real, other=0)
        total = tl.sum(mass)
        # Rounding to float64 may make it the total.
        target = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
        span = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32))
        before = tl.sum(tl.where(spans < span, mass, 0))
        index = span * SPAN + tl.arange(0, SPAN)
        x, place = _load(logits_ptr + row * stride_n, index, V, ROUNDS)
        exact, weight = _weigh(x, top, heat)
        floor = tl.zeros([], tl.int64)
        if ranked:
            floor = tl.load(floors_ptr + row * 2 + 1)
        kept = _kept(exact, place, index, tl.load(min_p_ptr + row), ranked, floors_ptr, lasts_ptr, floor, row, span, S)
        passed = before + tl.cumsum(tl.where(kept, weight, 0), 0) > target
        token = tl.min(tl.where(passed, index, V))
    tl.store(token_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample(logits_NV: Tensor, draws: Draws, first: bool) -> Tensor:
    """``KernelsProtocol.sample``. The ``first`` call compiles the kernels that any draws may need."""
    N, V = logits_NV.shape
    span = min(SPAN, triton.next_power_of_2(V))
    S = triton.cdiv(V, span)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_NV.device)

    token_N, tops, firsts = empty(N), empty(N, S, dtype=torch.float32), empty(N, S, dtype=torch.int32)
    # What no launched kernel reads or writes is stood for by a tensor of the same type.
    masses = floors = found = states = token_N
    lasts = firsts
    top_k, top_p = draws.top_k and not draws.greedy, draws.top_p and not draws.greedy
    if not draws.greedy:
        masses = empty(N, S)
    if top_k or top_p:
        lasts, floors = empty(N, S, dtype=torch.int32), empty(N, 2)
        found, states = empty(N, 2, S, DIGITS.value), empty(N, 2, 2)
    Run = Callable[[Any, tuple[int, ...]], Callable[..., object]]

    def launch(
        run: Run, logits: Tensor | torch.dtype, dtype: torch.dtype, greedy: bool, top_k: bool, top_p: bool
    ) -> None:
        where = logits_NV.stride(0), V, S
        # Nothing is fused, so that a token has one weight, whatever kernel weighs it.
        sizes: dict[str, Any] = {"SPAN": span, "num_warps": 8, "enable_fp_fusion": False}
        more = sizes | {"ROUNDS": ROUNDS[dtype], "S_PAD": triton.next_power_of_2(S)}
        heat, min_p, ranked = draws.temperature_N, draws.min_p_N, int(top_k or top_p)
        run(tops_kernel, (N, S))(logits, tops, firsts, *where, **sizes)
        # The first weighed round writes top-k's threshold, or that there is none.
        for weighed, rounds in (False, ROUNDS[dtype] * top_k), (True, ROUNDS[dtype] if top_p else ranked):
            for i in range(rounds):
                run(narrow_kernel, (N, S))(
                    logits, heat, draws.top_k_N, draws.top_p_N, tops, found, states, floors, lasts, *where, i,
                    WEIGHED=weighed, BLOCK=min(BLOCK, span), **more,
                )  # fmt: skip
        if not greedy:
            run(masses_kernel, (N, S))(
                logits, heat, draws.top_p_N, min_p, tops, found, states, floors, lasts, masses, *where, ranked, **more
            )
        scratch = tops, firsts, floors, lasts, masses
        run(draw_kernel, (N,))(logits, heat, min_p, draws.uniform_N, *scratch, token_N, *where, ranked, **more)

    if first:
        for dtype in {logits_NV.dtype, torch.float32}:  # edited logits are float32
            launch(lambda kernel, grid: functools.partial(kernel.warmup, grid=grid), dtype, dtype, False, True, True)
    launch(lambda kernel, grid: kernel[grid], logits_NV, logits_NV.dtype, draws.greedy, top_k, top_p)
    return token_N
