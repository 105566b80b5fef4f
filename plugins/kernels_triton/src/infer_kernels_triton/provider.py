"""The kernel provider: Triton kernels where they are faster than torch or keep rows exact."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infer.contracts.attention import KV, AttentionSpec, QuantizedKV, Ragged, Rotary
from infer.contracts.kernels import Draws, Expert, ExpertActivation, GateActivation, RecorderProtocol, Routing
from infer.contracts.states import DeltaRule, StateRows, StateSpace
from infer.errors import SettingsError
from infer.kernels.reference import SMALLEST_SUM, ReferenceKernels
from infer.weight import GroupedWeight, Weight
from infer_kernels_triton import assembler, attention, elementwise, grouped, matmul, sampling, states
from infer_kernels_triton import experts as mixture
from infer_kernels_triton.configs import LARGEST_HEAD, Config, configs, multiprocessors
from infer_kernels_triton.recording import CudaRecorder

log = logging.getLogger(__name__)

WAVES = 2
"""The segments of long sequences are divided among this many programs per multiprocessor."""
INTERPRETED_PROGRAMS = 64


class TritonKernels(ReferenceKernels):
    """Kernels for NVIDIA GPUs, and for CPU tensors in Triton's interpreter.

    ``exact`` chooses matrix products of our own instead of the vendor's, whose rows depend on how many there are.
    Products with quantized weights are always our own, and take activations as they are: groups of up to 64 values are
    too short for a matrix unit's int8 products to gain more than the sums of every group cost.
    """

    def __init__(self, device: torch.device, exact: bool = True) -> None:
        self._exact = exact
        self._device = device
        self._configs = configs(device)
        self._met: set[Hashable] = set()
        self._multiprocessors = multiprocessors(device)
        self._programs = INTERPRETED_PROGRAMS
        if device.type == "cuda":
            assembler.choose(torch.cuda.get_device_capability(device)[0])
            self._programs = WAVES * self._multiprocessors

    def recorder(self) -> RecorderProtocol | None:
        return CudaRecorder() if self._device.type == "cuda" else None

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        if isinstance(weight_NK, GroupedWeight):
            tiles = self._config(weight_NK.dtype).grouped
            if grouped.plane_of(weight_NK) is not None:
                codes = grouped.pack(weight_NK, bias_N, tiles)
                if not codes.words.is_meta:
                    grouped.warm_up(codes, tiles)
                return codes
            if self._first("dequantize", str(weight_NK)):
                log.warning("%s are dequantized: these kernels hold groups of a multiple of 16.", weight_NK)
            weight_NK = replace(weight_NK, int8_activations=False)
        packed = super().pack(weight_NK, bias_N)
        if self._exact and not packed.weight_NK.is_meta:
            linear = self._config(weight_NK.dtype).linear
            matmul.warm_up(packed.weight_NK, packed.bias_N, linear, self._multiprocessors)
        return packed

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        if isinstance(packed, grouped.PackedGrouped):
            return grouped.linear(x_TK, packed, self._config(x_TK.dtype).grouped)
        if not self._exact:
            return super().linear(x_TK, packed)
        tiles = self._config(x_TK.dtype).linear
        return matmul.linear(x_TK, packed.weight_NK, packed.bias_N, tiles, self._multiprocessors)

    def route(self, logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return mixture.route(logits_TX, routing, bias_X, SMALLEST_SUM)

    def pack_experts(self, experts: Iterable[Expert], count: int) -> Any:
        return mixture.pack(experts, count, lambda dtype: self._config(dtype).linear, self._multiprocessors)

    def gated_experts(
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: ExpertActivation
    ) -> Tensor:
        tiles = self._config(x_TD.dtype).linear
        return mixture.gated_experts(x_TD, experts_TJ, shares_TJ, packed, activation, tiles, self._multiprocessors)

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        if isinstance(packed, grouped.PackedGrouped):
            return grouped.rows(token_ids_T, packed)
        return super().embedding(token_ids_T, packed)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        return elementwise.rms_norm(x_TD, weight_D, eps, unit_offset)[0]

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        return elementwise.rms_norm(x_TD, weight_D, eps, unit_offset, residual_TD)

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
        return elementwise.rope_store_kv(q_THE, k_TKE, v_TKE, rotary, k_cache, v_cache, flat_T)

    def gated(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        return elementwise.gated(gate, up, activation)

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        fitting = (c for c in self._config(q_THE.dtype).attention if c.head_size >= spec.head_size)
        if (tiles := next(fitting, None)) is None:
            raise SettingsError(
                f"A head of this model has {spec.head_size} values in the cache, and kernels.backend triton computes "
                f"{LARGEST_HEAD} at most; use another backend."
            )
        first = self._first(
            "attention", q_THE.dtype, isinstance(k_cache, QuantizedKV), k_cache.shape[1], spec, spec.sinks_H is None
        )
        return attention.extend_attention(q_THE, k_cache, v_cache, ragged, spec, tiles, self._programs, first)

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
        return sampling.sample(logits_NV, draws, self._first("sample", logits_NV.shape[1]))

    def _config(self, dtype: torch.dtype) -> Config:
        return self._configs[dtype.itemsize]

    def _first(self, *what: Hashable) -> bool:
        """Whether this kernel and shape occur for the first time. The caller then compiles all variants at once, so
        that no later request waits for the compiler."""
        new = what not in self._met
        self._met.add(what)
        return new
