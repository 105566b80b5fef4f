"""Mixtures of experts for tests of kernels, and what they are to compute, token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.attention import random
from tests.products import gated64
from torch import Tensor

from infer.contracts.kernels import Expert, ExpertActivation, KernelsProtocol, Routing
from infer.kernels.quantize import quantize_weight
from infer.weight import GroupedWeight, Weight, quantize_rows

FORMS = ("plain", "biases", "int8", "int4", "mixed")
"""Ways to store experts: the last has a plain expert among those with codes."""


def route64(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None) -> tuple[list[list[int]], Tensor]:
    """Each token's experts and shares, as ``Routing`` describes them."""
    chosen, shares = [], []
    for logits in logits_TX.double():
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
        by = (logits_by(logits.float(), routing) + (0 if bias_X is None else bias_X)).tolist()
        top = sorted(range(len(by)), key=lambda x: (-by[x], x))[: routing.top]
        share = scores[top]
        chosen.append(top)
        shares.append(routing.scale * (share / share.sum() if routing.renormalize else share))
    return chosen, torch.stack(shares)


def logits_by(logits: Tensor, routing: Routing) -> Tensor:
    return 1 / (1 + torch.exp(-logits)) if routing.score == "sigmoid" else logits


@dataclass
class Mixture:
    """``count`` experts of one layer."""

    size: int
    intermediate: int
    count: int
    form: str = "plain"
    dtype: torch.dtype = torch.float32
    int8: bool = True
    device: str = "cpu"
    gated: bool = True

    def __post_init__(self) -> None:
        self.experts = [self._expert(7 * x) for x in range(self.count)]

    def _expert(self, seed: int) -> Expert:
        weights: list[Any] = []
        rows = self.intermediate * (2 if self.gated else 1)
        for n, k in ((rows, self.size), (self.size, self.intermediate)):
            plain = random(n, k, dtype=self.dtype, seed=seed + n).to(self.device) / k**0.5
            weights.append(self._stored(plain, seed))
        biases = []
        if self.form == "biases":
            biases = [random(w.shape[0], dtype=self.dtype, seed=seed + 3).to(self.device) for w in weights]
        return Expert(*weights, *biases)

    def _stored(self, plain: Tensor, seed: int) -> Weight:
        if self.form in ("plain", "biases") or (self.form == "mixed" and seed == 7):
            return plain
        weight = quantize_weight(plain, 8 if self.form == "int8" else 4)
        return weight if self.int8 else GroupedWeight(weight.codes, weight.scales_NG, weight.bits, dtype=self.dtype)

    def pack(self, kernels: KernelsProtocol) -> Any:
        return kernels.pack_experts(iter(self.experts), self.count)

    def choose(self, tokens: int, top: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Experts, int32 [T, J], of which the first ones are far more popular, and their shares."""
        noise = random(tokens, self.count, seed=seed) - torch.arange(self.count) * (3 / self.count)
        experts, shares = noise.argsort(dim=-1, descending=True)[:, :top].int(), random(tokens, top, seed=seed + 1)
        return experts.to(self.device), shares.softmax(-1).to(self.device)

    def expected(self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, activation: ExpertActivation) -> Tensor:
        rows = []
        for x, experts, shares in zip(x_TD, experts_TJ.tolist(), shares_TJ.double(), strict=True):
            results = [self._result(x, self.experts[e], activation) for e in experts]
            rows.append(sum(share * y for share, y in zip(shares, results, strict=True)))
        return torch.stack(rows) if rows else x_TD.double()

    def _result(self, x: Tensor, expert: Expert, activation: ExpertActivation) -> Tensor:
        gate_up = product(x, expert.gate_up_NK, expert.gate_up_bias_N)
        hidden = gated64(gate_up.to(self.dtype), activation).to(self.dtype)
        return product(hidden, expert.down_NK, expert.down_bias_N)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    values = x.double()
    if isinstance(weight, GroupedWeight):
        if weight.int8_activations:
            q, scale = quantize_rows(x[None], weight.activation_group)
            values = (q.double() * scale.double()).flatten()
        weight = GroupedWeight(
            weight.codes, weight.scales_NG, weight.bits, weight.minimum_NG, weight.table
        ).dequantize()
    return weight.double() @ values + (0 if bias is None else bias.double())


def check_rows(
    kernels: KernelsProtocol, mixture: Mixture, tokens: int, top: int, parts: Sequence[Sequence[int]]
) -> None:
    """The results of some tokens are those that they have among all, bit for bit."""
    x, packed = random(tokens, mixture.size, dtype=mixture.dtype).to(mixture.device), mixture.pack(kernels)
    experts, shares = mixture.choose(tokens, top)
    activation: ExpertActivation = "silu" if mixture.gated else "relu2"
    whole = kernels.gated_experts(x, experts, shares, packed, activation)
    assert whole.dtype == mixture.dtype
    for part in parts:
        rows = torch.tensor(part, device=mixture.device)
        found = kernels.gated_experts(x[rows], experts[rows], shares[rows], packed, activation)
        assert torch.equal(found, whole[rows]), part
