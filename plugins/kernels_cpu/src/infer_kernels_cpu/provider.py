"""The kernel provider, which passes torch tensors to the native code as pointers and strides."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from infer.contracts.adapters import AdapterPart, AdapterRows
from infer.contracts.attention import KV, AttentionSpec, Ragged, Rotary
from infer.contracts.kernels import (
    Activation,
    Draws,
    Expert,
    ExpertActivation,
    GateActivation,
    PackedMemory,
    RecorderProtocol,
    Routing,
)
from infer.contracts.states import DeltaRule, StateRows, StateSpace
from infer.device import pages
from infer.kernels.reference import PackedExperts, ReferenceKernels
from infer.weight import GroupedWeight, Weight, unfilled
from infer_kernels_cpu import native
from infer_kernels_cpu.arguments import cache_pointers, contiguous_rows, one_kind, row_places, state_places
from infer_kernels_cpu.memory import Buffers
from infer_kernels_cpu.packed import (
    KINDS,
    SCALES,
    AdapterTable,
    Mixture,
    Packed,
    PackedAdapter,
    PackedGrouped,
    Shelf,
    addresses,
    alike,
    biases,
    room,
    small,
)
from infer_kernels_cpu.recording import Recorder

CHUNK = 1 << 20
"""How many weights of a type without a number are converted at a time."""
GATES: dict[GateActivation | ExpertActivation | None, int] = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2}
GATES |= {"clamped_swiglu": 3, "relu2": 4, "sigmoid": 5, "softplus": 6}
"""The native code's numbers of the activations (its ``Gate``)."""


