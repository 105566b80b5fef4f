"""Kernels of recurrent layers, which walk each sequence token by token, so that a token's bits do not depend on the
chunk that it is in.

Values are rounded where ``infer.kernels.states`` rounds them; sums have another order. What layouts, and so that order,
are chosen by must not differ between passes, so nothing is specialized for the strides and the alignment of inputs.
Each product is rounded before it is added to anything (``enable_fp_fusion``): a compiler may compute a state twice, in
the layout of the sums and in that of the store, and fuse another product in either. The state that goes on in registers
would then not be the one that is saved.

Shapes: T tokens, B sequences, C channels, W weights per channel, H heads. A state is [rows, H, K, V] in a gated delta
rule and [rows, H, N, P] in a state space: what is summed up comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.contracts.states import DeltaRule, StateRows, StateSpace
from infer_kernels_triton.elementwise import lines, softplus

STATE_COLUMNS = 32
"""Columns of a state per program; the more programs a sequence has, the less time a decode takes."""
CHANNELS = 256
"""Channels of a convolution per program."""


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["stride_t"], do_not_specialize_on_alignment=["x_ptr"])
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    out_ptr,
    offsets_ptr,
    read_ptr,
    save_ptr,
    stride_t,
    stride_state,
    C,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program convolves BLOCK_C channels of one sequence."""
    b = tl.program_id(0)
    channel_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real_c = channel_c < C
    step_w = tl.arange(0, W_PAD)
    real_wc = (step_w < W)[:, None] & real_c[None, :]
    begin = tl.load(offsets_ptr + b)
    end = tl.load(offsets_ptr + b + 1)
    read = tl.load(read_ptr + b) * stride_state
    weight_wc = tl.load(weight_ptr + channel_c[None, :] * W + step_w[:, None], mask=real_wc, other=0.0).to(tl.float32)
    for t in range(begin, end):
        token = tl.cast(t, tl.int64)
        at_w = t - (W - 1) + step_w
        in_state_wc = (at_w < begin)[:, None] & real_wc
        old_wc = tl.load(
            states_ptr + read + (at_w - begin + W - 1)[:, None] * C + channel_c[None, :], mask=in_state_wc, other=0.0
        )
        new_wc = tl.load(
            x_ptr + at_w.to(tl.int64)[:, None] * stride_t + channel_c[None, :],
            mask=(at_w >= begin)[:, None] & real_wc,
            other=0.0,
        )
        columns_wc = tl.where(in_state_wc, old_wc, new_wc)
        total_c = tl.sum(weight_wc * columns_wc.to(tl.float32), 0)
        if bias_ptr is not None:
            total_c += tl.load(bias_ptr + channel_c, mask=real_c, other=0.0).to(tl.float32)
        if SILU:
            total_c = _silu(total_c)
        out = total_c.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * C + channel_c, out, mask=real_c)
        save = tl.load(save_ptr + t)
        if save >= 0:
            tl.debug_barrier()  # if this is the row that was read, another thread may still read what this one writes
            to_wc = states_ptr + save * stride_state + (step_w - 1)[:, None] * C + channel_c[None, :]
            tl.store(to_wc, columns_wc, mask=real_wc & (step_w > 0)[:, None])


