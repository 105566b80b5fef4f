"""The blocks of GGUF's quantised types as grouped weights. Values are exactly what the types define.

Shapes: N rows, n blocks. Within a block, the lower halves of its bytes are the codes of its first half and the upper
halves those of its second; a grouped weight has neighbours in one byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_formats.gguf.header import TensorInfo

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values, to be integers; the scales are halved."""
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def weight_of(name: str, info: TensorInfo, raw: Tensor) -> Weight:
    """The weight of a tensor's bytes, [N, row_bytes] or in the tensor's own type. Raises CheckpointError."""
    if info.type.name in PLAIN:
        return raw
    if len(info.shape) != 2:
        raise CheckpointError(
            f"The tensor {name!r} has shape {list(info.shape)} and type {info.type.name}; only matrices are quantised."
        )
    parts = _READERS[info.type.name](raw.reshape(-1, info.type.nbytes))
    for key in ("codes", "scales_NG", "minimum_NG"):
        if key in parts:
            parts[key] = parts[key].reshape(info.shape[0], -1)
    return GroupedWeight(**parts)


def _paired(q: Tensor) -> Tensor:
    """Bytes [..., b] that hold the codes 0 .. b-1 below and b .. 2b-1 above -> [..., b] with neighbours in one byte."""
    pairs = q.contiguous().view(torch.int16)
    low, high = pairs & 0x0F0F, (pairs >> 4) & 0x0F0F
    return torch.cat((low | low >> 4, high | high >> 4), dim=-1).to(torch.uint8)


def _halves(q: Tensor) -> Tensor:
    """Bytes [..., b] -> codes [..., 2b], of which each has a byte."""
    return torch.cat((q & 15, q >> 4), dim=-1)


def _float16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _q4_0(raw: Tensor) -> dict[str, Any]:
    return {"codes": _paired(raw[:, 2:]), "scales_NG": _float16(raw[:, :2])}


def _q4_1(raw: Tensor) -> dict[str, Any]:
    return {"codes": _paired(raw[:, 4:]), "scales_NG": _float16(raw[:, :2]), "minimum_NG": _float16(raw[:, 2:4])}


def _fifth_bits(raw: Tensor) -> Tensor:
    """4 bytes, a bit per value -> 16 for each that is set, [n, 32]."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q5_0(raw: Tensor) -> dict[str, Any]:
    codes = (_halves(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])) + (128 - 16)
    return {"codes": codes, "scales_NG": _float16(raw[:, :2]), "bits": 8}


def _q5_1(raw: Tensor) -> dict[str, Any]:
    codes = _halves(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return {"codes": codes, "scales_NG": _float16(raw[:, :2]), "minimum_NG": _float16(raw[:, 2:4]), "bits": 8}


def _q8_0(raw: Tensor) -> dict[str, Any]:
    return {"codes": raw[:, 2:] ^ 128, "scales_NG": _float16(raw[:, :2]), "bits": 8}


def _scales_and_minima(raw: Tensor) -> dict[str, Any]:
    """The first 16 bytes of a block of Q4_K or Q5_K: two factors, and 6 bits of scale and minimum for each of 8
    groups."""
    factors, (first, second, rest) = _float16(raw[:, :4]).float(), raw[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return {"scales_NG": factors[:, :1] * scales.float(), "minimum_NG": -(factors[:, 1:] * minima.float())}


def _q4_k(raw: Tensor) -> dict[str, Any]:
    return {"codes": _paired(raw[:, 16:].view(-1, 4, 32)), **_scales_and_minima(raw)}


def _q5_k(raw: Tensor) -> dict[str, Any]:
    bits = (raw[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _halves(raw[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | bits << 4
    return {"codes": codes, "bits": 8, **_scales_and_minima(raw)}


def _q6_k(raw: Tensor) -> dict[str, Any]:
    low = _halves(raw[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (raw[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _float16(raw[:, 208:]).float()
    return {"codes": (low | high << 4) + (128 - 32), "scales_NG": scales, "bits": 8}


def _iq4_nl(raw: Tensor) -> dict[str, Any]:
    return _q4_0(raw) | {"table": torch.tensor(IQ4_NL, dtype=torch.float32)}


def _mxfp4(raw: Tensor) -> dict[str, Any]:
    exponents = raw[:, :1].int()
    # 2 ** (exponent - 128) by its bits; the two smallest are subnormal.
    scales = torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    return {"codes": _paired(raw[:, 1:]), "scales_NG": scales, "table": torch.tensor(MXFP4, dtype=torch.float32)}


_READERS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
