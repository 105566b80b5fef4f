"""The check at start-up against kernels that are exact but for one planted fault: it finds all but the one that no
start can find."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.core.engine.test_self_check import (
    Company,
    Gated,
    Linear,
    Mixing,
    MixingFew,
    MixingLogits,
    MixingMany,
    Mixture,
    Norm,
    Positions,
    Recorded,
    Rope,
    Route,
    Sample,
    nudged,
    tried,
)
from torch import Tensor

from infer.contracts.attention import KV, AttentionSpec, Ragged
from infer.contracts.kernels import Draws
from infer_kernels_cpu.provider import CpuKernels


class Head(Linear):
    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        out = CpuKernels.linear(self, x_TK, packed)
        return self.nudge(len(x_TK), out) if packed.N == 96 else out


class FirstNorm(Linear):
    """The norm of the first layer, which has no residual."""

    linear = CpuKernels.linear

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        return self.nudge(len(x_TD), super().rms_norm(x_TD, weight_D, eps, unit_offset))


class Embedding(Linear):
    linear = CpuKernels.linear

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        return self.nudge(len(token_ids_T), super().embedding(token_ids_T, packed))


class LastRow(Linear):
    """The last of some rows."""

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        out = CpuKernels.linear(self, x_TK, packed)
        if self.when(len(out)):
            out[-1] = nudged(out[-1])
        return out


class Extends(CpuKernels):
    """Of chunks of more than one position, behind others: as they are where drafts are verified."""

    def __init__(self, when: Callable[[tuple[int, ...]], bool]) -> None:
        super().__init__()
        self.when = when

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out_THE = super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)
        behind = min(ragged.starts_B.tolist()) > 0 and max(ragged.lens) > 1
        return nudged(out_THE) if behind and self.when(ragged.lens) else out_THE


class Masked(CpuKernels):
    """Draws from rows of which one has forbidden tokens, and then of its neighbors or of all."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        masked_N = torch.isinf(logits_NV).any(-1)
        if len(logits_NV) > 1 and masked_N.any():
            chosen_N = masked_N if self.own else ~masked_N
            logits_NV = torch.where(chosen_N[:, None], nudged(logits_NV), logits_NV)
        return super().sample(logits_NV, draws)