@triton.jit(
    do_not_specialize=["stride_qkv", "stride_a", "stride_b"],
    do_not_specialize_on_alignment=["qkv_ptr", "a_ptr", "b_ptr"],
)
def delta_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    offsets_ptr,
    read_ptr,
    save_ptr,
    stride_qkv,
    stride_a,
    stride_b,
    stride_state,
    root,
    max_beta,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
):
    """One program walks BLOCK_V columns of one head's state through one sequence. It keeps them in registers."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    size_k = tl.arange(0, K_PAD)
    size_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_k = size_k < K
    real_v = size_v < V
    real_kv = real_k[:, None] & real_v[None, :]
    place_kv = h * (K * V) + size_k[:, None] * V + size_v[None, :]
    begin = tl.load(offsets_ptr + b)
    end = tl.load(offsets_ptr + b + 1)
    rate = tl.load(rate_ptr + h)
    if CHANNEL_DECAY:
        dt_bias = tl.load(dt_bias_ptr + h * K + size_k, mask=real_k, other=0.0)
    else:
        dt_bias = tl.load(dt_bias_ptr + h)
    first_k = (h // (H // KEY_HEADS)) * K + size_k
    state_kv = tl.load(states_ptr + tl.load(read_ptr + b) * stride_state + place_kv, mask=real_kv, other=0.0)
    for t in range(begin, end):
        token = tl.cast(t, tl.int64)
        row = qkv_ptr + token * stride_qkv
        q_k = tl.load(row + first_k, mask=real_k, other=0.0).to(tl.float32)
        k_k = tl.load(row + KEY_HEADS * K + first_k, mask=real_k, other=0.0).to(tl.float32)
        v_v = tl.load(row + 2 * KEY_HEADS * K + h * V + size_v, mask=real_v, other=0.0).to(tl.float32)
        q_k = q_k / tl.sqrt_rn(tl.sum(q_k * q_k, 0) + 1e-6) * root
        k_k = k_k / tl.sqrt_rn(tl.sum(k_k * k_k, 0) + 1e-6)
        beta = max_beta * tl.sigmoid(tl.load(b_ptr + token * stride_b + h).to(tl.float32))
        if CHANNEL_DECAY:
            a_k = tl.load(a_ptr + token * stride_a + h * K + size_k, mask=real_k, other=0.0).to(tl.float32)
            state_kv = state_kv * tl.exp(-rate * softplus(a_k + dt_bias))[:, None]
        else:
            a = tl.load(a_ptr + token * stride_a + h).to(tl.float32)
            state_kv = state_kv * tl.exp(-rate * softplus(a + dt_bias))
        change_v = (v_v - tl.sum(state_kv * k_k[:, None], 0)) * beta
        state_kv = state_kv + k_k[:, None] * change_v[None, :]
        out_v = tl.sum(state_kv * q_k[:, None], 0)
        to = out_ptr + token * (H * V) + h * V + size_v
        tl.store(to, out_v.to(out_ptr.dtype.element_ty), mask=real_v)
        save = tl.load(save_ptr + t)
        if save >= 0:
            tl.store(states_ptr + save * stride_state + place_kv, state_kv, mask=real_kv)


@triton.jit(do_not_specialize=["stride_xbc", "stride_dt"], do_not_specialize_on_alignment=["xbc_ptr", "dt_ptr"])
def space_kernel(
    xbc_ptr,
    dt_ptr,
    rate_ptr,
    dt_bias_ptr,
    skip_ptr,
    states_ptr,
    out_ptr,
    offsets_ptr,
    read_ptr,
    save_ptr,
    stride_xbc,
    stride_dt,
    stride_state,
    dt_min,
    dt_max,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program walks BLOCK_P columns of one head's state through one sequence. It keeps them in registers."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    size_n = tl.arange(0, N_PAD)
    size_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    real_n = size_n < N
    real_p = size_p < P
    real_np = real_n[:, None] & real_p[None, :]
    place_np = h * (N * P) + size_n[:, None] * P + size_p[None, :]
    begin = tl.load(offsets_ptr + b)
    end = tl.load(offsets_ptr + b + 1)
    rate = tl.load(rate_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    skip = tl.load(skip_ptr + h)
    first_n = H * P + (h // (H // GROUPS)) * N + size_n
    state_np = tl.load(states_ptr + tl.load(read_ptr + b) * stride_state + place_np, mask=real_np, other=0.0)
    for t in range(begin, end):
        token = tl.cast(t, tl.int64)
        row = xbc_ptr + token * stride_xbc
        x_p = tl.load(row + h * P + size_p, mask=real_p, other=0.0).to(tl.float32)
        b_n = tl.load(row + first_n, mask=real_n, other=0.0).to(tl.float32)
        c_n = tl.load(row + GROUPS * N + first_n, mask=real_n, other=0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + token * stride_dt + h).to(tl.float32) + dt_bias)
        dt = tl.where(dt < dt_min, dt_min, tl.where(dt > dt_max, dt_max, dt))
        state_np = state_np * tl.exp(-rate * dt) + b_n[:, None] * (x_p * dt)[None, :]
        out_p = tl.sum(state_np * c_n[:, None], 0) + skip * x_p
        to = out_ptr + token * (H * P) + h * P + size_p
        tl.store(to, out_p.to(out_ptr.dtype.element_ty), mask=real_p)
        save = tl.load(save_ptr + t)
        if save >= 0:
            tl.store(states_ptr + save * stride_state + place_np, state_np, mask=real_np)


@triton.jit(do_not_specialize=["stride_x", "stride_gate"], do_not_specialize_on_alignment=["x_ptr", "gate_ptr"])
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    stride_gate,
    eps,
    GROUPS: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """One program normalizes one group of one row."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.arange(0, BLOCK)
    real = size < GROUP
    place = tl.program_id(1) * GROUP + size
    x = tl.load(x_ptr + row * stride_x + place, mask=real, other=0.0).to(tl.float32)
    gate = _silu(tl.load(gate_ptr + row * stride_gate + place, mask=real, other=0.0).to(tl.float32))
    if GATE_FIRST:
        x = x * gate
    x = x / tl.sqrt_rn(tl.sum(x * x, 0) / GROUP + eps)
    x = x * tl.load(weight_ptr + place % W, mask=real, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        x = x * gate
    tl.store(out_ptr + row * (GROUPS * GROUP) + place, x.to(out_ptr.dtype.element_ty), mask=real)


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, columns_RWC: Tensor, rows: StateRows
) -> Tensor:
    """``KernelsProtocol.causal_conv``."""
    (T, C), W = x_TC.shape, weight_CW.shape[1]
    x_TC = lines(x_TC)
    out_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    block = min(CHANNELS, triton.next_power_of_2(C))
    conv_kernel[(len(rows.read_B), triton.cdiv(C, block))](
        x_TC,
        weight_CW.contiguous(),
        bias_C,
        columns_RWC,
        out_TC,
        *rows,
        x_TC.stride(0),
        columns_RWC.stride(0),
        C,
        W=W,
        W_PAD=triton.next_power_of_2(W),
        SILU=silu,
        BLOCK_C=block,
        enable_fp_fusion=False,
    )
    return out_TC


