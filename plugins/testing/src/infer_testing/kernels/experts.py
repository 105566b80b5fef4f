"""Mixtures of experts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.contracts.kernels import Expert, ExpertActivation, Routing
from infer_testing.kernels.provider import ACTIVATIONS, EXACT, Provider, check, wide
from infer_testing.numbers import compare
from infer_testing.suite import Violation


@check(
    "route chooses the experts of the highest scores, the lower index first among equals, and gives their shares", 12
)
def route(p: Provider, draw: random.Random) -> None:
    tokens, experts = draw.choice([1, 5, 40]), draw.choice([4, 7, 32])
    score: Any = draw.choice(["softmax", "sigmoid"])
    routing = Routing(draw.randint(1, 4), score, draw.random() < 0.5, draw.choice([1.0, 2.5]))
    logits = p.tensor(tokens, experts, dtype=p.dtype(draw), draw=draw)
    logits[0, :] = logits[0, 0]  # a tie of all
    bias = p.tensor(experts, draw=draw) * 0.3 if score == "sigmoid" and draw.random() < 0.5 else None
    found, shares = p.kernels.route(logits, routing, bias)
    exact, exact_shares = EXACT.route(wide(logits), routing, None if bias is None else bias.cpu())
    for name, x, dtype in (("experts", found, torch.int32), ("shares", shares, torch.float32)):
        if x.shape != exact.shape or x.dtype != dtype:
            raise Violation(f"route's {name} are {list(x.shape)} of {x.dtype}, not {list(exact.shape)} of {dtype}")
    if not torch.equal(found.cpu(), exact):
        token = int((found.cpu() != exact).any(1).nonzero()[0])
        said = f"{found[token].tolist()} for token {token}; {exact[token].tolist()} are right"
        raise Violation(f"route with {routing} chooses the experts {said}" + (" (all logits are equal)" * (token == 0)))
    compare(f"the shares that route gives with {routing}", shares, exact_shares, torch.float32, "token")


@dataclass
class Mixture:
    """Random experts of one layer, and tokens that are routed to them."""

    experts: list[Expert]
    x: Tensor
    experts_TJ: Tensor
    shares_TJ: Tensor

    @classmethod
    def make(cls, p: Provider, tokens: int, dtype: torch.dtype, draw: random.Random, *, gated: bool = True) -> Mixture:
        count, size, inner = draw.choice([3, 8]), draw.choice([16, 48]), draw.choice([8, 32])
        top, biases, rows = draw.randint(1, 3), draw.random() < 0.5, inner * (2 if gated else 1)

        def expert() -> Expert:
            weights = [p.tensor(n, k, dtype=dtype, draw=draw) / k**0.5 for n, k in ((rows, size), (size, inner))]
            return Expert(*weights, *(p.tensor(len(w), dtype=dtype, draw=draw) for w in weights if biases))

        noise = p.tensor(tokens, count, draw=draw) - torch.arange(count, device=p.device) * (3 / count)
        chosen = noise.argsort(dim=-1, descending=True)[:, :top].int()
        shares = p.tensor(tokens, top, draw=draw).softmax(-1)
        return cls([expert() for _ in range(count)], p.tensor(tokens, size, dtype=dtype, draw=draw), chosen, shares)


@check("gated_experts sums the results of a token's experts, each times its share, in the order of experts_TJ", 8)
def gated_experts(p: Provider, draw: random.Random) -> None:
    dtype, activation = p.dtype(draw), draw.choice(ACTIVATIONS)
    _compare(p, Mixture.make(p, draw.choice([1, 5, 40]), dtype, draw), activation, dtype)


@check("gated_experts computes experts without a gate, too, if the activation is that of such experts", 4)
def ungated_experts(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    _compare(p, Mixture.make(p, draw.choice([1, 5, 40]), dtype, draw, gated=False), "relu2", dtype)


def _compare(p: Provider, m: Mixture, activation: ExpertActivation, dtype: torch.dtype) -> None:
    packed = p.kernels.pack_experts(iter(m.experts), len(m.experts))
    found = p.kernels.gated_experts(m.x, m.experts_TJ, m.shares_TJ, packed, activation)
    exact = torch.zeros(m.x.shape, dtype=torch.float64)
    for index, expert in enumerate(m.experts):
        gate_up, down, *biases = expert
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        inner, outer = (None if bias is None else wide(bias) for bias in biases)
        product = torch.nn.functional.linear(wide(m.x), wide(gate_up), inner)
        if activation == "relu2":
            hidden = product.relu().square()
        else:
            gate, up = product.chunk(2, dim=-1)
            hidden = EXACT.gated(gate, up, activation)
        result = torch.nn.functional.linear(hidden, wide(down), outer).double()
        share = (m.shares_TJ * (m.experts_TJ == index)).sum(1, keepdim=True)
        exact += share.cpu().double() * result
    of = "experts" if activation != "relu2" else "experts without gates"
    compare(f"gated_experts of {len(m.x)} tokens with {len(m.experts)} {of}", found, exact, dtype, "token")
