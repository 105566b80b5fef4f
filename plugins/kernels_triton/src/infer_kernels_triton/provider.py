"""The provider: what is better in Triton than in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infer.device import CudaRecorder
from infer.kernels.reference import ReferenceKernels
from infer.protocols import Activation, AttentionSpec, Draws, Ragged, RecorderProtocol, Rotary
from infer_kernels_triton import attention, elementwise, matmul, sampling
from infer_kernels_triton.configs import config

WAVES = 2
"""Programs per multiprocessor that the segments of long sequences are shared among."""
INTERPRETED_PROGRAMS = 64


class TritonKernels(ReferenceKernels):
    """For NVIDIA GPUs; on CPU tensors in Triton's interpreter.

    ``exact`` takes matrix products of our own instead of the vendor's, whose rows depend on how many there are.
    """

    def __init__(self, device: torch.device, exact: bool = True) -> None:
        self._exact = exact
        self._device = device
        self._config = config(device)
        self._programs = INTERPRETED_PROGRAMS
        if device.type == "cuda":
            self._programs = WAVES * torch.cuda.get_device_properties(device).multi_processor_count

    def recorder(self) -> RecorderProtocol | None:
        return CudaRecorder() if self._device.type == "cuda" else None

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        if not self._exact:
            return super().linear(x_TK, packed)
        return matmul.linear(x_TK, packed.weight_NK, packed.bias_N, self._config.linear)

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
        k_cache: Tensor,
        v_cache: Tensor,
        flat_T: Tensor,
    ) -> Tensor:
        return elementwise.rope_store_kv(q_THE, k_TKE, v_TKE, rotary, k_cache, v_cache, flat_T)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return elementwise.gated(gate_up, activation)

    def extend_attention(
        self, q_THE: Tensor, k_cache: Tensor, v_cache: Tensor, ragged: Ragged, spec: AttentionSpec
    ) -> Tensor:
        tiles = next(c for c in self._config.attention if c.head_size >= spec.head_size)
        return attention.extend_attention(q_THE, k_cache, v_cache, ragged, spec, tiles, self._programs)

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        return sampling.sample(logits_NV, draws)
