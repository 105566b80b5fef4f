"""Norms, rotary embedding with the K/V store, and gated activations, each in one launch that reads memory once.

Values are rounded where ``infer.kernels.reference`` rounds them.

Shapes: T tokens, D hidden size, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.contracts.attention import KV, QuantizedKV, Rotary
from infer.contracts.kernels import GateActivation


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    heads,
    stride_t,
    stride_h,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """One program computes BLOCK_R rows. Row r of x is head r % heads of token r // heads; all else is contiguous."""
    row_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    size_d = tl.arange(0, BLOCK_D)
    real = (row_r < num_rows)[:, None] & (size_d < D)[None, :]
    from_r = (row_r // heads).to(tl.int64) * stride_t + (row_r % heads) * stride_h
    to = row_r.to(tl.int64)[:, None] * D + size_d[None, :]
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + from_r[:, None] + size_d[None, :], mask=real, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + to, mask=real, other=0.0).to(tl.float32)
        total = (x + residual).to(dtype)
        tl.store(sum_ptr + to, total, mask=real)
        x = total.to(tl.float32)
    y = x / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)[:, None]
    y = _scale(y, weight_ptr + size_d[None, :], (size_d < D)[None, :], dtype, UNIT_OFFSET)
    tl.store(out_ptr + to, y.to(dtype), mask=real)


@triton.jit
def _scale(x, weight_ptr, real, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Multiply by a norm's weight, and round the result to ``dtype``."""
    weight = tl.load(weight_ptr, mask=real, other=0.0).to(tl.float32)
    x = x * (1.0 + weight) if UNIT_OFFSET else x.to(dtype).to(tl.float32) * weight
    return x.to(dtype).to(tl.float32)


LEAST = tl.constexpr(2.0**-100)
"""Heads of no greater magnitude than any below this count as zero."""
TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Floats of this magnitude have no fraction bits, so that adding it rounds to the nearest integer, or the even one."""


@triton.jit
def _scales(x):
    """The scale of each row of a head's values, as ``QuantizedKV`` has it."""
    top = tl.max(tl.abs(x), 1)
    strange = tl.sum(x - x, 1)  # NaN if any value is not finite, else 0
    return tl.where(top < LEAST, 0.0, tl.div_rn(top, 127.0)) + strange


@triton.jit
def _codes(x, scale):
    """The codes of values, given their rows' scales."""
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) + TO_INTEGER - TO_INTEGER
    return tl.where(scale[:, None] > 0, code, 0.0).to(tl.int8)