class Later(CpuKernels):
    """After many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        self.calls += 1
        out = super().linear(x_TK, packed)
        return nudged(out) if self.calls > 3000 and len(x_TK) > 1 else out


@dataclass(frozen=True)
class Plant:
    make: Callable[[], CpuKernels]
    limits: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    wrap: type[Mixing] | None = None


def rows(kind: type[Any], *wanted: Collection[int], family: str = "llama") -> Plant:
    """Those numbers of rows, sequences or positions."""
    return Plant(lambda: kind(lambda n: any(n in numbers for numbers in wanted)), family=family)


MANY = range(641, 1 << 20)
LONG: dict[str, Any] = {"max_seq_len": 5000, "max_chunk": 512}
DRAFTS: dict[str, Any] = {"max_drafts": 8}
FOUND: dict[str, Plant] = {
    "linear of 18 to 24": rows(Linear, range(18, 25)),
    "linear of 26 to 32": rows(Linear, range(26, 33)),
    "linear of 34 to 60": rows(Linear, range(34, 61)),
    "linear of 47": rows(Linear, [47]),
    "linear of more than 640": rows(Linear, MANY),
    "linear of 1": rows(Linear, [1]),
    "linear of 5 and 6": rows(Linear, [5, 6]),
    "linear of 9 to 16": rows(Linear, range(9, 17)),
    "linear of 33": rows(Linear, [33]),
    "linear of more than 76": rows(Linear, range(77, 1 << 20)),
    "the last row of 25 to 40": rows(LastRow, range(25, 41)),
    "gated of 18 to 24": rows(Gated, range(18, 25)),
    "gated of 26 to 32": rows(Gated, range(26, 33)),
    "gated of 34 to 60": rows(Gated, range(34, 61)),
    "gated of more than 640": rows(Gated, MANY),
    "norms of 19 to 24": rows(Norm, range(19, 25)),
    "norms of 200": rows(Norm, [200]),
    "the first norm of 19 to 24": rows(FirstNorm, range(19, 25)),
    "embedding of 23": rows(Embedding, [23]),
    "experts of 18 to 32": rows(Mixture, range(18, 33), family="qwen3_moe"),
    "experts of more than 512": rows(Mixture, range(513, 1 << 20), family="qwen3_moe"),
    "routes of 9": rows(Route, [9], family="qwen3_moe"),
    "routes of 18 to 32": rows(Route, range(18, 33), family="qwen3_moe"),
    "head of 3": rows(Head, [3]),
    "head of 4": rows(Head, [4]),
    "head of 6 to 8": rows(Head, range(6, 9)),
    "head of more than 17": rows(Head, range(18, 1 << 20)),
    "logits of 5 and 6": Plant(CpuKernels, wrap=MixingLogits),
    "stores of more than 100": rows(Rope, range(101, 1 << 20)),
    "decodes of 3": rows(Company, [3]),
    "decodes of 4": rows(Company, [4]),
    "decodes of 7 and 8": rows(Company, [7, 8]),
    "decodes of 19": rows(Company, [19]),
    "decodes of more than 17": rows(Company, range(18, 1 << 20)),
    "extends behind others": Plant(lambda: Extends(lambda lens: max(lens) <= 9 and len(set(lens)) == 1), DRAFTS),
    "extends by 5": Plant(lambda: Extends(lambda lens: set(lens) == {5}), DRAFTS),
    "extends by 9 of one": Plant(lambda: Extends(lambda lens: lens == (9,)), DRAFTS),
    "uneven extends": Plant(lambda: Extends(lambda lens: max(lens) <= 9 and len(set(lens)) > 1), DRAFTS),
    "positions from 128": rows(Positions, range(128, 400)),
    "positions from 512": rows(Positions, range(512, 900)),
    "positions from 1024": rows(Positions, range(1024, 1 << 20)),
    "positions from 1200": Plant(lambda: Positions(lambda p: p >= 1200), LONG),
    "positions about 2048": Plant(lambda: Positions(lambda p: 2000 <= p < 2100), LONG),
    "positions about 4096": Plant(lambda: Positions(lambda p: 4090 <= p < 4096), LONG),
    "positions from 4990": Plant(lambda: Positions(lambda p: p >= 4990), LONG),
    "draws of 4": rows(Sample, [4]),
    "draws of 7": rows(Sample, [7]),
    "draws of 8": rows(Sample, [8]),
    "draws of 3": rows(Sample, [3]),
    "draws beside a masked row": Plant(lambda: Masked(own=False)),
    "draws from a masked row": Plant(lambda: Masked(own=True)),
    "recorded passes": Plant(Recorded),
    "passes of more than 76": Plant(CpuKernels, wrap=Mixing),
    "passes of 3": Plant(CpuKernels, wrap=MixingFew),
    "passes of 9 to 16": Plant(CpuKernels, wrap=MixingMany),
}
QUICK = (
    *("linear of 47", "linear of more than 640", "gated of 26 to 32", "the first norm of 19 to 24"),
    *("experts of 18 to 32", "head of more than 17", "head of 6 to 8", "decodes of 7 and 8", "extends by 5"),
    *("extends by 9 of one", "positions about 2048", "positions from 4990", "draws of 4", "draws beside a masked row"),
)


def found(plant: Plant) -> list[str]:
    return tried(plant.make(), torch.float32, plant.wrap, family=plant.family, **plant.limits)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FOUND]
)
def test_a_planted_fault_is_found(name: str) -> None:
    assert found(FOUND[name])


@pytest.mark.slow
def test_one_is_not() -> None:
    """What changes after thousands of calls."""
    assert len(FOUND) >= 50
    assert found(Plant(Later)) == []


@pytest.mark.parametrize("limits", [LONG, DRAFTS], ids=["long", "drafts"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_exact_passes(family: str, limits: dict[str, Any]) -> None:
    """At the full length, too, with and without windows, and where drafts are verified."""
    assert found(Plant(CpuKernels, limits, family)) == []
