"""``check_kernels``: ours pass, and it names the bugs that are planted in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.examples import seeded
from tests.support import Recorder
from tests.testing.planted import Bug, Bugs, caught
from torch import Tensor

from infer.contracts.adapters import AdapterPart, AdapterRows
from infer.contracts.attention import KV, AttentionSpec, HeadNorms, Ragged, Rotary
from infer.contracts.kernels import Activation, Draws, Expert, ExpertActivation, GateActivation, PackedMemory, Routing
from infer.contracts.states import DeltaRule, StateRows, StateSpace
from infer.errors import SettingsError
from infer.kernels.reference import PackedExperts, ReferenceKernels
from infer.weight import GroupedWeight, Weight
from infer_kernels_cpu import native
from infer_kernels_cpu.provider import CpuKernels
from infer_testing import check_kernels
from infer_testing.kernels import SUITE, Provider

KINDS = ("reference", *native.levels())
planted: Bugs[type[ReferenceKernels]] = Bugs([])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind != native.chosen() else kind for kind in KINDS]
)
@pytest.mark.draws
@seeded()
def test_ours_pass(kind: str, seed: int) -> None:
    kernels = ReferenceKernels() if kind == "reference" else CpuKernels(kind)
    outcomes = list(SUITE.outcomes(Provider(kernels, kv_dtypes=("int8",)), seed=seed))
    assert not [str(outcome) for outcome in outcomes if outcome.violation]
    skipped = [outcome.name for outcome in outcomes if outcome.skipped]
    assert skipped == (["packed_in", "recorded"] if kind == "reference" else [])


@pytest.mark.parametrize("make", [ReferenceKernels, CpuKernels], ids=["reference", "native"])
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("gated", 14),  # one value, at GELU's far end
        ("gated_experts", 1795836781000005),  # a token whose experts cancel each other out
        ("extend_attention", 1795836781000005),  # a query of few keys among queries of many
        ("extend_attention_int8", 1795836781000006),
    ],
)
def test_rounding_is_no_fault(name: str, seed: int, make: type[ReferenceKernels]) -> None:
    check_kernels(make(), kv_dtypes=("int8",), only=[name], seed=seed)


@planted.each
def test_a_planted_bug_is_named(bug: Bug[type[ReferenceKernels]]) -> None:
    def run(**keys: Any) -> None:
        check_kernels(bug.make(), kv_dtypes=("int8",), **keys)

    caught(bug, run)


def attending(change: Callable[[AttentionSpec, Ragged], tuple[AttentionSpec, Ragged]]) -> type[ReferenceKernels]:
    """Kernels whose attention gets another spec, or other places."""

    class Changed(ReferenceKernels):
        def extend_attention(
            self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec
        ) -> Tensor:
            spec, ragged = change(spec, ragged)
            return super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)

    return Changed


def later(ragged: Ragged, by: int) -> Ragged:
    """Queries stand ``by`` positions later than they do."""
    return replace(ragged, starts=tuple(max(0, start + by) for start in ragged.starts))


ATTENTION = "extend_attention"
planted("a decoding query is blind to itself", ATTENTION, r"query \d+ of sequence \d+ .* does not see its own key")(
    attending(lambda spec, ragged: (spec, later(ragged, -1)))
)
planted("a window is wider by one", ATTENTION, r"sees position \d+, which is behind its window of \d+")(
    attending(lambda spec, ragged: (replace(spec, window=spec.window and spec.window + 1), ragged))
)
planted("a window is narrower by one", ATTENTION, r"does not see position \d+, the first position of its window")(
    attending(lambda spec, ragged: (replace(spec, window=max(1, spec.window - 1) if spec.window else None), ragged))
)
planted("the soft cap is forgotten", ATTENTION, "as if soft_cap were not set")(
    attending(lambda spec, ragged: (replace(spec, soft_cap=None), ragged))
)
planted("sinks are forgotten", ATTENTION, "as if sinks_H were not set")(
    attending(lambda spec, ragged: (replace(spec, sinks_H=None), ragged))
)
planted("scores are scaled by the head size alone", ATTENTION, "sees the right keys, but its result is off")(
    attending(lambda spec, ragged: (replace(spec, scale=1 / spec.head_size), ragged))
)
planted("all sequences read the blocks of the first", ATTENTION, r"query \d+ of sequence [1-9]")(
    attending(
        lambda spec, ragged: (
            spec,
            replace(ragged, block_table_BP=ragged.block_table_BP[:1].expand_as(ragged.block_table_BP)),
        )
    )
)


@planted(
    "queries of a chunk see the key that comes next", ATTENTION, r"sees the key of position \d+, which comes after"
)
class LateEdge(ReferenceKernels):
    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out = super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)
        for start, length, row in zip(ragged.starts, ragged.lens, ragged.offsets[:-1], strict=True):
            for i in range(length - 1):
                b = ragged.offsets.index(row)
                one = replace(
                    ragged,
                    starts=(start + i + 1,),
                    lens=(1,),
                    offsets=(0, 1),
                    block_table_BP=ragged.block_table_BP[b : b + 1],
                )
                out[row + i] = super().extend_attention(q_THE[row + i][None], k_cache, v_cache, one, spec)[0]
        return out


@planted("query heads take K/V heads in turns", ATTENTION, r"reads K/V head \d with query head \d")
class Interleaved(ReferenceKernels):
    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        H, K = spec.num_heads, spec.num_kv_heads
        order = torch.arange(H).view(H // K, K).T.flatten()
        sinks_H = None if spec.sinks_H is None else spec.sinks_H[order]
        out = super().extend_attention(q_THE[:, order], k_cache, v_cache, ragged, replace(spec, sinks_H=sinks_H))
        return out[:, order.argsort()]


@planted("a long sequence is attended to in another order beside others", "attention_is_exact", "other bits in a chunk")
class MindsCompany(ReferenceKernels):
    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out = super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)
        return out * (1 + 2**-7) if len(ragged.lens) > 9 else out


@planted("K/V in int8 are rounded toward zero", "store_kv_int8", "codes of K that store_kv stored has other bits")
class CutCodes(ReferenceKernels):
    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        super().store_kv(k_TKE, v_TKE, k_cache, v_cache, flat_T)
        if not isinstance(k_cache, Tensor):
            exact = k_TKE.float() / k_cache.scales.flatten(0, 1)[flat_T][..., None]
            k_cache.codes.flatten(0, 1)[flat_T] = exact.nan_to_num().trunc().to(torch.int8)


@planted("padding overwrites the first block", "store_kv", "changes the cache at flat index 0")
class WritesPadding(ReferenceKernels):
    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        if isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor):
            k_cache.view(-1)[0] = v_cache.view(-1)[0] = 0
        super().store_kv(k_TKE, v_TKE, k_cache, v_cache, flat_T)


@planted("K is stored before it is rotated", "rope_store_kv", "K that rope_store_kv stored")
class StoresRaw(ReferenceKernels):
    def rope_store_kv(
        self,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        rotary: Rotary,
        k_cache: KV,
        v_cache: KV,
        flat_T: Tensor,
    ) -> Tensor:
        self.store_kv(k_TKE, v_TKE, k_cache, v_cache, flat_T)
        return self.rope(q_THE, k_TKE, rotary)[0]


@planted("K is normalized with q's weight", "rope", "k after rope")
class OneNorm(ReferenceKernels):
    def rope(self, q_THE: Tensor, k_TKE: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        if norms := rotary.norms:
            rotary = rotary._replace(norms=HeadNorms(norms.q_weight_E, norms.q_weight_E, norms.eps, norms.unit_offset))
        return super().rope(q_THE, k_TKE, rotary)


@planted("unit_offset is ignored", "rms_norm", "with unit_offset")
class NoOffset(ReferenceKernels):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        return super().rms_norm(x_TD, weight_D, eps)


@planted("the residual is added up in place", "add_rms_norm", "writes to its argument residual")
class InPlace(ReferenceKernels):
    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        residual_TD += x_TD
        return self.rms_norm(residual_TD, weight_D, eps, unit_offset), residual_TD


@planted(
    "norms are reduced otherwise from 64 rows on",
    "rows_of_elementwise",
    r"rms_norm gives a row other bits in a batch of 1, 2",
)
class TiledNorm(ReferenceKernels):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        out = super().rms_norm(x_TD, weight_D, eps, unit_offset)
        return torch.nextafter(out.float(), out.float() + 1).to(out.dtype) * 1.01 if len(x_TD) >= 64 else out


@planted("a library's product takes another way with few rows", "rows_of_linear", "linear with a weight .* other bits")
class FewRows(ReferenceKernels):
    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        if len(x_TK) > 4 or packed.int8_group is not None:
            return super().linear(x_TK, packed)
        half = x_TK.shape[1] // 2
        parts = (x_TK[:, at].float() @ packed.weight_NK[:, at].float().T for at in (slice(half), slice(half, None)))
        out = sum(parts, torch.zeros(())) + (0 if packed.bias_N is None else packed.bias_N.float())
        return out.to(packed.dtype)


@planted("pack keeps the weight that it got", "linear", "is not a copy")
class Keeps(ReferenceKernels):
    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        packed = super().pack(weight_NK, bias_N)
        return replace(packed, weight_NK=weight_NK) if isinstance(weight_NK, Tensor) else packed


@planted("a bias is added twice", "linear", "linear of .* and bias is")
class TwiceBias(ReferenceKernels):
    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        out = super().linear(x_TK, packed)
        return out if packed.bias_N is None else out + packed.bias_N


@planted("adapters are not scaled", "adapters", "add_adapters")
class Unscaled(ReferenceKernels):
    def pack_adapter(self, parts: Sequence[AdapterPart]) -> Any:
        return super().pack_adapter([part._replace(low_rank=part.low_rank._replace(scale=1.0)) for part in parts])


@planted("adapters are added to all rows", "adapters", "add_adapters")
class Everywhere(ReferenceKernels):
    def add_adapters(self, product_TN: Tensor, x_TK: Tensor, rows: AdapterRows, table: Any) -> None:
        slots = [slot for slot, _ in rows.groups][:1]
        every = torch.arange(len(x_TK))
        super().add_adapters(product_TN, x_TK, rows._replace(groups=[(slot, every) for slot in slots]), table)


@planted("an adapter stays where it was", "adapters", "add_adapters, of an adapter that is gone")
class Stays(ReferenceKernels):
    def set_adapter(self, table: Any, slot: int, packed: Any | None) -> None:
        if packed is not None:
            super().set_adapter(table, slot, packed)


@planted("gate and values are swapped", "gated_linear", "gated_linear with")
class Swapped(ReferenceKernels):
    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Activation) -> Tensor:
        up, gate = self.linear(x_TK, packed).chunk(2, dim=-1)
        return self.gated(gate, up, activation)


@planted("gelu is computed without its tanh form", "gated", "gated with gelu_pytorch_tanh")
class OtherGelu(ReferenceKernels):
    def gated(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        if activation != "gelu_pytorch_tanh":
            return super().gated(gate, up, activation)
        return (gate.float() * torch.sigmoid(1.702 * gate.float())).to(up.dtype) * up


class Regrouped(ReferenceKernels):
    """Takes the scales of other groups."""

    def order(self, groups: int) -> Tensor:
        return torch.arange(groups).roll(1)

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        if isinstance(weight_NK, GroupedWeight):
            order = self.order(weight_NK.scales_NG.shape[1])
            weight_NK = replace(weight_NK, scales_NG=weight_NK.scales_NG[:, order])
        return super().pack(weight_NK, bias_N)


planted("groups take the scales of their neighbors", "linear_grouped", r"takes the scale of group \d for column")(
    Regrouped
)


@planted("minima of grouped weights are forgotten", "linear_grouped", "leaves out the minimum of column")
class NoMinimum(ReferenceKernels):
    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        if isinstance(weight_NK, GroupedWeight) and weight_NK.minimum_NG is not None:
            weight_NK = replace(weight_NK, minimum_NG=torch.zeros_like(weight_NK.minimum_NG))
        return super().pack(weight_NK, bias_N)


@planted("scales of quantized weights are rounded down", "quantize", "scales of codes of . bits has other bits")
class OtherScales(ReferenceKernels):
    def quantize(self, weight_NK: Tensor, bits: Any) -> GroupedWeight:
        made = super().quantize(weight_NK, bits)
        return replace(made, scales_NG=made.scales_NG * 0.99)


@planted("of equal logits the later expert is taken", "route", "all logits are equal")
class LastExpert(ReferenceKernels):
    def route(self, logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flipped, shares = super().route(logits_TX.flip(1), routing, None if bias_X is None else bias_X.flip(0))
        return logits_TX.shape[1] - 1 - flipped, shares


@planted("the selection bias gets into the shares", "route", "the shares that route gives")
class BiasedShares(ReferenceKernels):
    def route(self, logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        experts, shares = super().route(logits_TX, routing, bias_X)
        return experts, shares if bias_X is None else shares + bias_X[experts.long()]


@planted("experts without gates count twice", "ungated_experts", "experts without gates .*in token")
class Doubled(ReferenceKernels):
    def gated_experts(
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: ExpertActivation
    ) -> Tensor:
        return super().gated_experts(x_TD, experts_TJ, shares_TJ * (1 + (activation == "relu2")), packed, activation)


@planted("an expert's down projection has no bias", "gated_experts", "gated_experts of .* in token 0")
class NoDownBias(ReferenceKernels):
    def pack_experts(self, experts: Iterable[Expert], count: int) -> Any:
        return super().pack_experts((expert._replace(down_bias_N=None) for expert in experts), count)


@planted("top_p drops the token with which the mass is reached", "sample", "sample draws token")
class EarlyTopP(ReferenceKernels):
    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        return super().sample(
            logits_NV, replace(draws, top_p_N=draws.top_p_N.where(draws.top_p_N == 1, draws.top_p_N / 2))
        )


@planted("rows without a filter are cut by their neighbors'", "rows_of_sample", "sample gives a row other bits")
class SharedTopK(ReferenceKernels):
    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        return super().sample(logits_NV, replace(draws, top_k_N=draws.top_k_N.amax().expand_as(draws.top_k_N)))


@planted("a convolution has no bias", "causal_conv", "causal_conv with a state .* in token")
class NoConvBias(ReferenceKernels):
    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        silu: bool,
        columns_RWC: Tensor,
        rows: StateRows,
    ) -> Tensor:
        return super().causal_conv(x_TC, weight_CW, None, silu, columns_RWC, rows)


@planted("a convolution keeps the newest input first", "causal_conv", "the state that causal_conv saves after token")
class NewestFirst(ReferenceKernels):
    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        silu: bool,
        columns_RWC: Tensor,
        rows: StateRows,
    ) -> Tensor:
        out = super().causal_conv(x_TC, weight_CW, bias_C, silu, columns_RWC, rows)
        saved = rows.save_T[rows.save_T >= 0]
        columns_RWC[saved] = columns_RWC[saved].flip(1)
        return out


def delta_rule(
    change: Callable[[Tensor, Tensor, Tensor, DeltaRule, Tensor, StateRows], tuple[Any, ...]],
) -> type[ReferenceKernels]:
    """Kernels whose gated delta rule gets other arguments."""

    class Changed(ReferenceKernels):
        def gated_delta_rule(
            self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
        ) -> Tensor:
            return super().gated_delta_rule(*change(qkv_TC, a_TA, b_TH, rule, state_RHKV, rows))

    return Changed


def last_saves(rows: StateRows) -> StateRows:
    """Only the last tokens of sequences save their states."""
    save_T = torch.full_like(rows.save_T, -1)
    last = (rows.offsets_B1[1:] - 1)[rows.offsets_B1.diff() > 0].long()
    save_T[last] = rows.save_T[last]
    return rows._replace(save_T=save_T)


DELTA = "gated_delta_rule"
planted("dt_bias is forgotten", DELTA, "gated_delta_rule with a state .* in token")(
    delta_rule(lambda x, a, b, rule, s, rows: (x, a, b, replace(rule, dt_bias_A=0 * rule.dt_bias_A), s, rows))
)
planted("beta is bounded by 1", DELTA, "gated_delta_rule with a state .* in token")(
    delta_rule(lambda x, a, b, rule, s, rows: (x, a, b, replace(rule, max_beta=1.0), s, rows))
)
planted("the rows of a head decay as its first one", DELTA, "gated_delta_rule with a state .* in token")(
    delta_rule(
        lambda x, a, b, rule, s, rows: (
            *(x, a.view(*b.shape, -1)[:, :, :1].expand(*b.shape, a.shape[1] // b.shape[1]).flatten(1)),
            *(b, rule, s, rows),
        )
    )
)
planted("beta is the decay's input", DELTA, "gated_delta_rule with a state .* in token")(
    delta_rule(lambda x, a, b, rule, s, rows: (x, *((a, b) if rule.channel_decay else (b, a)), rule, s, rows))
)
planted("nothing is saved in the middle", DELTA, r"saves after token \d+, in the middle of a sequence")(
    delta_rule(lambda x, a, b, rule, s, rows: (x, a, b, rule, s, last_saves(rows)))
)
planted("all sequences begin with the first one's state", DELTA, "gated_delta_rule with a state .* in token")(
    delta_rule(
        lambda x, a, b, rule, s, rows: (
            *(x, a, b, rule, s),
            rows._replace(read_B=rows.read_B[:1].expand_as(rows.read_B)),
        )
    )
)


@planted("the states that are read are cleared", DELTA, r"changes the state in row \d+, which no token saves")
class ClearsStates(ReferenceKernels):
    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        out = super().gated_delta_rule(qkv_TC, a_TA, b_TH, rule, state_RHKV, rows)
        for row in rows.read_B[~torch.isin(rows.read_B, rows.save_T)]:
            state_RHKV[row] = 0
        return out


def chunked(length: int, sequences: int) -> type[ReferenceKernels]:
    """Kernels that compute otherwise with more tokens, or more sequences, at a time."""

    class Chunked(ReferenceKernels):
        def _rounded(self, out: Tensor, rows: StateRows) -> Tensor:
            otherwise = int(rows.offsets_B1.diff().max()) > length or len(rows.read_B) > sequences
            return out * (1 + 2**-7 * otherwise)

        def gated_delta_rule(
            self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
        ) -> Tensor:
            return self._rounded(super().gated_delta_rule(qkv_TC, a_TA, b_TH, rule, state_RHKV, rows), rows)

        def state_space(
            self, xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows
        ) -> Tensor:
            return self._rounded(super().state_space(xbc_TC, dt_TH, space, state_RHNP, rows), rows)

    return Chunked


planted("long chunks are computed otherwise", "states_are_exact", r"other bits in a chunk \[\d+, \d+\)")(
    chunked(30, 1000)
)
planted("many sequences are computed otherwise", "states_are_exact", r"other bits in a chunk .* beside [29]")(
    chunked(1000, 2)
)


@planted("a state loses bits between chunks", "states_are_exact", "other bits")
class RoundedStates(ReferenceKernels):
    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        out = super().gated_delta_rule(qkv_TC, a_TA, b_TH, rule, state_RHKV, rows)
        last = rows.save_T[(rows.offsets_B1[1:] - 1)[rows.offsets_B1.diff() > 0].long()]
        state_RHKV[last] = state_RHKV[last].bfloat16().float()
        return out


@planted("one NaN is everybody's", "states_of_nan", "reaches another sequence's results of")
class SharedNaN(ReferenceKernels):
    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        out = super().gated_delta_rule(qkv_TC, a_TA, b_TH, rule, state_RHKV, rows)
        return out + 0 * out.sum()

    def state_space(
        self, xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows
    ) -> Tensor:
        out = super().state_space(xbc_TC, dt_TH, space, state_RHNP, rows)
        return out + 0 * out.sum()


@planted("steps are not clamped", "state_space", "state_space with a state .* in token")
class FreeSteps(ReferenceKernels):
    def state_space(
        self, xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows
    ) -> Tensor:
        return super().state_space(xbc_TC, dt_TH, replace(space, dt_min=0.0), state_RHNP, rows)


@planted("the gate comes after the norm, always", "gated_rms_norm", "the gate first, is")
class GateLast(ReferenceKernels):
    def gated_rms_norm(
        self, x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool
    ) -> Tensor:
        return super().gated_rms_norm(x_TD, gate_TD, weight_W, eps, group, False)


@planted(
    "gated norms are rounded otherwise from 64 rows on", "rows_of_elementwise", "gated_rms_norm gives a row other bits"
)
class TiledGatedNorm(ReferenceKernels):
    def gated_rms_norm(
        self, x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool
    ) -> Tensor:
        out = super().gated_rms_norm(x_TD, gate_TD, weight_W, eps, group, gate_first)
        return out * 1.01 if len(x_TD) >= 64 else out


class Recorded(ReferenceKernels):
    """With a recorder whose replays run again; ``replaying`` is true meanwhile."""

    replaying = False

    def recorder(self) -> Any:
        return Noting(self)


class Noting(Recorder):
    def __init__(self, kernels: Recorded) -> None:
        super().__init__(cheap=True)
        self.kernels = kernels

    def __call__(self, run: Callable[[], Tensor]) -> Any:
        out, replay = super().__call__(run)

        def again() -> Tensor:
            self.kernels.replaying = True
            try:
                return replay()
            finally:
                self.kernels.replaying = False

        return out, again


@planted("a recording keeps the tokens that it was made with", "recorded", "a replay of embedding gives other bits")
class FixedTokens(Recorded):
    first: Tensor | None = None

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        if not self.replaying:
            self.first = token_ids_T.clone()
        assert self.first is not None
        return super().embedding(self.first, packed)


@planted(
    "a recording keeps the rows that it was made with", "recorded", "a replay of gated_delta_rule gives other bits"
)
class FixedRows(Recorded):
    first: StateRows | None = None

    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        if not self.replaying:
            self.first = StateRows(*(x.clone() for x in rows))
        assert self.first is not None
        return super().gated_delta_rule(qkv_TC, a_TA, b_TH, rule, state_RHKV, self.first)


@planted("a replay does not store K/V", "recorded", "a replay of store_kv gives other bits")
class ForgetsToStore(Recorded):
    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        if not self.replaying:
            super().store_kv(k_TKE, v_TKE, k_cache, v_cache, flat_T)


def test_kernels_with_a_recorder_that_repeats_pass() -> None:
    check_kernels(Recorded(), only=["recorded"])


class Refusing(ReferenceKernels):
    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        if isinstance(weight_NK, GroupedWeight):
            raise SettingsError("These kernels know no quantized weights.")
        return super().pack(weight_NK, bias_N)


def test_what_kernels_may_refuse_is_skipped_and_said() -> None:
    (outcome,) = SUITE.outcomes(Provider(Refusing()), only=["linear_grouped"])
    assert str(outcome) == (
        "linear_grouped: skipped: grouped weights are refused: These kernels know no quantized weights."
    )
    (outcome,) = SUITE.outcomes(Provider(ReferenceKernels()), only=["store_kv_int8"])
    assert outcome.skipped


@planted("tells nobody of what it packs", "packed_in", "the memory is told of no weight that was packed")
class Silent(CpuKernels):
    @contextmanager
    def packed_in(self, memory: PackedMemory) -> Iterator[None]:
        yield


@planted("packs grouped weights again", "packed_in", "1 are not asked for again, and 0 are packed again")
class Anew(CpuKernels):
    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        kept = self._kept
        if isinstance(weight_NK, GroupedWeight) and weight_NK.codes.is_meta:
            self._kept = None
        try:
            return super().pack(weight_NK, bias_N)
        finally:
            self._kept = kept


@planted("finds the weights of experts in another order", "packed_in", "bytes is asked for where one of|other bits")
class Turned(CpuKernels):
    def pack_experts(self, experts: Iterable[Expert], count: int) -> Any:
        every = [*experts]
        if every[0].gate_up_NK.is_meta:  # type: ignore[union-attr]
            packed = super().pack_experts(every, count)
            return PackedExperts(packed.gate_up[::-1], packed.down[::-1])
        return super().pack_experts(every, count)


@planted(
    "packs weights without values as if they were plain", "pack_without_values", r"takes \d+ bytes, but with values"
)
class Guessing(CpuKernels):
    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        if isinstance(weight_NK, GroupedWeight) and weight_NK.codes.is_meta:
            return torch.empty(weight_NK.shape, dtype=weight_NK.dtype, device="meta")
        return super().pack(weight_NK, bias_N)
