"""The reference kernels of recurrent layers: token by token, so that a row's bits do not depend on the chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infer.contracts.states import DeltaRule, StateRows, StateSpace

EPS = 1e-6
"""Of the norms of q and K in the gated delta rule."""


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, columns_RWC: Tensor, rows: StateRows
) -> Tensor:
    """``KernelsProtocol.causal_conv``."""
    width = weight_CW.shape[1]
    weight_WC = weight_CW.float().T
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    save_T = rows.save_T.tolist()
    for begin, end, row in _sequences(rows):
        columns = torch.cat((columns_RWC[row], x_TC[begin:end])).float()
        total = torch.zeros(end - begin, x_TC.shape[1], device=x_TC.device)
        for i in range(width):
            total = total + weight_WC[i] * columns[i : i + end - begin]
        if bias_C is not None:
            total = total + bias_C.float()
        out_TC[begin:end] = _silu(total) if silu else total
        for t in range(begin, end):
            if save_T[t] >= 0:
                columns_RWC[save_T[t]] = columns[t - begin + 1 : t - begin + width]
    return out_TC


def gated_delta_rule(
    qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
) -> Tensor:
    """``KernelsProtocol.gated_delta_rule``."""
    H, K, V = rule.shape
    keys, each = rule.num_key_heads * K, rule.num_value_heads // rule.num_key_heads
    rate_A = rule.rate_H.repeat_interleave(rule.num_decays // H)
    out_THV = qkv_TC.new_empty(len(qkv_TC), H, V)
    save_T = rows.save_T.tolist()
    for begin, end, row in _sequences(rows):
        state_HKV = state_RHKV[row].clone()
        for t in range(begin, end):
            q, k, v = (x.float() for x in torch.split_with_sizes(qkv_TC[t], (keys, keys, H * V)))
            q_HK, k_HK = (_unit(x.view(-1, K)).repeat_interleave(each, 0) for x in (q, k))
            beta_H = rule.max_beta * sigmoid(b_TH[t].float())
            decay_A = torch.exp(-rate_A * softplus(a_TA[t].float() + rule.dt_bias_A))
            state_HKV = state_HKV * decay_A.view(H, -1, 1)
            known_HV = (state_HKV * k_HK[:, :, None]).sum(1)
            change_HV = (v.view(H, V) - known_HV) * beta_H[:, None]
            state_HKV = state_HKV + k_HK[:, :, None] * change_HV[:, None, :]
            out_THV[t] = (state_HKV * (q_HK * K**-0.5)[:, :, None]).sum(1)
            if save_T[t] >= 0:
                state_RHKV[save_T[t]] = state_HKV
    return out_THV


def state_space(xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows) -> Tensor:
    """``KernelsProtocol.state_space``."""
    H, N, P = space.shape
    groups = space.num_groups * N
    out_THP = xbc_TC.new_empty(len(xbc_TC), H, P)
    save_T = rows.save_T.tolist()
    for begin, end, row in _sequences(rows):
        state_HNP = state_RHNP[row].clone()
        for t in range(begin, end):
            x, b, c = (x.float() for x in torch.split_with_sizes(xbc_TC[t], (H * P, groups, groups)))
            x_HP = x.view(H, P)
            b_HN, c_HN = (x.view(-1, N).repeat_interleave(H // space.num_groups, 0) for x in (b, c))
            dt_H = softplus(dt_TH[t].float() + space.dt_bias_H).clamp(space.dt_min, space.dt_max)
            state_HNP = state_HNP * torch.exp(-space.rate_H * dt_H)[:, None, None]
            state_HNP = state_HNP + b_HN[:, :, None] * (x_HP * dt_H[:, None])[:, None, :]
            out_THP[t] = (state_HNP * c_HN[:, :, None]).sum(1) + space.skip_H[:, None] * x_HP
            if save_T[t] >= 0:
                state_RHNP[save_T[t]] = state_HNP
    return out_THP


def gated_rms_norm(x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool) -> Tensor:
    """``KernelsProtocol.gated_rms_norm``."""
    T, D = x_TD.shape
    W = len(weight_W)
    x, gate = x_TD.float(), _silu(gate_TD.float())
    if gate_first:
        x = x * gate
    x = x.view(T, D // group, group)
    x = (x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)).view(T, D // W, W) * weight_W.float()
    x = x.view(T, D)
    return (x if gate_first else x * gate).to(x_TD.dtype)


def _sequences(rows: StateRows) -> Iterator[tuple[int, int, int]]:
    """First token, end and row of each sequence that has tokens. Row by row, each reads its state before any other
    saves one: no row that is saved is read by another sequence."""
    offsets = rows.offsets_B1.tolist()
    for begin, end, row in zip(offsets[:-1], offsets[1:], rows.read_B.tolist(), strict=True):
        if end > begin:
            yield begin, end, row


def _unit(x_HK: Tensor) -> Tensor:
    return x_HK * torch.rsqrt(x_HK.square().sum(-1, keepdim=True) + EPS)


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
