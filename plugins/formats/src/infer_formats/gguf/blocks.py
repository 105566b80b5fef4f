"""The blocks of GGUF's quantized types as grouped weights. Values are exactly what the types define.

Shapes: N rows, n blocks. Within a block, the lower halves of its bytes are the codes of its first half and the upper
halves those of its second; a grouped weight has neighbors in one byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_formats.gguf.header import TensorInfo

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values, to be integers; the scales are halved."""
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES = {"MXFP4": MXFP4, "IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_NL}
CHUNK = 1 << 18
"""Bytes that are unpacked at a time, so that all steps of it find them in the processor's cache."""

Array: TypeAlias = npt.NDArray[Any]
Parts: TypeAlias = tuple[Array, ...]
"""For n blocks: codes, scales and perhaps minima, [n, ...]."""


def weight_of(name: str, info: TensorInfo, raw: Tensor) -> Weight:
    """The weight of a tensor's bytes, [N, row_bytes] or in the tensor's own type. Raises CheckpointError.

    numpy unpacks with one thread, which is as fast as the bytes come; torch's threads would wait for each other after
    every step."""
    kind = info.type.name
    if kind in PLAIN:
        return raw
    if len(info.shape) != 2:
        raise CheckpointError(
            f"The tensor {name!r} has shape {list(info.shape)} and type {kind}; only matrices are quantized."
        )
    codes, scales_NG, *minima = _without_values(info) if raw.is_meta else _unpacked(info, raw)
    table = torch.tensor(TABLES[kind], dtype=torch.float32) if kind in TABLES else None
    bits: Literal[4, 8] = 4 if codes.shape[1] * 2 == info.shape[1] else 8
    # llama.cpp rounds the activations to int8 as well.
    return GroupedWeight(codes, scales_NG, bits, minima[0] if minima else None, table, int8_activations=True)


def _unpacked(info: TensorInfo, raw: Tensor) -> list[Tensor]:
    """Codes, scales and perhaps minima, [N, ...]."""
    blocks = raw.numpy().reshape(-1, info.type.nbytes)
    step = max(1, CHUNK // info.type.nbytes)
    whole: Parts = ()
    for at in range(0, len(blocks), step):
        with np.errstate(invalid="ignore", over="ignore"):  # whoever loads the weight sees that it is not finite
            parts = _READERS[info.type.name](blocks[at : at + step])
        whole = whole or tuple(np.empty((len(blocks), *part.shape[1:]), part.dtype) for part in parts)
        for target, part in zip(whole, parts, strict=True):
            target[at : at + step] = part
    return [torch.from_numpy(part.reshape(info.shape[0], -1)) for part in whole]


def _without_values(info: TensorInfo) -> list[Tensor]:
    """What ``_unpacked`` returns, on the meta device: as many of each as a block has."""
    parts = map(torch.from_numpy, _READERS[info.type.name](np.zeros((1, info.type.nbytes), np.uint8)))
    N, blocks = info.shape[0], info.shape[1] // info.type.values
    return [torch.empty(N, blocks * part.numel(), dtype=part.dtype, device="meta") for part in parts]


def _paired(q: Array) -> Array:
    """Bytes [..., b] that hold the codes 0 .. b-1 below and b .. 2b-1 above -> [..., b] with neighbors in one byte."""
    pairs = np.ascontiguousarray(q).view(np.uint16)
    low, high = pairs & 0x0F0F, (pairs >> 4) & 0x0F0F
    return np.concatenate((low | low >> 4, high | high >> 4), axis=-1).astype(np.uint8)


def _halves(q: Array) -> Array:
    """Bytes [..., b] -> codes [..., 2b], of which each has a byte."""
    q = np.ascontiguousarray(q)
    return np.concatenate((q & 15, q >> 4), axis=-1)


def _high_bits(q: Array, bits: int) -> Array:
    """Bytes [..., b] -> codes' bits from the 5th on, [..., 8 / bits, b], the lowest bits of all bytes first."""
    q, most = np.ascontiguousarray(q), (1 << bits) - 1
    return np.stack([(q >> shift & most) << 4 for shift in range(0, 8, bits)], axis=-2)


def _float16(raw: Array) -> Array:
    return np.ascontiguousarray(raw).view(np.float16)


def _q4_0(raw: Array) -> Parts:
    return _paired(raw[:, 2:]), _float16(raw[:, :2])


def _q4_1(raw: Array) -> Parts:
    return _paired(raw[:, 4:]), _float16(raw[:, :2]), _float16(raw[:, 2:4])


def _fifth_bits(raw: Array) -> Array:
    """4 bytes, a bit per value -> [n, 32]."""
    return _high_bits(raw, 1).swapaxes(1, 2).reshape(-1, 32)


def _q5_0(raw: Array) -> Parts:
    return (_halves(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])) + (128 - 16), _float16(raw[:, :2])


def _q5_1(raw: Array) -> Parts:
    return _halves(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _float16(raw[:, :2]), _float16(raw[:, 2:4])


def _q8_0(raw: Array) -> Parts:
    return raw[:, 2:] ^ 128, _float16(raw[:, :2])


def _scales_and_minima(raw: Array) -> Parts:
    """The first 16 bytes of a block of Q4_K or Q5_K: two factors, and 6 bits of scale and minimum for each of 8
    groups."""
    factors, packed = _float16(raw[:, :4]).astype(np.float32), raw[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=-1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=-1)
    return factors[:, :1] * scales, -(factors[:, 1:] * minima)


def _q4_k(raw: Array) -> Parts:
    return _paired(raw[:, 16:].reshape(-1, 4, 32)), *_scales_and_minima(raw)


def _q5_k(raw: Array) -> Parts:
    low = _halves(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return low | _high_bits(raw[:, 16:48], 1), *_scales_and_minima(raw)


def _q6_k(raw: Array) -> Parts:
    low = _halves(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    codes = (low | _high_bits(raw[:, 128:192].reshape(-1, 2, 32), 2)) + (128 - 32)
    return codes, _float16(raw[:, 208:]).astype(np.float32) * raw[:, 192:208].view(np.int8)


def _iq4_xs(raw: Array) -> Parts:
    """A factor, and 6 bits of scale for each of 8 groups: the upper 2 in the next two bytes, the lower 4 after."""
    high = np.ascontiguousarray(raw[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = raw[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = (low.reshape(-1, 8) | high << 4).astype(np.int32) - 32
    return _paired(raw[:, 8:].reshape(-1, 8, 16)), _float16(raw[:, :2]).astype(np.float32) * scales


def _mxfp4(raw: Array) -> Parts:
    exponents = raw[:, :1].astype(np.int32)
    # 2 ** (exponent - 128) by its bits; the two smallest are subnormal.
    scales = np.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23)
    return _paired(raw[:, 1:]), scales.astype(np.int32).view(np.float32)


_READERS: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