@triton.jit
def _rotate(
    from_ptr,
    to_ptr,
    scale_ptr,
    cos,
    sin,
    stride_h,
    weight_ptr,
    eps,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Normalize each head of one token, if NORM, rotate its two halves against each other, and quantize it if there are
    scales."""
    HALF: tl.constexpr = E // 2
    head_h = tl.arange(0, HEADS_PAD)[:, None]
    size_e = tl.arange(0, E_PAD // 2)[None, :]
    real = (head_h < HEADS) & (size_e < HALF)
    left = tl.load(from_ptr + head_h * stride_h + size_e, mask=real, other=0.0).to(tl.float32)
    right = tl.load(from_ptr + head_h * stride_h + HALF + size_e, mask=real, other=0.0).to(tl.float32)
    to_ptr += head_h * E + size_e
    dtype = from_ptr.dtype.element_ty
    if NORM:
        root = tl.sqrt_rn((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / E + eps)[:, None]
        left = _scale(left / root, weight_ptr + size_e, size_e < HALF, dtype, UNIT_OFFSET)
        right = _scale(right / root, weight_ptr + HALF + size_e, size_e < HALF, dtype, UNIT_OFFSET)
    left_turned = (left * cos - right * sin).to(dtype)
    right_turned = (right * cos + left * sin).to(dtype)
    if scale_ptr is not None:
        both = tl.join(left_turned.to(tl.float32), right_turned.to(tl.float32))
        scale = _scales(tl.reshape(both, [HEADS_PAD, E_PAD]))
        tl.store(scale_ptr + tl.arange(0, HEADS_PAD), scale, mask=tl.arange(0, HEADS_PAD) < HEADS)
        left_turned = _codes(left_turned.to(tl.float32), scale)
        right_turned = _codes(right_turned.to(tl.float32), scale)
    tl.store(to_ptr, left_turned, mask=real)
    tl.store(to_ptr + HALF, right_turned, mask=real)


@triton.jit(do_not_specialize=["stride_rotary"])
def rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    flat_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_rotary,
    eps,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """One program handles one token: it writes the rotated q to ``out``, and the rotated K and the V, if there is one,
    to the caches, quantized if there are scales."""
    HALF: tl.constexpr = E // 2
    token = tl.program_id(0).to(tl.int64)
    size_e = tl.arange(0, E_PAD // 2)
    cos = tl.load(cos_ptr + token * stride_rotary + size_e, mask=size_e < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_rotary + size_e, mask=size_e < HALF, other=0.0)[None, :]
    first_head = tl.load(flat_ptr + token) * K
    place = first_head * E
    if k_scales_ptr is not None:
        k_scales_ptr += first_head
    q_ptr += token * stride_qt
    k_ptr += token * stride_kt
    out_ptr += token * (H * E)
    k_cache_ptr += place
    _rotate(q_ptr, out_ptr, None, cos, sin, stride_qh, q_weight_ptr, eps, H, H_PAD, E, E_PAD, NORM, UNIT_OFFSET)
    _rotate(
        k_ptr, k_cache_ptr, k_scales_ptr, cos, sin, stride_kh, k_weight_ptr, eps, K, K_PAD, E, E_PAD, NORM, UNIT_OFFSET
    )
    if v_ptr is not None:
        head_k = tl.arange(0, K_PAD)[:, None]
        whole_e = tl.arange(0, E_PAD)[None, :]
        real = (head_k < K) & (whole_e < E)
        v = tl.load(v_ptr + token * stride_vt + head_k * stride_vh + whole_e, mask=real, other=0.0)
        if v_scales_ptr is not None:
            scale = _scales(v.to(tl.float32))
            tl.store(v_scales_ptr + first_head + tl.arange(0, K_PAD), scale, mask=tl.arange(0, K_PAD) < K)
            v = _codes(v.to(tl.float32), scale)
        tl.store(v_cache_ptr + place + head_k * E + whole_e, v, mask=real)


@triton.jit
def softplus(x):
    """log(1 + e^x), by the inverse of tanh so that small e^x are not rounded to nothing beside 1."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    p = 2.0 / 17
    p = p * square + 2.0 / 15
    p = p * square + 2.0 / 13
    p = p * square + 2.0 / 11
    p = p * square + 2.0 / 9
    p = p * square + 2.0 / 7
    p = p * square + 2.0 / 5
    p = p * square + 2.0 / 3
    p = p * square + 2.0
    return p * s + tl.where(x < 0, 0.0, x)


@triton.jit
def gated_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """One program computes BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < size
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=real, other=0.0)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        active = gate * tl.sigmoid(1.702 * gate)
        wide = up.to(tl.float32)
        wide = tl.where(wide > 7.0, 7.0, tl.where(wide < -7.0, -7.0, wide))
        up = (wide + 1.0).to(up.dtype)
    elif ACTIVATION == "gelu_pytorch_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z).
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "sigmoid":
        active = tl.sigmoid(gate)
    elif ACTIVATION == "softplus":
        active = softplus(gate)
    else:
        active = gate * tl.sigmoid(gate)
    out = active.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=real)


def rms_norm(
    x: Tensor, weight_D: Tensor, eps: float, unit_offset: bool, residual_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(x), x), or (norm(x + residual), x + residual). x is [T, D], or [T, heads, D] with a contiguous last
    dimension."""
    D = x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual_TD is None else torch.empty_like(out)
    rows = out.numel() // D
    block_d = triton.next_power_of_2(D)
    block_r = max(1, 1024 // block_d)
    heads = x.shape[1] if x.dim() == 3 else 1
    norm_kernel[(triton.cdiv(rows, block_r),)](
        x,
        residual_TD,
        weight_D,
        out,
        total,
        rows,
        heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        D=D,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        ADD=residual_TD is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=min(8, max(4, block_d // 512)),
        enable_fp_fusion=True,
    )
    return out, total


def parts(cache: KV) -> tuple[Tensor, Tensor | None]:
    """K's or V's values, or its codes and scales."""
    return (cache.codes, cache.scales) if isinstance(cache, QuantizedKV) else (cache, None)


def rope_store_kv(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    rotary: Rotary,
    k_cache: KV,
    v_cache: KV,
    flat_T: Tensor,
) -> Tensor:
    """``KernelsProtocol.rope_store_kv``."""
    T, H, E = q_THE.shape
    K = k_TKE.shape[1]
    cos, sin, norms = rotary
    (k_memory, k_scales), (v_memory, v_scales) = parts(k_cache), parts(v_cache)
    out_THE = torch.empty((T, H, E), dtype=q_THE.dtype, device=q_THE.device)
    rope_store_kernel[(T,)](
        q_THE,
        k_TKE,
        None if v_cache is k_cache else v_TKE,
        cos,
        sin,
        norms and norms.q_weight_E,
        norms and norms.k_weight_E,
        out_THE,
        k_memory,
        v_memory,
        k_scales,
        v_scales,
        flat_T,
        *q_THE.stride()[:2],
        *k_TKE.stride()[:2],
        *v_TKE.stride()[:2],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        norms.eps if norms else 0.0,
        H=H,
        H_PAD=triton.next_power_of_2(H),
        K=K,
        K_PAD=triton.next_power_of_2(K),
        E=E,
        E_PAD=triton.next_power_of_2(E),
        NORM=norms is not None,
        UNIT_OFFSET=norms is not None and norms.unit_offset,
        enable_fp_fusion=True,
    )
    return out_THE


def lines(x: Tensor) -> Tensor:
    """x with neighboring values of a row side by side; its rows may be parts of longer ones."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def gated(gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
    """``KernelsProtocol.gated``."""
    out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    gate, up = lines(gate.flatten(0, -2)), lines(up.flatten(0, -2))
    T, size = up.shape
    block = min(1024, triton.next_power_of_2(size))
    strides = gate.stride(0), up.stride(0)
    gated_kernel[(T, triton.cdiv(size, block))](
        gate, up, out, *strides, size, ACTIVATION=activation, BLOCK=block, enable_fp_fusion=True
    )
    return out
