"""The compiled libraries: which ones exist, which of them this processor can run, and their functions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from infer.errors import SettingsError

VARIABLE = "INFER_CPU_LEVEL"
"""The environment variable that asks for a level below the best, as to repeat the bits of another machine."""
FEATURES: tuple[str, ...] = ()
"""What this machine's processors may have, in the order of the bits of ``infer_features``."""
LEVELS: dict[str, set[str]] = {"portable": set()}
"""This machine's instruction set levels, the slowest first, and which features each needs."""
match platform.machine():
    case "x86_64":
        FEATURES = ("AVX2 and FMA", "AVX-VNNI", "AVX-512 F, BW, VL and DQ", "AVX-512 VNNI", "fast AVX-512 BF16", "AMX")
        avx2, avx_vnni, avx512, vnni, bf16, amx = FEATURES
        LEVELS |= {
            "avx2": {avx2},
            "avx2_vnni": {avx2, avx_vnni},
            "avx512": {avx2, avx512},
            "avx512_vnni": {avx2, avx512, vnni},
            "avx512_bf16": {avx2, avx512, vnni, bf16},
            "amx": {avx2, avx512, vnni, amx},
        }
    case "aarch64":
        FEATURES = ("BF16 and I8MM",)
        LEVELS |= {"bf16": {*FEATURES}}
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


class AdapterPart(ctypes.Structure):
    """An adapter's change of some columns of a product; ``AdapterPart`` in adapters.hpp."""

    _fields_ = (("b", c_void_p), *((name, c_int64) for name in ("begin", "N", "R")))


class Adapter(ctypes.Structure):
    """An adapter's changes of one product; ``Adapter`` in adapters.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "scales")),
        ("parts", ctypes.POINTER(AdapterPart)),
        *((name, c_int64) for name in ("count", "ranks")),
    )


ADAPTER_PIECE = 4, 32
"""How many rows and columns of A are stored together (``TOGETHER`` and ``PIECE`` in adapters.hpp)."""


_KIND, _SIZE, _POINTER, _REAL = c_int, c_int64, c_void_p, c_float
_TENSOR = [_POINTER, _SIZE, _SIZE]  # a pointer and two strides
_CACHE = [_POINTER, _POINTER]  # of values, or of codes and of their scales
_STATE_ROWS = [_POINTER, _POINTER, _POINTER, _SIZE]  # offsets, read, save, and how many sequences
FUNCTIONS: dict[str, list[type]] = {
    "pack": [_KIND, _POINTER, _SIZE, _SIZE, c_int, _POINTER],
    "rows": [_KIND, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER],
    "linear": [_KIND, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, c_int, _POINTER],
    "quantize": [_KIND, _POINTER, _SIZE, _SIZE, _SIZE, c_int, _POINTER, _POINTER],
    "pack_grouped": [_KIND, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE],
    "grouped_rows": [_KIND, _POINTER, _POINTER, _SIZE, _POINTER],
    "grouped_linear": [_KIND, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, c_int, _POINTER],
    "route": [_KIND, _POINTER, _SIZE, _SIZE, _SIZE, c_int, c_int, _REAL, _POINTER, _POINTER, _POINTER],
    "gated_experts": [_KIND, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, c_int, _POINTER],
    "add_adapters": [*(_KIND, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE)],
    "rms_norm": [_KIND, *_TENSOR, _SIZE, _SIZE, _SIZE, _POINTER, _REAL, c_int, _POINTER, _POINTER, _POINTER],
    "rope_store_kv": [
        *(_KIND, *_TENSOR, *_TENSOR, *_TENSOR, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _POINTER, _REAL, c_int, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, *_CACHE, *_CACHE),
    ],
    "gated": [_KIND, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, c_int, _POINTER],
    "extend_attention": [
        *(_KIND, *_TENSOR, *_CACHE, *_CACHE, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
        *(_SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _REAL, _REAL, _POINTER),
    ],
    "causal_conv": [
        *(_KIND, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, c_int, _POINTER, _SIZE, *_STATE_ROWS),
        _POINTER,
    ],
    "gated_delta_rule": [
        *(_KIND, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE, *[_SIZE] * 5, _POINTER, _POINTER, c_int, _REAL),
        *(_POINTER, _SIZE, *_STATE_ROWS, _POINTER),
    ],
    "state_space": [
        *(_KIND, _POINTER, _SIZE, _POINTER, _SIZE, *[_SIZE] * 5, _POINTER, _POINTER, _POINTER, _REAL, _REAL),
        *(_POINTER, _SIZE, *_STATE_ROWS, _POINTER),
    ],
    "gated_rms_norm": [
        *(_KIND, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _REAL, _SIZE, c_int, _POINTER),
    ],
    "record": [_POINTER],
    "replay": [_POINTER, _SIZE, _SIZE],
    "free_tape": [_POINTER],
    "sample": [_KIND, _POINTER, _SIZE, _SIZE, *[_POINTER] * 6],
}


def features() -> set[str]:
    """What this processor has of FEATURES."""
    bits = ctypes.CDLL(str(FOLDER / "portable.so")).infer_features()
    return {feature for i, feature in enumerate(FEATURES) if bits >> i & 1}


def levels() -> list[str]:
    """The levels that were built and that this processor supports, the best one last."""
    built = [level for level in LEVELS if (FOLDER / f"{level}.so").exists()]
    if "portable" not in built:
        return []
    here = features()
    return [level for level in built if LEVELS[level] <= here]


def chosen() -> str:
    """The level that kernels compute at: the one that VARIABLE asks for, or the best. Raises SettingsError."""
    here = levels()
    level = os.environ.get(VARIABLE) or here[-1]
    if level not in here:
        raise SettingsError(f"{VARIABLE} is {level!r}; what was built and runs here is {', '.join(here)}.")
    return level


def about() -> str:
    """Which level runs on this machine and why, in a line; empty if none does."""
    known, here = [*LEVELS], levels()
    if not here:
        return ""
    level = here[-1]
    if (asked := os.environ.get(VARIABLE)) in here:
        return f"level {asked}, as {VARIABLE} says"
    if level == known[-1]:
        return f"level {level}, the best there is"
    above = known[known.index(level) + 1]
    if lacking := LEVELS[above] - features():
        return f"level {level}: the processor lacks {' and '.join(sorted(lacking))}, which {above} needs"
    return f"level {level}: {above} was not built"


@functools.cache
def digest(level: str) -> str:
    """A digest of a level's library."""
    return hashlib.blake2b((FOLDER / f"{level}.so").read_bytes(), digest_size=16).hexdigest()


@functools.cache
def load(level: str) -> ctypes.CDLL:
    """The library of a level. It uses as many threads as torch does. Raises ValueError."""
    if level not in levels():  # which asks Linux for AMX's registers, too
        raise ValueError(f"the level {level!r} was not built, or this processor cannot run it")
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
