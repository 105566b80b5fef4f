"""The reference kernels, in torch: they define what every kernel computes, and serve where nothing faster is installed.

Each row of a result depends on its own input row alone, bit for bit. Three rules ensure this on a CPU:

- Matrix products get at least as many rows as the platform's library needs to treat every row alike.
- Activations are composed of operations whose vector and scalar forms agree (``exp``, ``tanh``, arithmetic). Those of
  ``torch.nn.functional.silu`` do not: an element's last bit depends on whether it falls into a vector's tail.
- Attention reduces keys in segments of a fixed size counted from position 0, whatever the chunk.

Shapes: T tokens, D hidden, H query heads, K key/value heads, G = H / K, E head size, S segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from infer.contracts.adapters import AdapterPart, AdapterRows
from infer.contracts.attention import KV, AttentionSpec, QuantizedKV, Ragged, Rotary
from infer.contracts.kernels import (
    Activation,
    Draws,
    Expert,
    ExpertActivation,
    GateActivation,
    KernelsProtocol,
    RecorderProtocol,
    Routing,
)
from infer.contracts.states import DeltaRule, StateRows, StateSpace
from infer.kernels import states
from infer.kernels.quantize import quantize_weight
from infer.weight import LEAST, GroupedWeight, Weight, divided, quantize_rows

SEGMENT = 128
"""Keys per reduction step of attention."""
TILE = 128
"""Queries per block of attention."""
CLAMP, SLOPE = 7.0, 1.702
"""Of the activation ``clamped_swiglu``."""
SMALLEST_SUM = 1e-20
"""What is added to the sum of the chosen sigmoids before it divides them, as in DeepSeek-V3."""
EXACT_ROWS = 16
"""Matrix products of at least this many rows are taken to treat all rows alike, if samples of them do; otherwise
they are computed this many rows at a time. Below, ``exact_rows`` finds out from how many rows on rows are treated
alike, and products of fewer rows are padded."""
LEAST_RANK = 16
"""Adapters' ranks are padded to multiples of it: products with fewer columns are not found to treat rows alike."""
MANY_ROWS = (24, 96, 128, 256, 400)
"""The samples."""


@dataclass(frozen=True)
class PackedLinear:
    """A weight [N, K], its bias, and the fewest rows with which a product gives each row the same bits."""

    weight_NK: Tensor
    bias_N: Tensor | None
    min_rows: int
    max_rows: int | None
    dtype: torch.dtype
    """The dtype of the activations and the results."""
    int8_group: int | None = None
    """If the activations are rounded to int8, how many of them share a scale; the weight is then fp32."""


@dataclass(frozen=True)
class PackedExperts:
    """What ``pack_gated`` and ``pack`` make of each expert's weights."""

    gate_up: tuple[Any, ...]
    down: tuple[Any, ...]


@dataclass(frozen=True)
class Tiles:
    """Query tiles of equal size that attend to the same segments of keys, so that one batched product computes all."""

    sequences: tuple[int, ...]
    """The index of each tile's sequence in the batch."""
    starts: tuple[int, ...]
    """The position of each tile's first query."""
    rows: tuple[int, ...]
    """The row of each tile's first query in the batch."""
    size: int
    first_segment: int
    last_segment: int


