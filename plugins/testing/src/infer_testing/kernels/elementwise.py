"""Norms, rotary embeddings, gates, and storing K and V."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from infer.contracts.attention import HeadNorms, QuantizedKV, Rotary
from infer_testing.kernels.provider import EXACT, GATES, SHAPES, Provider, check, wide
from infer_testing.numbers import compare, equal_bits, unchanged
from infer_testing.suite import Skipped, Violation


@check("rms_norm divides by the root of the mean square plus eps, and scales by the weight, or by 1 + weight", 14)
def rms_norm(p: Provider, draw: random.Random) -> None:
    (rows, size), dtype, unit = draw.choice(SHAPES), p.dtype(draw), draw.random() < 0.5
    x, weight = p.tensor(rows, size, dtype=dtype, draw=draw), p.tensor(size, dtype=dtype, draw=draw)
    with unchanged("rms_norm", x=x, weight=weight):
        found = p.kernels.rms_norm(x, weight, 1e-3, unit)
    what = f"rms_norm of {[rows, size]}" + (" with unit_offset" if unit else "")
    compare(what, found, EXACT.rms_norm(wide(x), wide(weight), 1e-3, unit), dtype)
    heads = p.tensor(5, 3 * 4 * 16, dtype=dtype, draw=draw)[:, 64:128].view(5, 4, 16)
    weight = p.tensor(16, dtype=dtype, draw=draw)
    found = p.kernels.rms_norm(heads, weight, 1e-6)
    compare("rms_norm of heads within a wider row", found, EXACT.rms_norm(wide(heads), wide(weight), 1e-6), dtype)


@check("add_rms_norm gives the norm of x + residual, and x + residual, and writes to neither argument", 14)
def add_rms_norm(p: Provider, draw: random.Random) -> None:
    (rows, size), dtype, unit = draw.choice(SHAPES), p.dtype(draw), draw.random() < 0.5
    x, residual = (p.tensor(rows, size, dtype=dtype, draw=draw) for _ in range(2))
    weight = p.tensor(size, dtype=dtype, draw=draw)
    with unchanged("add_rms_norm", x=x, residual=residual, weight=weight):
        normed, total = p.kernels.add_rms_norm(x, residual, weight, 1e-6, unit)
    compare("the second result of add_rms_norm, x + residual,", total, x + residual, dtype)
    exact = EXACT.rms_norm(wide(total), wide(weight), 1e-6, unit)
    compare(f"add_rms_norm of {[rows, size]}", normed, exact, dtype)


def rotary_of(p: Provider, rows: int, size: int, draw: random.Random, norms: HeadNorms | None = None) -> Rotary:
    angles = p.tensor(1 if draw.random() < 0.3 else rows, size // 2, draw=draw) * 7
    return Rotary(angles.cos(), angles.sin(), norms)


def exactly(rotary: Rotary) -> Rotary:
    norms = rotary.norms
    if norms is not None:
        norms = HeadNorms(wide(norms.q_weight_E), wide(norms.k_weight_E), *norms[2:])
    return Rotary(wide(rotary.cos), wide(rotary.sin), norms)


def head_norms(p: Provider, size: int, dtype: torch.dtype, draw: random.Random) -> HeadNorms | None:
    if draw.random() < 0.4:
        return None
    q_weight, k_weight = (p.tensor(size, dtype=dtype, draw=draw) for _ in range(2))
    return HeadNorms(q_weight, k_weight, 1e-3, draw.random() < 0.5)


@check("rope normalizes q and K by their own weights if there are norms, and rotates the halves of each head", 12)
def rope(p: Provider, draw: random.Random) -> None:
    (rows, heads, kv_heads, size), dtype = draw.choice([(1, 1, 1, 2), (5, 3, 1, 6), (9, 8, 2, 128)]), p.dtype(draw)
    q, k = (p.tensor(rows, n, size, dtype=dtype, draw=draw) for n in (heads, kv_heads))
    rotary = rotary_of(p, rows, size, draw, head_norms(p, size, dtype, draw))
    with unchanged("rope", q=q, k=k):
        found = p.kernels.rope(q, k, rotary)
    for name, result, exact in zip("qk", found, EXACT.rope(wide(q), wide(k), exactly(rotary)), strict=True):
        compare(f"{name} after rope ({'no ' if rotary.norms is None else ''}norms)", result, exact, dtype)


@check("rope_store_kv returns the rotated q and stores the rotated K, and V as it is, at flat_T and nowhere else", 12)
def rope_store_kv(p: Provider, draw: random.Random) -> None:
    dtype, rows, size = p.dtype(draw), draw.choice([1, 3, 20]), draw.choice([8, 34, 64])
    q, k, v = (p.tensor(rows, heads, size, dtype=dtype, draw=draw) for heads in (4, 2, 2))
    rotary = rotary_of(p, rows, size, draw, head_norms(p, size, dtype, draw))
    k_cache, v_cache = (p.tensor(8, 5, 2, size, dtype=dtype, draw=draw) for _ in range(2))
    before, flat = k_cache.clone(), torch.tensor(draw.sample(range(40), rows), device=p.device)
    q_exact, k_exact = EXACT.rope(wide(q), wide(k), exactly(rotary))
    found = p.kernels.rope_store_kv(q, k, v, rotary, k_cache, v_cache, flat)
    compare("q after rope_store_kv", found, q_exact, dtype)
    compare("K that rope_store_kv stored", k_cache.flatten(0, 1)[flat], k_exact, dtype, "token")
    equal_bits("V that rope_store_kv stored", v_cache.flatten(0, 1)[flat], v)
    untouched("rope_store_kv", k_cache, before, flat)
    one = before.clone()
    p.kernels.rope_store_kv(q, k, v, rotary, one, one, flat)
    equal_bits("K that rope_store_kv stored where V is K", one, k_cache)


@check("store_kv stores each token's K and V at its flat index and changes nothing else", 12)
def store_kv(p: Provider, draw: random.Random) -> None:
    dtype, rows = p.dtype(draw), draw.choice([1, 3, 7])
    k, v = (p.tensor(rows, 2, 8, dtype=dtype, draw=draw) for _ in range(2))
    k_cache, v_cache = (p.tensor(4, 3, 2, 8, dtype=dtype, draw=draw) for _ in range(2))
    before, flat = (k_cache.clone(), v_cache.clone()), torch.tensor(draw.sample(range(12), rows), device=p.device)
    p.kernels.store_kv(k, v, k_cache, v_cache, flat)
    for name, x, cache, old in zip("KV", (k, v), (k_cache, v_cache), before, strict=True):
        equal_bits(f"{name} that store_kv stored", cache.flatten(0, 1)[flat], x)
        untouched("store_kv", cache, old, flat)
    one = before[0].clone()
    p.kernels.store_kv(k, v, one, one, flat)
    equal_bits("K that store_kv stored where V is K", one, k_cache)


def untouched(what: str, cache: Tensor, before: Tensor, flat: Tensor) -> None:
    others = [i for i in range(len(cache.flatten(0, 1))) if i not in flat.tolist()]
    changed = (cache.flatten(0, 1)[others] != before.flatten(0, 1)[others]).flatten(1).any(1)
    if changed.any():
        index = others[int(changed.nonzero()[0])]
        raise Violation(f"{what} changes the cache at flat index {index}, which is not one of {flat.tolist()}")


@check("With int8, K and V are stored as QuantizedKV says, bit for bit", 6)
def store_kv_int8(p: Provider, draw: random.Random) -> None:
    if "int8" not in p.kv_dtypes:
        raise Skipped("the registration's kv_dtypes do not name int8")
    dtype = p.dtype(draw)
    k = p.tensor(14, 2, 34, dtype=dtype, draw=draw)
    k = k * torch.logspace(-35, 35, 14, dtype=torch.float64)[:, None, None].to(k)
    k[3, 0] = 0
    k[4, 1] = torch.arange(-17, 17).to(dtype) / 2  # a tie in every other value
    k[4, 1, 0] = 127
    v, flat = k.flip(0), torch.tensor(draw.sample(range(20), 14), device=p.device)

    def empty(device: torch.device) -> QuantizedKV:
        codes = torch.full((5, 4, 2, 34), 55, dtype=torch.int8, device=device)
        return QuantizedKV(codes, torch.full((5, 4, 2), 77.0, device=device))

    found, exact = (empty(p.device), empty(p.device)), (empty(torch.device("cpu")), empty(torch.device("cpu")))
    EXACT.store_kv(k.cpu(), v.cpu(), *exact, flat.cpu())
    turned = Rotary(torch.ones(1, 17, device=p.device), torch.zeros(1, 17, device=p.device))
    for name in ("store_kv", "rope_store_kv"):
        if name == "store_kv":
            p.kernels.store_kv(k, v, *found, flat)
        else:
            p.kernels.rope_store_kv(k, k, v, turned, *found, flat)
        for which, one, other in zip("KV", found, exact, strict=True):
            equal_bits(f"codes of {which} that {name} stored", one.codes.flatten(0, 1).cpu(), other.codes.flatten(0, 1))
            equal_bits(
                f"scales of {which} that {name} stored", one.scales.flatten(0, 1).cpu(), other.scales.flatten(0, 1)
            )


@check("gated gives activation(gate) * up, whatever tensor either is a part of", 24)
def gated(p: Provider, draw: random.Random) -> None:
    (rows, size), dtype, activation = draw.choice(SHAPES), p.dtype(draw), draw.choice(GATES)
    parts = 4 * p.tensor(rows, 3 * size, dtype=dtype, draw=draw)
    up, gate = parts[:, :size], parts[:, 2 * size :]
    if draw.random() < 0.5:
        up = up.contiguous()
    with unchanged("gated", gate=gate, up=up):
        found = p.kernels.gated(gate, up, activation)
    exact, least = EXACT.gated(wide(gate), wide(up), activation), float(activation in ("sigmoid", "softplus"))
    terms = wide(up) * wide(gate).abs().clamp(min=least)
    compare(f"gated with {activation} of {[rows, size]}", found, exact, dtype, terms=terms)
    one = gate[:, :1].expand(rows, size)
    found = p.kernels.gated(one, up, activation)
    equal_bits(f"gated with {activation} and one gate a row", found, p.kernels.gated(one.contiguous(), up, activation))
    extreme = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4]], dtype=dtype, device=p.device)
    exact = EXACT.gated(wide(extreme), wide(torch.ones_like(extreme)), activation)
    found = p.kernels.gated(extreme, torch.ones_like(extreme), activation)
    compare(f"gated with {activation} of extremes", found, exact, dtype)
