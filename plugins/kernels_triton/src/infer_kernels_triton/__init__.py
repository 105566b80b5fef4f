"""Triton kernels for NVIDIA GPUs: attention, norms, rotary embedding, activations, sampling, exact matrix products."""

from __future__ import annotations

import torch
from pydantic import BaseModel, Field

from infer import hookimpl
from infer.contracts.kernels import KernelsProtocol, KernelsRegistration

INFER_PLUGIN_API = 2


class TritonSettings(BaseModel, extra="forbid"):
    exact: bool = Field(
        True,
        description="matrix products whose rows do not depend on how many there are; false takes the vendor's",
    )


def _make(device: torch.device, settings: TritonSettings) -> KernelsProtocol:
    # Importing Triton's compiler takes long, so only those who use it should wait for it.
    from infer_kernels_triton.provider import TritonKernels

    return TritonKernels(device, settings.exact)


@hookimpl
def infer_kernels() -> list[KernelsRegistration]:
    return [
        KernelsRegistration(
            "triton",
            _make,
            "fused kernels for NVIDIA GPUs from compute capability 8.0 on",
            TritonSettings,
            priority=10,
            devices=("cuda",),
            kv_dtypes=("int8",),
        )
    ]