def gated_delta_rule(
    qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
) -> Tensor:
    """``KernelsProtocol.gated_delta_rule``."""
    H, K, V = rule.shape
    qkv_TC, a_TA, b_TH = lines(qkv_TC), lines(a_TA), lines(b_TH)
    out_THV = torch.empty((len(qkv_TC), H, V), dtype=qkv_TC.dtype, device=qkv_TC.device)
    block = min(STATE_COLUMNS, triton.next_power_of_2(V))
    delta_kernel[(len(rows.read_B), H, triton.cdiv(V, block))](
        qkv_TC,
        a_TA,
        b_TH,
        rule.rate_H,
        rule.dt_bias_A,
        state_RHKV,
        out_THV,
        *rows,
        qkv_TC.stride(0),
        a_TA.stride(0),
        b_TH.stride(0),
        state_RHKV.stride(0),
        K**-0.5,
        rule.max_beta,
        H=H,
        KEY_HEADS=rule.num_key_heads,
        K=K,
        K_PAD=triton.next_power_of_2(K),
        V=V,
        BLOCK_V=block,
        CHANNEL_DECAY=rule.channel_decay,
        enable_fp_fusion=False,
    )
    return out_THV


def state_space(xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows) -> Tensor:
    """``KernelsProtocol.state_space``."""
    H, N, P = space.shape
    xbc_TC, dt_TH = lines(xbc_TC), lines(dt_TH)
    out_THP = torch.empty((len(xbc_TC), H, P), dtype=xbc_TC.dtype, device=xbc_TC.device)
    block = min(STATE_COLUMNS, triton.next_power_of_2(P))
    space_kernel[(len(rows.read_B), H, triton.cdiv(P, block))](
        xbc_TC,
        dt_TH,
        space.rate_H,
        space.dt_bias_H,
        space.skip_H,
        state_RHNP,
        out_THP,
        *rows,
        xbc_TC.stride(0),
        dt_TH.stride(0),
        state_RHNP.stride(0),
        space.dt_min,
        space.dt_max,
        H=H,
        GROUPS=space.num_groups,
        N=N,
        N_PAD=triton.next_power_of_2(N),
        P=P,
        BLOCK_P=block,
        enable_fp_fusion=False,
    )
    return out_THP


def gated_rms_norm(x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool) -> Tensor:
    """``KernelsProtocol.gated_rms_norm``."""
    (T, D), x_TD, gate_TD = x_TD.shape, lines(x_TD), lines(gate_TD)
    out_TD = torch.empty((T, D), dtype=x_TD.dtype, device=x_TD.device)
    block = triton.next_power_of_2(group)
    gated_norm_kernel[(T, D // group)](
        x_TD,
        gate_TD,
        weight_W.contiguous(),
        out_TD,
        x_TD.stride(0),
        gate_TD.stride(0),
        eps,
        GROUPS=D // group,
        W=len(weight_W),
        GROUP=group,
        BLOCK=block,
        GATE_FIRST=gate_first,
        num_warps=min(8, max(1, block // 256)),
        enable_fp_fusion=True,
    )
    return out_TD