class CpuKernels(ReferenceKernels):
    """Kernels for bfloat16 and float32 on CPUs. ``level`` is the instruction set level; None for the best one."""

    def __init__(self, level: str | None = None) -> None:
        self.level = level or native.chosen()
        self.native = native.load(self.level)
        self._empty = Buffers().empty
        self._kept: PackedMemory | None = None

    @functools.cached_property
    def layout(self) -> str:
        return f"{self.level} {native.digest(self.level)}"

    @contextmanager
    def packed_in(self, memory: PackedMemory) -> Iterator[None]:
        self._kept = memory
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def results_in(self, memory: Buffers) -> Iterator[None]:
        """Allocate results from ``memory`` until the context ends."""
        before, self._empty = self._empty, memory.empty
        try:
            yield
        finally:
            self._empty = before

    def recorder(self) -> RecorderProtocol | None:
        return Recorder(self.native, self.results_in)

    def quantize(self, weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
        if (dtype := weight_NK.dtype) not in KINDS:
            rows = max(1, CHUNK // weight_NK.shape[1])
            parts = [self.quantize(weight_NK[n : n + rows].float(), bits) for n in range(0, len(weight_NK), rows)]
            return replace(GroupedWeight.stack(parts), dtype=dtype)
        weight_NK, made = weight_NK.contiguous(), unfilled(weight_NK, bits)
        codes, scales = made.codes.data_ptr(), made.scales_NG.data_ptr()
        shape = (*weight_NK.shape, made.group_size)
        self.native.infer_quantize(KINDS[dtype], weight_NK.data_ptr(), *shape, bits, codes, scales)
        return made

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Packed:
        return self._pack(weight_NK, bias_N, gated=False)

    def pack_gated(self, gate_up_NK: Weight, bias_N: Tensor | None = None) -> Packed:
        return self._pack(gate_up_NK, bias_N, gated=True)

    def _pack(
        self, weight_NK: Weight, bias_N: Tensor | None, gated: bool, memory: Callable[[int], Any] = pages
    ) -> Packed:
        if isinstance(weight_NK, GroupedWeight):
            return self._pack_grouped(weight_NK, bias_N, gated, memory)
        (N, K), kind = weight_NK.shape, KINDS[weight_NK.dtype]
        weight_NK = weight_NK.contiguous()
        count = self.native.infer_packed_words(kind, N, K, gated)
        words, new = room(count, torch.int32, memory, weight_NK, self._kept)
        if new:
            self.native.infer_pack(kind, weight_NK.data_ptr(), N, K, gated, words.data_ptr())
        return Packed(words, N, K, gated, weight_NK.dtype, None if bias_N is None else bias_N.clone())

    def _pack_grouped(
        self, weight: GroupedWeight, bias_N: Tensor | None, gated: bool, memory: Callable[[int], Any]
    ) -> PackedGrouped:
        N, K = weight.shape
        floats = [weight.scales_NG] if weight.minimum_NG is None else [weight.scales_NG, weight.minimum_NG]
        kind = floats[0].dtype if len({x.dtype for x in floats}) == 1 and floats[0].dtype in SCALES else torch.float32
        floats = [x.to(kind).contiguous() for x in floats]
        matrix = native.GroupedMatrix(
            N=N,
            K=K,
            group=weight.activation_group,
            bits=weight.bits,
            scales=SCALES[kind],
            minimum=weight.minimum_NG is not None,
            table=weight.table is not None,
            int8=weight.int8_activations,
            gated=gated,
        )
        if weight.table is not None:
            matrix.values[:] = weight.table.tolist()
        codes = weight.codes.contiguous()
        count = self.native.infer_grouped_bytes(ctypes.byref(matrix))
        words, new = room(count, torch.uint8, memory, codes, self._kept)
        if not words.is_meta:
            matrix.packed = words.data_ptr()
        if new:
            self.native.infer_pack_grouped(
                KINDS[weight.dtype],
                ctypes.byref(matrix),
                codes.data_ptr(),
                floats[0].data_ptr(),
                floats[-1].data_ptr(),
                floats[0].shape[1],
            )
        return PackedGrouped(words, N, K, gated, weight.dtype, None if bias_N is None else bias_N.clone(), matrix)

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        return self._linear(x_TK, packed, None)

    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Activation) -> Tensor:
        return self._linear(x_TK, packed, activation)

    def _linear(self, x_TK: Tensor, packed: Packed, activation: Activation | None) -> Tensor:
        T, kind = x_TK.shape[0], KINDS[packed.dtype]
        if x_TK.stride(-1) != 1:
            x_TK = x_TK.contiguous()
        out = self._empty(T, packed.N // 2 if packed.gated else packed.N, dtype=packed.dtype)
        bias = None if packed.bias_N is None else packed.bias_N.data_ptr()
        x, gate = (x_TK.data_ptr(), x_TK.stride(0), T), GATES[activation]
        if isinstance(packed, PackedGrouped):
            self.native.infer_grouped_linear(kind, ctypes.addressof(packed.matrix), *x, bias, gate, out.data_ptr())
        else:
            words, N, K = packed.words.data_ptr(), packed.N, packed.K
            self.native.infer_linear(kind, *x, words, N, K, bias, gate, out.data_ptr())
        return out

    def pack_adapter(self, parts: Sequence[AdapterPart]) -> PackedAdapter:
        (rows, columns), factors, scales = native.ADAPTER_PIECE, list[Tensor](), list[float]()
        made, packed = (native.AdapterPart * len(parts))(), list[Packed]()
        for part, (begin, (a_RK, b_NR, scale)) in zip(made, parts, strict=True):
            more = -len(a_RK) % rows
            factors.append(pad(a_RK, (0, -a_RK.shape[1] % columns, 0, more)))
            packed.append(self._pack(pad(b_NR, (0, more)), None, gated=False, memory=small))
            part.b, part.begin, part.N, part.R = packed[-1].words.data_ptr(), begin, packed[-1].N, packed[-1].K
            scales += [scale] * part.R
        a = torch.cat(factors).view(len(scales) // rows, rows, -1, columns).transpose(1, 2).contiguous()
        scales_R = torch.tensor(scales, dtype=torch.float32)
        own = native.Adapter(a.data_ptr(), scales_R.data_ptr(), made, len(made), len(scales))
        return PackedAdapter(own, (made, packed, a, scales_R))

    def adapter_table(self, slots: int) -> AdapterTable:
        return AdapterTable(slots)

    def set_adapter(self, table: Any, slot: int, packed: Any | None) -> None:
        table.pointers[slot] = None if packed is None else ctypes.addressof(packed.native)
        table.kept[slot] = packed

    def add_adapters(self, product_TN: Tensor, x_TK: Tensor, rows: AdapterRows, table: Any) -> None:
        x_TK = contiguous_rows(x_TK)
        assert product_TN.stride(1) == 1
        assert rows.slots_T.dtype == torch.int32
        self.native.infer_add_adapters(
            one_kind(product_TN, x_TK),
            x_TK.data_ptr(),
            x_TK.stride(0),
            *x_TK.shape,
            rows.slots_T.data_ptr(),
            table.address,
            len(table.kept),
            product_TN.data_ptr(),
            product_TN.stride(0),
        )

    def route(self, logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits_TX = logits_TX.contiguous()
        (T, X), J = logits_TX.shape, routing.top
        experts_TJ, shares_TJ = self._empty(T, J, dtype=torch.int32), self._empty(T, J, dtype=torch.float32)
        self.native.infer_route(
            KINDS[logits_TX.dtype],
            logits_TX.data_ptr(),
            T,
            X,
            J,
            routing.score == "sigmoid",
            routing.renormalize,
            routing.scale,
            None if bias_X is None else bias_X.data_ptr(),
            experts_TJ.data_ptr(),
            shares_TJ.data_ptr(),
        )
        return experts_TJ, shares_TJ

    def pack_experts(self, experts: Iterable[Expert], count: int) -> PackedExperts:
        shelves = Shelf(count), Shelf(count)
        packed = PackedExperts(
            *zip(
                *(
                    (
                        self._pack(e.gate_up_NK, e.gate_up_bias_N, e.gated, shelves[0]),
                        self._pack(e.down_NK, e.down_bias_N, False, shelves[1]),
                    )
                    for e in experts
                ),
                strict=True,
            )
        )
        if not all(map(alike, (packed.gate_up, packed.down))):
            return packed
        (first_gate_up, down), count = (packed.gate_up[0], packed.down[0]), len(packed.down)
        arrays = [addresses(packed.gate_up), addresses(packed.down), *map(biases, (packed.gate_up, packed.down))]
        grouped = [isinstance(first, PackedGrouped) for first in (first_gate_up, down)]
        places = [None if array is None else ctypes.addressof(array) for array in arrays]
        mixture = native.Mixture(count, first_gate_up.K, down.K, *places, *grouped)
        return Mixture(packed.gate_up, packed.down, mixture, tuple(arrays))

    def gated_experts(
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: ExpertActivation
    ) -> Tensor:
        if not isinstance(packed, Mixture):
            return super().gated_experts(x_TD, experts_TJ, shares_TJ, packed, activation)
        if x_TD.stride(-1) != 1:
            x_TD = x_TD.contiguous()
        experts_TJ, shares_TJ = experts_TJ.contiguous(), shares_TJ.contiguous()
        out_TD = self._empty(*x_TD.shape, dtype=x_TD.dtype)
        self.native.infer_gated_experts(
            KINDS[x_TD.dtype],
            ctypes.addressof(packed.native),
            x_TD.data_ptr(),
            x_TD.stride(0),
            *experts_TJ.shape[:1],
            experts_TJ.data_ptr(),
            shares_TJ.data_ptr(),
            experts_TJ.shape[1],
            GATES[activation],
            out_TD.data_ptr(),
        )
        return out_TD

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        out = self._empty(len(token_ids_T), packed.K, dtype=packed.dtype)
        ids, kind = token_ids_T.contiguous(), KINDS[packed.dtype]
        if isinstance(packed, PackedGrouped):
            matrix = ctypes.addressof(packed.matrix)
            self.native.infer_grouped_rows(kind, matrix, ids.data_ptr(), len(ids), out.data_ptr())
        else:
            words = packed.words.data_ptr()
            self.native.infer_rows(kind, words, packed.N, packed.K, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        return self._norm(x_TD, weight_D, eps, unit_offset, None, None)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        total = self._empty(*x_TD.shape, dtype=x_TD.dtype)
        return self._norm(x_TD, weight_D, eps, unit_offset, residual_TD.contiguous(), total), total

    def _norm(
        self,
        x: Tensor,
        weight_D: Tensor,
        eps: float,
        unit_offset: bool,
        residual: Tensor | None,
        total: Tensor | None,
    ) -> Tensor:
        """RMS norm of x, [T, D] or [T, heads, D] with any strides but the last; if a residual is given, of x +
        residual, which is stored in ``total``."""
        out = self._empty(*x.shape, dtype=x.dtype)
        self.native.infer_rms_norm(
            KINDS[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            x.shape[0],
            x.shape[1] if x.dim() == 3 else 1,
            x.shape[-1],
            weight_D.data_ptr(),
            eps,
            unit_offset,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            None if total is None else total.data_ptr(),
        )
        return out

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
        T, H, E = q_THE.shape
        cos, sin, norms = rotary
        out_THE = self._empty(T, H, E, dtype=q_THE.dtype)
        self.native.infer_rope_store_kv(
            KINDS[q_THE.dtype],
            q_THE.data_ptr(),
            q_THE.stride(0),
            q_THE.stride(1),
            k_TKE.data_ptr(),
            k_TKE.stride(0),
            k_TKE.stride(1),
            v_TKE.data_ptr(),
            v_TKE.stride(0),
            v_TKE.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0) if cos.shape[0] > 1 else 0,
            norms and norms.q_weight_E.data_ptr(),
            norms and norms.k_weight_E.data_ptr(),
            norms.eps if norms else 0.0,
            norms.unit_offset if norms else False,
            flat_T.data_ptr(),
            T,
            H,
            k_TKE.shape[1],
            E,
            out_THE.data_ptr(),
            *cache_pointers(k_cache),
            *cache_pointers(v_cache),
        )
        return out_THE

    def gated(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        assert gate.shape == up.shape, (gate.shape, up.shape)
        (T, width), gate, up = up.shape, contiguous_rows(gate), contiguous_rows(up)
        out = self._empty(T, width, dtype=up.dtype)
        gates, ups = (gate.data_ptr(), gate.stride(0)), (up.data_ptr(), up.stride(0))
        self.native.infer_gated(one_kind(up, gate), *gates, *ups, T, width, GATES[activation], out.data_ptr())
        return out

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        T, H, E = q_THE.shape
        out_THE = self._empty(T, H, E, dtype=q_THE.dtype)
        self.native.infer_extend_attention(
            KINDS[q_THE.dtype],
            q_THE.data_ptr(),
            q_THE.stride(0),
            q_THE.stride(1),
            *cache_pointers(k_cache),
            *cache_pointers(v_cache),
            out_THE.data_ptr(),
            ragged.starts_B.data_ptr(),
            ragged.offsets_B1.data_ptr(),
            ragged.block_table_BP.data_ptr(),
            ragged.block_table_BP.stride(0),
            len(ragged.lens),
            H,
            spec.num_kv_heads,
            E,
            k_cache.shape[1],
            spec.window or 0,
            spec.scale,
            spec.soft_cap or 0.0,
            None if spec.sinks_H is None else spec.sinks_H.data_ptr(),
        )
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
        (T, C), W = x_TC.shape, weight_CW.shape[1]
        x_TC, weight_CW = contiguous_rows(x_TC), weight_CW.contiguous()
        kind = one_kind(x_TC, weight_CW, *([] if bias_C is None else [bias_C]))
        assert weight_CW.shape[0] == C
        out_TC = self._empty(T, C, dtype=x_TC.dtype)
        self.native.infer_causal_conv(
            kind,
            x_TC.data_ptr(),
            x_TC.stride(0),
            T,
            C,
            weight_CW.data_ptr(),
            None if bias_C is None else bias_C.data_ptr(),
            W,
            silu,
            *state_places(columns_RWC, x_TC.dtype, W - 1, C),
            *row_places(rows, T),
            out_TC.data_ptr(),
        )
        return out_TC

    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        T, (H, K, V) = len(qkv_TC), rule.shape
        qkv_TC, a_TA, b_TH = contiguous_rows(qkv_TC), contiguous_rows(a_TA), contiguous_rows(b_TH)
        assert qkv_TC.shape[1] == rule.channels
        assert a_TA.shape == (T, rule.num_decays)
        assert b_TH.shape == (T, H)
        out_THV = self._empty(T, H, V, dtype=qkv_TC.dtype)
        self.native.infer_gated_delta_rule(
            one_kind(qkv_TC, a_TA, b_TH),
            qkv_TC.data_ptr(),
            qkv_TC.stride(0),
            a_TA.data_ptr(),
            a_TA.stride(0),
            b_TH.data_ptr(),
            b_TH.stride(0),
            T,
            rule.num_key_heads,
            H,
            K,
            V,
            rule.rate_H.data_ptr(),
            rule.dt_bias_A.data_ptr(),
            rule.channel_decay,
            rule.max_beta,
            *state_places(state_RHKV, torch.float32, H, K, V),
            *row_places(rows, T),
            out_THV.data_ptr(),
        )
        return out_THV

    def state_space(
        self, xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows
    ) -> Tensor:
        T, (H, N, P) = len(xbc_TC), space.shape
        xbc_TC, dt_TH = contiguous_rows(xbc_TC), contiguous_rows(dt_TH)
        assert xbc_TC.shape[1] == space.channels
        assert dt_TH.shape == (T, H)
        out_THP = self._empty(T, H, P, dtype=xbc_TC.dtype)
        self.native.infer_state_space(
            one_kind(xbc_TC, dt_TH),
            xbc_TC.data_ptr(),
            xbc_TC.stride(0),
            dt_TH.data_ptr(),
            dt_TH.stride(0),
            T,
            space.num_groups,
            H,
            N,
            P,
            space.rate_H.data_ptr(),
            space.dt_bias_H.data_ptr(),
            space.skip_H.data_ptr(),
            space.dt_min,
            space.dt_max,
            *state_places(state_RHNP, torch.float32, H, N, P),
            *row_places(rows, T),
            out_THP.data_ptr(),
        )
        return out_THP

    def gated_rms_norm(
        self, x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool
    ) -> Tensor:
        (T, D), W = x_TD.shape, len(weight_W)
        x_TD, gate_TD, weight_W = contiguous_rows(x_TD), contiguous_rows(gate_TD), weight_W.contiguous()
        assert gate_TD.shape == (T, D)
        assert D % group == D % W == max(group, W) % min(group, W) == 0
        out_TD = self._empty(T, D, dtype=x_TD.dtype)
        self.native.infer_gated_rms_norm(
            one_kind(x_TD, gate_TD, weight_W),
            x_TD.data_ptr(),
            x_TD.stride(0),
            gate_TD.data_ptr(),
            gate_TD.stride(0),
            T,
            D,
            weight_W.data_ptr(),
            W,
            eps,
            group,
            gate_first,
            out_TD.data_ptr(),
        )
        return out_TD

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        logits_NV = logits_NV.contiguous()
        rows, size = logits_NV.shape
        token_N = torch.empty(rows, dtype=torch.int64)
        self.native.infer_sample(
            KINDS[logits_NV.dtype],
            logits_NV.data_ptr(),
            rows,
            size,
            draws.temperature_N.data_ptr(),
            draws.top_k_N.data_ptr(),
            draws.top_p_N.data_ptr(),
            draws.min_p_N.data_ptr(),
            draws.uniform_N.data_ptr(),
            token_N.data_ptr(),
        )
        return token_N
