"""A row's bits are its own, whatever rows are beside it."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.kernels import Routing
from infer.device import same_bits
from infer.errors import SettingsError
from infer_testing.kernels.elementwise import head_norms
from infer_testing.kernels.experts import Mixture
from infer_testing.kernels.products import grouped_weight
from infer_testing.kernels.provider import GATES, MOST_ROWS, ROWS, Provider, check
from infer_testing.kernels.sampling import asked, random_draws
from infer_testing.kernels.states import GROUPS
from infer_testing.suite import Skipped, Violation

Rowwise = Callable[..., "Tensor | tuple[Tensor, ...]"]


def rowwise(what: str, kernel: Rowwise, *inputs: Tensor) -> None:
    """Raises Violation unless rows computed among others have the bits that they have among MOST_ROWS."""
    most = len(inputs[0])
    whole, varying = _several(kernel(*inputs)), []
    for n in (n for n in ROWS if n < most):
        for begin in sorted({0, (most - n) // 2, most - n}):
            part = _several(kernel(*(x[begin : begin + n] for x in inputs)))
            if not all(same_bits(a, b[begin : begin + n]) for a, b in zip(part, whole, strict=True)):
                varying.append(n)
                break
    if varying:
        sizes = ", ".join(map(str, varying[:6])) + (", ..." if len(varying) > 6 else "")
        raise Violation(f"{what} gives a row other bits in a batch of {sizes} rows than among {most}")
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0)).to(inputs[0].device)
    for a, b in zip(_several(kernel(*(x[order] for x in inputs))), whole, strict=True):
        if not same_bits(a, b[order]):
            raise Violation(f"{what} gives a row other bits if the rows stand in another order")


def _several(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@check("Each row of a norm, of an activation and of rope depends on that row alone, bit for bit", 6)
def rows_of_elementwise(p: Provider, draw: random.Random) -> None:
    dtype, size = p.dtype(draw), draw.choice([16, 48, 65, 128, 1000])
    x, weight = 3 * p.tensor(MOST_ROWS, 2 * size, dtype=dtype, draw=draw), p.tensor(size, dtype=dtype, draw=draw)
    left, unit, activation = x[:, :size].contiguous(), draw.random() < 0.5, draw.choice(GATES)
    rowwise("rms_norm", lambda x: p.kernels.rms_norm(x, weight, 1e-6, unit), left)
    rowwise("add_rms_norm", lambda x: p.kernels.add_rms_norm(x, 2 * x, weight, 1e-6, unit), left)
    rowwise(f"gated with {activation}", lambda x: p.kernels.gated(x[:, :size], x[:, size:], activation), x)
    heads, head = draw.choice([(1, 16), (3, 18), (2, 128)])
    q = p.tensor(MOST_ROWS, heads, head, dtype=dtype, draw=draw)
    angles, norms = p.tensor(MOST_ROWS, head // 2, draw=draw), head_norms(p, head, dtype, draw)
    turn = lambda q, angles: p.kernels.rope(q, q, Rotary(angles.cos(), angles.sin(), norms))  # noqa: E731
    rowwise("rope", turn, q, angles)
    size, group, width = draw.choice(GROUPS)
    x, gate = (p.tensor(MOST_ROWS, size, dtype=dtype, draw=draw) for _ in range(2))
    weight, first = p.tensor(width, dtype=dtype, draw=draw), draw.random() < 0.5
    rowwise("gated_rms_norm", lambda x, gate: p.kernels.gated_rms_norm(x, gate, weight, 1e-6, group, first), x, gate)


@check("Each row of a product depends on that row alone, bit for bit, whatever the number of rows", 8)
def rows_of_linear(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    n, k = draw.choice([(2, 4), (48, 64), (200, 72), (64, 1000), (512, 256), (256, 512)])
    weight, x = p.tensor(n, k, dtype=dtype, draw=draw), p.tensor(MOST_ROWS, k, dtype=dtype, draw=draw)
    bias = p.tensor(n, dtype=dtype, draw=draw) if draw.random() < 0.5 else None
    packed, both = p.kernels.pack(weight, bias), p.kernels.pack_gated(weight, bias)
    rowwise(f"linear with a weight {[n, k]}", lambda x: p.kernels.linear(x, packed), x)
    rowwise(f"gated_linear with a weight {[n, k]}", lambda x: p.kernels.gated_linear(x, both, "silu"), x)


@check("Each row of a product with a grouped weight depends on that row alone, bit for bit", 4)
def rows_of_linear_grouped(p: Provider, draw: random.Random) -> None:
    dtype, group = p.dtype(draw), draw.choice([16, 32, 64])
    weight = grouped_weight(p, 48, 4 * group, group, dtype, draw)
    try:
        packed = p.kernels.pack(weight)
    except SettingsError as refusal:
        raise Skipped(f"grouped weights are refused: {refusal}") from None
    x = p.tensor(MOST_ROWS, 4 * group, dtype=dtype, draw=draw)
    rowwise(f"linear with {weight}", lambda x: p.kernels.linear(x, packed), x)


@check("Each token's experts, shares and their result depend on that token alone, bit for bit", 4)
def rows_of_experts(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    m = Mixture.make(p, MOST_ROWS // 2, dtype, draw)
    packed = p.kernels.pack_experts(iter(m.experts), len(m.experts))
    rowwise(
        "gated_experts",
        lambda x, experts, shares: p.kernels.gated_experts(x, experts, shares, packed, "silu"),
        *(m.x, m.experts_TJ, m.shares_TJ),
    )
    bare = Mixture.make(p, MOST_ROWS // 2, dtype, draw, gated=False)
    open_packed = p.kernels.pack_experts(iter(bare.experts), len(bare.experts))
    rowwise(
        "gated_experts without gates",
        lambda x, experts, shares: p.kernels.gated_experts(x, experts, shares, open_packed, "relu2"),
        *(bare.x, bare.experts_TJ, bare.shares_TJ),
    )
    logits = p.tensor(MOST_ROWS, 32, dtype=dtype, draw=draw)
    rowwise("route", lambda logits: p.kernels.route(logits, Routing(4)), logits)


@check("The token that is drawn from a row depends on that row and its own parameters alone", 4)
def rows_of_sample(p: Provider, draw: random.Random) -> None:
    logits = 2 * p.tensor(65, draw.choice([7, 500]), dtype=p.dtype(draw), draw=draw)
    draws = random_draws(p, 65, draw)
    columns = (draws.temperature_N, draws.top_k_N, draws.top_p_N, draws.min_p_N, draws.uniform_N)

    def kernel(logits: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
        return p.kernels.sample(logits, asked(heat, top_k, top_p, min_p, uniform))

    rowwise("sample", kernel, logits, *columns)
