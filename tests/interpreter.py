"""Importing this module fixes Triton's interpreter, which computes bfloat16 wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._convert_float


def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """The interpreter cuts bfloat16 off where the hardware rounds to nearest even."""
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)
    if (source, target) == (tl.bfloat16, tl.float32):
        return (data.astype(np.uint32) << 16).view(np.float32)
    return convert(data, source, target, rounding_mode)


def create_dot(self: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
    """Products added one after the other in fp32, as matrix units do; numpy's own order depends on where in the
    matrix a row is, and it multiplies a bfloat16's bits."""
    left, right = (
        convert_float(x.data, tl.bfloat16, tl.float32, None) if x.dtype.scalar == tl.bfloat16 else x.data
        for x in (a, b)
    )
    total = c.data.astype(np.float32)
    for k in range(left.shape[1]):
        total += left[:, k, None].astype(np.float32) * right[None, k].astype(np.float32)
    return interpreter.TensorHandle(total, c.dtype.scalar)


interpreter._convert_float = convert_float
interpreter.InterpreterBuilder.create_dot = create_dot