class ReferenceKernels(KernelsProtocol):
    """Kernels in plain torch. Providers subclass them and override what they compute faster."""

    def recorder(self) -> RecorderProtocol | None:
        return None

    def quantize(self, weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
        return quantize_weight(weight_NK, bits)

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        """A grouped weight is dequantized: from then on it takes as much memory as a plain one."""
        dtype, int8_group = weight_NK.dtype, None
        if isinstance(weight_NK, GroupedWeight):
            if weight_NK.int8_activations:
                int8_group = weight_NK.activation_group
                weight_NK = replace(weight_NK, dtype=torch.float32)
            weight_NK = weight_NK.dequantize()
        else:
            weight_NK = weight_NK.clone()
        rows: tuple[int, int | None] = (1, None)
        if weight_NK.device.type == "cpu":
            n, k = weight_NK.shape
            rows = exact_rows(torch.nn.functional.linear, n, k, weight_NK.dtype, torch.get_num_threads())
        bias_N = None if bias_N is None else bias_N.to(weight_NK.dtype, copy=True)
        return PackedLinear(weight_NK, bias_N, *rows, dtype, int8_group)

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        if packed.int8_group is not None:
            q_TGk, scale_TG1 = quantize_rows(x_TK, packed.int8_group)
            x_TK = (q_TGk * scale_TG1).flatten(1)
        parts = [x_TK] if packed.max_rows is None else torch.split(x_TK, packed.max_rows)
        products = [
            _at_least(packed.min_rows, part, lambda x: torch.nn.functional.linear(x, packed.weight_NK, packed.bias_N))
            for part in parts
        ]
        return (products[0] if len(products) == 1 else torch.cat(products)).to(packed.dtype)

    def pack_gated(self, gate_up_NK: Weight, bias_N: Tensor | None = None) -> Any:
        return self.pack(gate_up_NK, bias_N)

    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Activation) -> Tensor:
        gate, up = self.linear(x_TK, packed).chunk(2, dim=-1)
        return self.gated(gate, up, activation)

    def pack_adapter(self, parts: Sequence[AdapterPart]) -> Any:
        packed = []
        for begin, (a_RK, b_NR, scale) in parts:
            more = -len(a_RK) % LEAST_RANK
            a_RK = torch.nn.functional.pad(a_RK.float(), (0, 0, 0, more))
            b_NR = torch.nn.functional.pad(b_NR.float() * scale, (0, more))
            packed.append((begin, len(b_NR), self.pack(a_RK), self.pack(b_NR)))
        return packed

    def adapter_table(self, slots: int) -> Any:
        return [None] * slots

    def set_adapter(self, table: Any, slot: int, packed: Any | None) -> None:
        table[slot] = packed

    def add_adapters(self, product_TN: Tensor, x_TK: Tensor, rows: AdapterRows, table: Any) -> None:
        for slot, rows_M in rows.groups:
            for begin, N, a, b in table[slot] or ():
                columns_TN = product_TN[:, begin : begin + N]
                added_MN = self.linear(self.linear(x_TK[rows_M].float(), a), b)
                columns_TN[rows_M] = (columns_TN[rows_M].float() + added_MN).to(product_TN.dtype)

    def route(self, logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits_TX = logits_TX.float()
        sigmoid = routing.score == "sigmoid"
        scores_TX = 1.0 / (1.0 + torch.exp(-logits_TX)) if sigmoid else logits_TX
        by_TX = scores_TX if bias_X is None else scores_TX + bias_X
        experts_TJ = by_TX.argsort(dim=-1, descending=True, stable=True)[:, : routing.top]
        if not sigmoid:
            scores_TX = torch.exp(logits_TX - logits_TX.amax(-1, keepdim=True))
        shares_TJ = scores_TX.gather(1, experts_TJ)
        if routing.renormalize:
            shares_TJ = shares_TJ / (shares_TJ.sum(-1, keepdim=True) + (SMALLEST_SUM if sigmoid else 0))
        elif not sigmoid:
            shares_TJ = shares_TJ / scores_TX.sum(-1, keepdim=True)
        return experts_TJ.int(), shares_TJ * routing.scale

    def pack_experts(self, experts: Iterable[Expert], count: int) -> Any:
        packed = [
            (
                (self.pack_gated if e.gated else self.pack)(e.gate_up_NK, e.gate_up_bias_N),
                self.pack(e.down_NK, e.down_bias_N),
            )
            for e in experts
        ]
        return PackedExperts(*zip(*packed, strict=True))

    def gated_experts(
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: ExpertActivation
    ) -> Tensor:
        T, J = experts_TJ.shape
        out_TJD = x_TD.new_empty(T, J, x_TD.shape[1])
        for index, (gate_up, down) in enumerate(zip(packed.gate_up, packed.down, strict=True)):
            token, place = (experts_TJ == index).nonzero(as_tuple=True)
            if len(token):
                if activation == "relu2":
                    hidden = self.linear(x_TD[token], gate_up).relu().square()
                else:
                    hidden = self.gated_linear(x_TD[token], gate_up, activation)
                out_TJD[token, place] = self.linear(hidden, down)
        total_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for j in range(J):
            total_TD += shares_TJ[:, j, None] * out_TJD[:, j].float()
        return total_TD.to(x_TD.dtype)

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        return torch.nn.functional.embedding(token_ids_T, packed.weight_NK).to(packed.dtype)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        x = x_TD.float()
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        if unit_offset:
            return (x * (1.0 + weight_D.float())).to(x_TD.dtype)
        return x.to(x_TD.dtype) * weight_D

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        residual_TD = x_TD + residual_TD
        return self.rms_norm(residual_TD, weight_D, eps, unit_offset), residual_TD

    def rope(self, q_THE: Tensor, k_TKE: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        if norms := rotary.norms:
            q_THE = self.rms_norm(q_THE, norms.q_weight_E, norms.eps, norms.unit_offset)
            k_TKE = self.rms_norm(k_TKE, norms.k_weight_E, norms.eps, norms.unit_offset)
        return _rotate(q_THE, rotary.cos, rotary.sin), _rotate(k_TKE, rotary.cos, rotary.sin)

    def gated(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        gate = gate.float()
        if activation == "silu":
            gate = gate / (1.0 + torch.exp(-gate))
        elif activation == "sigmoid":
            gate = states.sigmoid(gate)
        elif activation == "softplus":
            gate = states.softplus(gate)
        elif activation == "clamped_swiglu":
            gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1
            gate = gate / (1.0 + torch.exp(-SLOPE * gate))
        else:
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            gate = 0.5 * gate * (1.0 + torch.tanh(inner))
        return gate.to(up.dtype) * up

    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        both = (k_TKE, k_cache), (v_TKE, v_cache)
        for x_TKE, cache in both[:1] if v_cache is k_cache else both:
            if isinstance(cache, QuantizedKV):
                codes_TKE, scales_TK = quantize(x_TKE)
                cache.codes.flatten(0, 1).index_copy_(0, flat_T, codes_TKE)
                cache.scales.flatten(0, 1).index_copy_(0, flat_T, scales_TK)
            else:
                cache.flatten(0, 1).index_copy_(0, flat_T, x_TKE)

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
        q_THE, k_TKE = self.rope(q_THE, k_TKE, rotary)
        self.store_kv(k_TKE, v_TKE, k_cache, v_cache, flat_T)
        return q_THE

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out_THE = torch.empty_like(q_THE)
        for tiles in plan_tiles(ragged.starts, ragged.lens, spec.window):
            _attend_tiles(tiles, q_THE, k_cache, v_cache, ragged.block_table_BP, spec, out_THE)
        return out_THE

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        silu: bool,
        columns_RWC: Tensor,
        rows: StateRows,
    ) -> Tensor:
        return states.causal_conv(x_TC, weight_CW, bias_C, silu, columns_RWC, rows)

    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        return states.gated_delta_rule(qkv_TC, a_TA, b_TH, rule, state_RHKV, rows)

    def state_space(
        self, xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows
    ) -> Tensor:
        return states.state_space(xbc_TC, dt_TH, space, state_RHNP, rows)

    def gated_rms_norm(
        self, x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool
    ) -> Tensor:
        return states.gated_rms_norm(x_TD, gate_TD, weight_W, eps, group, gate_first)

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        top_N, token_N = logits_NV.max(dim=-1)
        if not draws.greedy:
            token_N = token_N.where(draws.temperature_N == 0, _draw(logits_NV, draws))
        return token_N.where(torch.isfinite(top_N), -1)


@functools.lru_cache(maxsize=16)
def plan_tiles(starts: tuple[int, ...], lens: tuple[int, ...], window: int | None) -> tuple[Tiles, ...]:
    """Cut every chunk into tiles of at most ``TILE`` queries, and group tiles of equal size and equal segments.

    Decodes of similar context lengths form one group, and so do corresponding tiles of equally long prompts.
    """
    groups: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    row = 0
    for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
        for t in range(0, length, TILE):
            size, begin = min(TILE, length - t), start + t
            first = 0 if window is None else max(0, begin - window + 1) // SEGMENT
            last = (begin + size - 1) // SEGMENT
            groups.setdefault((size, first, last), []).append((b, begin, row + t))
        row += length
    return tuple(
        Tiles(*(tuple(column) for column in zip(*members, strict=True)), size, first, last)  # type: ignore[call-arg, arg-type]
        for (size, first, last), members in groups.items()
    )


def _attend_tiles(
    tiles: Tiles,
    q_THE: Tensor,
    k_cache: KV,
    v_cache: KV,
    block_table_BP: Tensor,
    spec: AttentionSpec,
    out_THE: Tensor,
) -> None:
    """Online-softmax attention (Milakov and Gimelshein, 2018) over fixed segments, accumulated in fp32."""
    device = q_THE.device
    g, n, (H, E), K = len(tiles.rows), tiles.size, q_THE.shape[1:], spec.num_kv_heads
    G, M = H // K, max(EXACT_ROWS, H // K * n)
    block_size = k_cache.shape[1]
    steps_n = torch.arange(n, device=device)
    row_gn = torch.tensor(tiles.rows, device=device)[:, None] + steps_n
    position_gn = torch.tensor(tiles.starts, device=device)[:, None] + steps_n
    table_gP = block_table_BP[torch.tensor(tiles.sequences, device=device)].long()

    q = q_THE.new_zeros(g, K, M, E, dtype=torch.float32)
    rows_q = q_THE[row_gn].float() * spec.scale
    q[:, :, : G * n] = rows_q.view(g, n, K, G, E).permute(0, 2, 3, 1, 4).reshape(g, K, G * n, E)
    q = q.view(g * K, M, E)
    top = torch.full((g * K, M, 1), torch.finfo(torch.float32).min, device=device)
    total = torch.zeros_like(top)
    acc = torch.zeros_like(q)
    for segment in range(tiles.first_segment, tiles.last_segment + 1):
        key_S = torch.arange(segment * SEGMENT, (segment + 1) * SEGMENT, device=device)
        # Keys past the tile's last query are masked below, but they are read, so read a key of the same sequence in
        # their place: what lies beyond may belong to another sequence, and 0 x NaN is NaN.
        key_gS = torch.minimum(key_S, position_gn[:, -1:])
        flat_gS = table_gP.gather(1, key_gS // block_size) * block_size + key_gS % block_size
        k = _read(k_cache, flat_gS).permute(0, 2, 3, 1).contiguous().view(g * K, E, SEGMENT)
        v = _read(v_cache, flat_gS).permute(0, 2, 1, 3).contiguous().view(g * K, SEGMENT, E)
        scores = torch.bmm(q, k)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        hidden_gnS = key_S > position_gn[:, :, None]
        if spec.window is not None:
            hidden_gnS |= key_S <= position_gn[:, :, None] - spec.window
        scores.view(g, K, M, SEGMENT)[:, :, : G * n].view(g, K, G, n, SEGMENT).masked_fill_(
            hidden_gnS[:, None, None], float("-inf")
        )
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_top)
        decay = torch.exp(top - new_top)
        total = total * decay + weights.sum(-1, keepdim=True)
        acc = acc * decay + torch.bmm(weights, v)
        top = new_top

    def queries(x: Tensor) -> Tensor:
        """The rows of queries, without those that fill up: [g, K, G, n, columns]."""
        return x.view(g, K, M, -1)[:, :, : G * n].view(g, K, G, n, -1)

    denominator = queries(total)
    if spec.sinks_H is not None:
        denominator = denominator + torch.exp(spec.sinks_H.view(K, G, 1, 1) - queries(top))
    out = (queries(acc) / denominator).permute(0, 3, 1, 2, 4)
    out_THE[row_gn.flatten()] = out.reshape(g * n, H, E).to(out_THE.dtype)


def quantize(x_TKE: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [T, K, E] and scales [T, K] of K or V, as ``QuantizedKV`` has them."""
    x_TKE = x_TKE.float()
    top_TK = x_TKE.abs().amax(-1)
    scales_TK = divided(top_TK, 127).masked_fill(top_TK < LEAST, 0) + (top_TK - top_TK)  # + NaN unless all are finite
    empty_TK1 = (scales_TK > 0).logical_not()[..., None]
    return (x_TKE / scales_TK[..., None]).round().masked_fill(empty_TK1, 0).to(torch.int8), scales_TK


def _read(cache: KV, flat: Tensor) -> Tensor:
    """K or V of the given flat indices, in fp32."""
    if isinstance(cache, QuantizedKV):
        return cache.codes.flatten(0, 1)[flat].float() * cache.scales.flatten(0, 1)[flat][..., None]
    return cache.flatten(0, 1)[flat].float()


def _draw(logits_NV: Tensor, draws: Draws) -> Tensor:
    """Draw a token per row, int64 [N]. A row's token does not depend on the other rows' parameters. Greedy rows get a
    token, too, which the caller ignores."""
    # Subtract the top logit before dividing, so that a tiny temperature cannot overflow.
    logits_NV = logits_NV.float()
    heat_N1 = draws.temperature_N.where(draws.temperature_N > 0, 1.0)[:, None]
    scaled_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)) / heat_N1
    probs_NV = torch.softmax(torch.nan_to_num(scaled_NV, nan=0.0), dim=-1)

    if draws.top_k or draws.top_p:
        asks_N = (draws.top_k_N > 0) | (draws.top_p_N < 1)
        ranked_R = asks_N.nonzero()[:, 0]
        vocab = probs_NV.shape[1]
        top_k_R1 = draws.top_k_N[ranked_R, None]
        top_k_R1 = top_k_R1.where(top_k_R1 > 0, vocab)
        order_RV = logits_NV[ranked_R].sort(dim=-1, descending=True, stable=True).indices
        descending_RV = probs_NV[ranked_R].gather(1, order_RV)
        descending_RV = descending_RV.where(torch.arange(vocab, device=order_RV.device) < top_k_R1, 0.0)
        mass_RV = descending_RV.double().cumsum(dim=-1)
        # The last token kept is the one with which the mass reaches top_p.
        before_RV = mass_RV - descending_RV
        last_R1 = (before_RV < draws.top_p_N[ranked_R, None] * mass_RV[:, -1:]).sum(dim=-1, keepdim=True) - 1
        kept_RV = descending_RV.where(descending_RV >= descending_RV.gather(1, last_R1), 0.0)
        probs_NV[ranked_R] = torch.zeros_like(kept_RV).scatter_(1, order_RV, kept_RV)

    probs_NV = probs_NV.where(probs_NV >= draws.min_p_N[:, None] * probs_NV.amax(-1, keepdim=True), 0.0)
    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:]
    below_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    target_N1 = torch.minimum(draws.uniform_N[:, None] * total_N1, below_N1)
    return torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def _at_least(rows: int, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a row-wise function to ``x``, padded to at least ``rows`` rows, and return the rows of ``x``."""
    if x.shape[0] >= rows:
        return fn(x)
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return fn(padded)[: x.shape[0]]


@functools.lru_cache(maxsize=256)
def exact_rows(
    linear: Callable[[Tensor, Tensor], Tensor], n: int, k: int, dtype: torch.dtype, threads: int
) -> tuple[int, int | None]:
    """The fewest and the most rows with which ``linear`` with a weight [n, k] gives a row the same bits, whatever the
    other rows. The most is None if many rows are no different from few, and otherwise equal to the fewest.

    It is found by trying, because libraries switch algorithms with the number of rows. ``threads`` is only a part of
    the cache's key: how a product is split over threads is part of the algorithm."""
    generator = torch.Generator().manual_seed(0)
    # Trying a whole vocabulary would take too long, and 4096 rows of it take the same path in the library.
    half_w = torch.randn(min(n, 4096), k // 2, generator=generator)
    half_x = torch.randn(MANY_ROWS[-1], k // 2, generator=generator)
    # Every product occurs with both signs, so that the sums are rounding errors alone. Another order of summation then
    # shows in nearly every value; with plain noise, rounding to bfloat16 would hide it in all but a few.
    order = torch.randperm(k, generator=generator)
    odd = (0, k % 2)
    weight = torch.nn.functional.pad(torch.cat((half_w, -half_w), 1), odd)[:, order].to(dtype)
    x = torch.nn.functional.pad(torch.cat((half_x, half_x), 1), odd)[:, order].to(dtype)
    few = linear(x[: 2 * EXACT_ROWS], weight)
    for rows in (EXACT_ROWS, *MANY_ROWS):
        many, last = linear(x[:rows], weight), slice(rows - EXACT_ROWS, rows)
        if not torch.equal(many[: 2 * EXACT_ROWS], few[:rows]) or not torch.equal(many[last], linear(x[last], weight)):
            return EXACT_ROWS, EXACT_ROWS
    for rows in range(EXACT_ROWS - 1, 0, -1):
        if not all(torch.equal(linear(x[i : i + rows], weight), few[i : i + rows]) for i in (0, 5)):
            return rows + 1, None
    return 1, None
