"""Importing this module fixes Triton's interpreter, which computes bfloat16 wrongly and does much for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._convert_float
patch_language = interpreter._patch_lang
find_dtype = interpreter._get_np_dtype
make_tensor = tl.tensor.__init__
patched: set[str] = set()
dtypes: dict[str, np.dtype[Any]] = {}
shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


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


def patch_once(function: Callable[..., Any]) -> Any:
    """For each module with kernels once, and for good, instead of at each call of each function of a kernel."""
    if function.__module__ not in patched:
        patched.add(function.__module__)
        patch_language(function)
    return interpreter._LangPatchScope()  # nothing to restore


def np_dtype(dtype: Any) -> np.dtype[Any]:
    """The interpreter makes a table of all types whenever it asks for one."""
    if dtype.name not in dtypes:
        dtypes[dtype.name] = find_dtype(dtype)
    return dtypes[dtype.name]


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """A shape is a tuple of constants, each an object: those of one shape are made once."""
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in shapes:
        make_tensor(self, handle, type)
        shapes[sizes] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = shapes[sizes]


interpreter._patch_lang = patch_once
interpreter._get_np_dtype = np_dtype
# Integers that overflow are looked for at each sum, difference and product, but reported in debug mode only.
builder = interpreter.interpreter_builder
assert not builder.options.debug
builder.options = replace(builder.options, sanitize_overflow=False)
interpreter._convert_float = convert_float
interpreter.InterpreterBuilder.create_dot = create_dot
tl.tensor.__init__ = init_tensor
