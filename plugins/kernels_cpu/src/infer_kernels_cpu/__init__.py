"""Native kernels for CPUs: packed matrix products, attention, norms, rotary embedding, activations, sampling."""

from __future__ import annotations

import torch

from infer import hookimpl
from infer.contracts.kernels import KernelsProtocol, KernelsRegistration
from infer.contracts.registration import NoSettings
from infer_kernels_cpu import native

INFER_PLUGIN_API = 2
INFER_PLUGIN_ENV = [native.VARIABLE]
UNBUILT = (
    "it was built where no C++ compiler was found, or failed; install one (Debian: apt-get install g++), then run "
    "pip install hatchling && pip install --no-build-isolation --no-cache-dir --no-deps --force-reinstall -r "
    "dist/infer-kernels-cpu.txt"
)


def _make(device: torch.device, settings: NoSettings) -> KernelsProtocol:
    from infer_kernels_cpu.provider import CpuKernels

    return CpuKernels()


@hookimpl
def infer_kernels() -> list[KernelsRegistration]:
    about = native.about()
    return [
        KernelsRegistration(
            "cpu",
            _make,
            "native kernels for CPUs, fastest with AMX or AVX-512 BF16",
            priority=10,
            devices=("cpu",),
            kv_dtypes=("int8",),
            unavailable=None if about else UNBUILT,
            about=about,
        )
    ]
