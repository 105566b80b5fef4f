"""Packed weights that are found at the next start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from infer.contracts.kernels import Expert, KeepingKernels
from infer.device import same_bits
from infer.errors import SettingsError
from infer.weight import Weight
from infer_testing.kernels.experts import Mixture
from infer_testing.kernels.products import grouped_weight
from infer_testing.kernels.provider import ACTIVATIONS, LAYERS, Provider, check
from infer_testing.suite import Skipped, Violation

META = torch.device("meta")


class Memory:
    """A PackedMemory that has weights, and remembers what is packed."""

    def __init__(self, weights: Iterable[memoryview] = ()) -> None:
        self.left = [memoryview(bytearray(weight)) for weight in weights]
        self.added: list[memoryview] = []

    def find(self, nbytes: int) -> memoryview | None:
        if not self.left:
            return None
        weight = self.left.pop(0)
        if len(weight) != nbytes:
            raise Violation(f"a packed weight of {nbytes} bytes is asked for where one of {len(weight)} was packed")
        return weight

    def add(self, weight: memoryview) -> None:
        self.added.append(weight)


@check("Packed weights that are kept are found again, and give the same bits without the weights' values", 12)
def packed_in(p: Provider, draw: random.Random) -> None:
    if not isinstance(p.kernels, KeepingKernels):
        raise Skipped("packed weights cannot be kept (KeepingKernels)")
    pack, run = _case(p, draw)
    first = Memory()
    try:
        with p.kernels.packed_in(first):
            expected = run(pack(False))
    except SettingsError as refusal:
        raise Skipped(f"grouped weights are refused: {refusal}") from None
    if not first.added:
        raise Violation("the memory is told of no weight that was packed")
    again = Memory(first.added)
    with p.kernels.packed_in(again):
        found = pack(True)
    if again.left or again.added:
        raise Violation(
            f"of {len(first.added)} packed weights {len(again.left)} are not asked for again, and {len(again.added)} "
            "are packed again"
        )
    if not same_bits(run(found), expected):
        raise Violation("a packed weight that was kept gives other bits than one that is packed")


def _case(p: Provider, draw: random.Random) -> tuple[Callable[[bool], Any], Callable[[Any], Tensor]]:
    """A way to pack something, with or without values, and what is computed with it."""
    dtype, kernels, activation = p.dtype(draw), p.kernels, draw.choice(ACTIVATIONS)
    kind = draw.choice(["plain", "gated", "grouped", "experts"])
    if kind == "experts":
        m = Mixture.make(p, 5, dtype, draw)
        return (
            lambda bare: kernels.pack_experts([_expert(e, bare) for e in m.experts], len(m.experts)),
            lambda packed: kernels.gated_experts(m.x, m.experts_TJ, m.shares_TJ, packed, activation),
        )
    n, k = draw.choice(LAYERS) if kind == "plain" else (64, 96)
    weight: Weight = p.tensor(n, k, dtype=dtype, draw=draw)
    if kind == "grouped":
        weight = grouped_weight(p, n, k, 32, dtype, draw)
    bias, x = p.tensor(n, dtype=dtype, draw=draw), p.tensor(5, k, dtype=dtype, draw=draw)
    if kind == "gated":
        return (
            lambda bare: kernels.pack_gated(_without_values(weight, bare), bias),
            lambda packed: kernels.gated_linear(x, packed, activation),
        )
    return lambda bare: kernels.pack(_without_values(weight, bare), bias), lambda packed: kernels.linear(x, packed)


def _without_values(weight: Weight, bare: bool) -> Weight:
    return weight.to(device=META, dtype=weight.dtype) if bare else weight


def _expert(expert: Expert, bare: bool) -> Expert:
    gate_up_NK, down_NK = (_without_values(weight, bare) for weight in (expert.gate_up_NK, expert.down_NK))
    return expert._replace(gate_up_NK=gate_up_NK, down_NK=down_NK)
