"""The compiled libraries: which ones exist, which of them this processor can run, and their functions."""

from __future__ import annotations

import ctypes
import functools
import platform
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

LEVELS = {"portable": "any processor"}
"""This machine's instruction set levels, in the order of ``infer_level``, and what each needs in addition to the one
before."""
match platform.machine():
    case "x86_64":
        LEVELS |= {
            "avx2": "AVX2 and FMA",
            "avx512": "AVX-512 F, BW, VL and DQ",
            "avx512_bf16": "AVX-512 BF16 and VNNI",
            "amx": "AMX",
        }
    case "aarch64":
        LEVELS |= {"bf16": "BF16 and I8MM"}
FOLDER = Path(__file__).parent


class GroupedMatrix(ctypes.Structure):
    """A packed grouped weight; ``Grouped`` in grouped.hpp."""

    _fields_ = (
        ("packed", c_void_p),
        *((name, c_int64) for name in ("N", "K", "group")),
        *((name, c_int32) for name in ("bits", "scales", "minimum", "table", "int8", "gated")),
        ("values", c_float * 16),
    )


class Mixture(ctypes.Structure):
    """The packed weights of a layer's experts; ``Mixture`` in experts.hpp."""

    _fields_ = (
        *((name, c_int64) for name in ("count", "D", "I")),
        *((name, c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, c_int32) for name in ("gate_up_grouped", "down_grouped")),
    )


_KIND, _SIZE, _POINTER, _REAL = c_int, c_int64, c_void_p, c_float
_TENSOR = [_POINTER, _SIZE, _SIZE]  # a pointer and two strides
_CACHE = [_POINTER, _POINTER]  # of values, or of codes and of their scales
FUNCTIONS: dict[str, list[type]] = {
    "pack": [_KIND, _POINTER, _SIZE, _SIZE, c_int, _POINTER],
    "rows": [_KIND, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER],
    "linear": [_KIND, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, c_int, _POINTER],
    "quantise": [_KIND, _POINTER, _SIZE, _SIZE, _SIZE, c_int, _POINTER, _POINTER],
    "pack_grouped": [_KIND, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE],
    "grouped_rows": [_KIND, _POINTER, _POINTER, _SIZE, _POINTER],
    "grouped_linear": [_KIND, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, c_int, _POINTER],
    "route": [_KIND, _POINTER, _SIZE, _SIZE, _SIZE, c_int, c_int, _REAL, _POINTER, _POINTER, _POINTER],
    "gated_experts": [_KIND, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, c_int, _POINTER],
    "rms_norm": [_KIND, *_TENSOR, _SIZE, _SIZE, _SIZE, _POINTER, _REAL, c_int, _POINTER, _POINTER, _POINTER],
    "rope_store_kv": [
        *(_KIND, *_TENSOR, *_TENSOR, *_TENSOR, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _POINTER, _REAL, c_int, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, *_CACHE, *_CACHE),
    ],
    "gated": [_KIND, _POINTER, _SIZE, _SIZE, _SIZE, c_int, _POINTER],
    "extend_attention": [
        *(_KIND, *_TENSOR, *_CACHE, *_CACHE, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
        *(_SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _REAL, _REAL, _POINTER),
    ],
    "record": [_POINTER],
    "replay": [_POINTER, _SIZE, _SIZE],
    "free_tape": [_POINTER],
    "sample": [_KIND, _POINTER, _SIZE, _SIZE, *[_POINTER] * 6],
}


def levels() -> list[str]:
    """The levels that were built and that this processor supports, the best one last."""
    if not (FOLDER / "portable.so").exists():
        return []
    best = ctypes.CDLL(str(FOLDER / "portable.so")).infer_level()
    return [level for level in [*LEVELS][: best + 1] if (FOLDER / f"{level}.so").exists()]


def about(level: str) -> str:
    """Why kernels are of this level, in a line."""
    known, built = [*LEVELS], levels()
    if level != built[-1]:
        return f"level {level}, as asked for; this processor could run {built[-1]}"
    if level == known[-1]:
        return f"level {level}, the best there is: the processor has {LEVELS[level]}"
    above = known[known.index(level) + 1]
    if (FOLDER / f"{above}.so").exists():
        return f"level {level}: the processor lacks {LEVELS[above]}, which {above} needs"
    return f"level {level}: {above}, which needs {LEVELS[above]}, was not built"


@functools.cache
def load(level: str) -> ctypes.CDLL:
    """The library of a level. It uses as many threads as torch does."""
    library = ctypes.CDLL(str(FOLDER / f"{level}.so"))
    for name, types in FUNCTIONS.items():
        function = getattr(library, f"infer_{name}")
        function.argtypes, function.restype = types, None
    library.infer_tape.argtypes, library.infer_tape.restype = [], _POINTER
    library.infer_tape_length.argtypes, library.infer_tape_length.restype = [_POINTER], c_int64
    library.infer_packed_words.argtypes = [_KIND, _SIZE, _SIZE, c_int]
    library.infer_packed_words.restype = c_int64
    library.infer_grouped_bytes.argtypes, library.infer_grouped_bytes.restype = [_POINTER], c_int64
    # ``torch_get_num_threads`` is part of torch's stable C ABI (torch/csrc/stable/c/shim.h).
    torch_cpu = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    library.infer_bind.argtypes = [c_void_p]
    library.infer_bind(ctypes.cast(torch_cpu.torch_get_num_threads, c_void_p))
    return library
