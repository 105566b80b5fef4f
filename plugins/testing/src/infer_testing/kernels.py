"""What ``KernelsProtocol`` promises, tried on one provider."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from infer.cache import KVStorage
from infer.contracts.adapters import AdapterPart, AdapterRows, LowRank
from infer.contracts.attention import HeadNorms, KVDtype, QuantizedKV, Rotary
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Activation, Draws, Expert, KernelsProtocol, Routing
from infer.contracts.states import StateRows
from infer.device import FixedTensor, same_bits
from infer.errors import SettingsError
from infer.kernels.quantize import quantize_weight
from infer.kernels.reference import ReferenceKernels
from infer.weight import GroupedWeight, Weight, form_of
from infer_testing.attention import Scene, attention_spec
from infer_testing.numbers import compare, differing, equal_bits, nbytes_of, random_tensor, unchanged
from infer_testing.recurrent import Layer, conv, delta, random_layer, sliced, space, state_rows
from infer_testing.suite import Skipped, Suite, Violation

SHAPES = ((1, 1), (1, 16), (3, 17), (7, 64), (2, 257), (5, 1024), (130, 48))
"""Rows and their sizes."""
LAYERS = ((33, 17), (16, 16), (1, 8), (64, 200), (96, 64), (48, 1000))
"""Outputs and inputs of products."""
ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200)
"""Numbers of rows that kernels are tried with, and compared with the same rows among MOST_ROWS."""
MOST_ROWS = 300
HEADS = ((4, 2, 16), (1, 1, 16), (6, 2, 18), (7, 1, 64), (4, 4, 80), (8, 2, 128))
"""Query heads, K/V heads and their size."""
EXTENDS = (
    *((0, 1), (0, 5), (130, 1), (7, 3), (127, 2), (60, 70), (0, 140), (300, 1), (255, 130), (129, 2), (20, 1)),
    *((0, 16), (16, 16), (15, 2), (31, 1), (128, 1)),
)
"""Starts and lengths of sequences' chunks, around the edges of blocks, of windows and of segments of keys."""
WINDOWS = (None, 1, 9, 16, 127, 128, 129)
SINKS = (0.5, -1e4, 3.0, 1e4)
"""Logits of attention sinks, each among, below or above the scores."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SWAPPED = 8
"""How many sequences the recorded passes have."""


@dataclass
class Provider:
    """The kernels that are tried."""

    kernels: KernelsProtocol
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    kv_dtypes: Sequence[str] = ()
    """As in its registration."""

    def dtype(self, draw: random.Random) -> torch.dtype:
        return draw.choice(self.dtypes)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, draw: random.Random) -> Tensor:
        return random_tensor(*shape, dtype=dtype, seed=draw.randrange(1 << 30)).to(self.device)


SUITE: Suite[Provider] = Suite("check_kernels")
check = SUITE.check
EXACT = ReferenceKernels()
"""The meaning of every kernel. It is called with fp32 values, and its result is compared with rounding in mind."""


def check_kernels(
    kernels: KernelsProtocol,
    *,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    kv_dtypes: Sequence[str] = (),
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that ``KernelsProtocol`` promises on kernels that compute on ``device``. ``kv_dtypes`` are those
    of their registration. ``only`` names checks, ``case`` one case of each. Raises ConformanceError."""
    provider = Provider(kernels, device or torch.device("cpu"), dtypes, kv_dtypes)
    SUITE.enforce(provider, only=only, seed=seed, case=case)


def wide(x: Tensor) -> Tensor:
    """In fp32 on the CPU, for the reference."""
    return x.cpu().float()


# Meaning


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


@check("gated gives activation(left half) * right half", 18)
def gated(p: Provider, draw: random.Random) -> None:
    (rows, size), dtype, activation = draw.choice(SHAPES), p.dtype(draw), draw.choice(ACTIVATIONS)
    x = 4 * p.tensor(rows, 2 * size, dtype=dtype, draw=draw)
    with unchanged("gated", gate_up=x):
        found = p.kernels.gated(x, activation)
    compare(f"gated with {activation} of {[rows, 2 * size]}", found, EXACT.gated(wide(x), activation), dtype)
    gate = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], dtype=dtype, device=p.device)
    extreme = torch.cat((gate, torch.ones_like(gate)))[None]
    exact = EXACT.gated(wide(extreme), activation)
    compare(f"gated with {activation} of extremes", p.kernels.gated(extreme, activation), exact, dtype)


@check("linear gives x W^T + bias, and pack keeps no reference to the weight", 12)
def linear(p: Provider, draw: random.Random) -> None:
    (n, k), dtype, rows = draw.choice(LAYERS), p.dtype(draw), draw.choice([1, 2, 16, 40])
    weight, x = p.tensor(n, k, dtype=dtype, draw=draw), p.tensor(rows, k, dtype=dtype, draw=draw)
    bias = p.tensor(n, dtype=dtype, draw=draw) if draw.random() < 0.5 else None
    packed = p.kernels.pack(weight, bias)
    exact = torch.nn.functional.linear(wide(x), wide(weight), None if bias is None else bias.cpu().float())
    with unchanged("linear", x=x):
        found = p.kernels.linear(x, packed)
    compare(
        f"linear of {rows} rows with a weight {[n, k]}" + ("" if bias is None else " and bias"), found, exact, dtype
    )
    weight.zero_()
    if bias is not None:
        bias.zero_()
    if not same_bits(p.kernels.linear(x, packed), found):
        raise Violation("what pack returned follows later changes of the weight: it is not a copy")


@check("gated_linear gives gated of linear, for a weight whose first half of the rows computes the gate", 12)
def gated_linear(p: Provider, draw: random.Random) -> None:
    dtype, size, k = p.dtype(draw), draw.choice([1, 5, 16, 31, 32, 33, 100]), draw.choice([17, 64])
    activation, rows = draw.choice(ACTIVATIONS), draw.choice([1, 2, 16, 40])
    weight, x = p.tensor(2 * size, k, dtype=dtype, draw=draw), p.tensor(rows, k, dtype=dtype, draw=draw)
    bias = p.tensor(2 * size, dtype=dtype, draw=draw) if draw.random() < 0.5 else None
    found = p.kernels.gated_linear(x, p.kernels.pack_gated(weight, bias), activation)
    gate_up = p.kernels.linear(x, p.kernels.pack(weight, bias))
    compare(f"gated_linear with {activation} of {rows} rows", found, EXACT.gated(wide(gate_up), activation), dtype)


@check("add_adapters adds scale * B (A x) to the rows with an adapter, each as alone, and to no others", 8)
def adapters(p: Provider, draw: random.Random) -> None:
    dtype, k, sizes, rows = p.dtype(draw), draw.choice([17, 48, 256]), draw.choice([[32], [48, 16, 19]]), 40
    table, exact, slots = p.kernels.adapter_table(4), {}, [draw.choice([-1, 0, 2, 3]) for _ in range(rows)]
    for slot in (0, 2, 3):
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [
            AdapterPart(
                begin, LowRank(p.tensor(r, k, dtype=dtype, draw=draw), p.tensor(n, r, dtype=dtype, draw=draw), 0.3)
            )
            for begin, n, r in zip(begins, sizes, draw.sample([1, 8, 21, 40], len(sizes)), strict=True)
        ][draw.randrange(len(sizes)) :]
        p.kernels.set_adapter(table, slot, p.kernels.pack_adapter(parts))
        exact[slot] = parts
    x = p.tensor(rows, k, dtype=dtype, draw=draw)
    product = p.tensor(rows, sum(sizes), dtype=dtype, draw=draw)

    def added(order: Sequence[int]) -> Tensor:
        own = torch.tensor([slots[row] for row in order], dtype=torch.int32, device=p.device)
        groups = [(slot, (own == slot).nonzero().flatten()) for slot in exact if bool((own == slot).any())]
        to = product[order].clone()
        p.kernels.add_adapters(to, x[order], AdapterRows(own, groups), table)
        return to

    found, wanted = added(range(rows)), wide(product).clone()
    for row, slot in enumerate(slots):
        for begin, (a, b, scale) in exact.get(slot, ()):
            wanted[row, begin : begin + len(b)] += scale * (wide(b) @ (wide(a) @ wide(x)[row]))
    compare("add_adapters", found, wanted, dtype)
    bare = [row for row, slot in enumerate(slots) if slot < 0]
    equal_bits("add_adapters, of rows without an adapter,", found[bare], product[bare])
    for order in ([5], [*range(20, 29)], draw.sample(range(rows), rows)):
        if not _same(added(order), found[order]):
            raise Violation(f"add_adapters gives a row other bits among {len(order)} rows than among {rows}")
    p.kernels.set_adapter(table, 2, None)
    gone = [row for row, slot in enumerate(slots) if slot == 2]
    equal_bits("add_adapters, of an adapter that is gone,", added(range(rows))[gone], product[gone])


@check("embedding gives the rows of a packed weight", 4)
def embedding(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    weight = p.tensor(33, 17, dtype=dtype, draw=draw)
    ids = torch.tensor([32, 0, *(draw.randrange(33) for _ in range(9))], device=p.device)
    equal_bits("embedding", p.kernels.embedding(ids, p.kernels.pack(weight)), weight[ids])


@check("quantize gives the bits of infer/kernels/quantize.py", 6)
def quantize(p: Provider, draw: random.Random) -> None:
    (n, k), dtype, bits = draw.choice([(7, 64), (33, 96), (1, 32), (300, 256)]), p.dtype(draw), draw.choice([4, 8])
    weight = p.tensor(n, k, dtype=dtype, draw=draw)
    found, exact = p.kernels.quantize(weight, bits), quantize_weight(weight.cpu(), bits)  # type: ignore[arg-type]
    equal_bits(f"codes of {bits} bits", found.codes.cpu(), exact.codes)
    equal_bits(f"scales of codes of {bits} bits", found.scales_NG.cpu(), exact.scales_NG)


def grouped_weight(p: Provider, n: int, k: int, group: int, dtype: torch.dtype, draw: random.Random) -> GroupedWeight:
    """With scales that differ from group to group."""
    bits: Any = draw.choice([4, 8])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    codes = torch.randint(0, 256, (n, k * bits // 8), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=generator) + 0.25).bfloat16()
    kind = draw.choice(["", "", "minimum", "table"] if bits == 4 else ["", "minimum"])
    minimum = torch.randn(n, k // group, generator=generator).bfloat16() if kind == "minimum" else None
    table = torch.arange(-8, 8).float().roll(3) if kind == "table" else None
    weight = GroupedWeight(codes, scales, bits, minimum, table, draw.random() < 0.5)
    return weight.to(p.device, dtype)


@check("A product with a grouped weight is that of its values, with the activations rounded if it says so", 16)
def linear_grouped(p: Provider, draw: random.Random) -> None:
    dtype, group, n = p.dtype(draw), draw.choice([16, 32, 64, 128]), draw.choice([8, 24, 48])
    k, rows = group * draw.choice([1, 2, 3]), draw.choice([1, 3, 17])
    weight = grouped_weight(p, n, k, group, dtype, draw)
    what = f"linear with {weight} [{n}, {k}]" + (", int8 activations" if weight.int8_activations else "")
    try:
        packed = p.kernels.pack(weight)
    except SettingsError as refusal:
        raise Skipped(f"grouped weights are refused: {refusal}") from None
    values_NK = replace(weight, dtype=torch.float32).to(torch.device("cpu"), torch.float32).dequantize()
    columns = p.kernels.linear(torch.eye(k, dtype=dtype, device=p.device), packed).cpu().double().T
    if differing(columns, values_NK, torch.bfloat16).any():
        raise Violation(f"{what} {_wrong_group(columns, values_NK, weight)}")
    x = p.tensor(rows, k, dtype=dtype, draw=draw)
    exact_weight = weight.to(torch.device("cpu"), torch.float32)
    exact = EXACT.linear(wide(x), EXACT.pack(exact_weight))
    compare(f"{what} of {rows} rows", p.kernels.linear(x, packed), exact, dtype)


@check("a weight without values is packed into as many bytes as one with values", 12)
def pack_without_values(p: Provider, draw: random.Random) -> None:
    (n, k), dtype, meta = draw.choice(((33, 96), (96, 64), (48, 256))), p.dtype(draw), torch.device("meta")
    bias = p.tensor(n, dtype=dtype, draw=draw) if draw.random() < 0.5 else None
    plain, grouped = p.tensor(n, k, dtype=dtype, draw=draw), grouped_weight(p, n, k, 32, dtype, draw)
    pairs: list[tuple[Weight, Weight]] = [(plain, plain.to(meta)), (grouped, grouped.to(meta, dtype))]
    weight, bare = draw.choice(pairs)
    try:
        found = nbytes_of(p.kernels.pack(bare, None if bias is None else bias.to(meta)))
        real = nbytes_of(p.kernels.pack(weight, bias))
    except SettingsError as refusal:
        raise Skipped(f"grouped weights are refused: {refusal}") from None
    if found != real:
        raise Violation(
            f"pack of {form_of(weight)} {[n, k]} on the meta device takes {found} bytes, but with values it takes "
            f"{real}; infer doctor would say so"
        )


def _wrong_group(found_NK: Tensor, values_NK: Tensor, weight: GroupedWeight) -> str:
    """What is wrong with a weight's values."""
    n, column = differing(found_NK, values_NK, torch.bfloat16).nonzero()[0].tolist()
    scales, own = weight.scales_NG[n].double().cpu(), column // weight.group_size
    minima = torch.zeros_like(scales) if weight.minimum_NG is None else weight.minimum_NG[n].double().cpu()
    code, seen = (values_NK[n, column] - minima[own]) / scales[own], found_NK[n, column]
    near = 0.02 * abs(seen)
    if weight.minimum_NG is not None and abs(code * scales[own] - seen) < near:
        return f"leaves out the minimum of column {column} in row {n}"
    for group in range(len(scales)):
        if group != own and abs(code * scales[group] + minima[own] - seen) < near:
            return f"takes the scale of group {group} for column {column} of row {n}, which is in group {own}"
    return f"has the value {seen:.5g} in row {n}, column {column}; it is {values_NK[n, column]:.5g}"


@check(
    "route chooses the experts of the highest scores, the lower index first among equals, and gives their shares", 12
)
def route(p: Provider, draw: random.Random) -> None:
    tokens, experts = draw.choice([1, 5, 40]), draw.choice([4, 7, 32])
    score: Any = draw.choice(["softmax", "sigmoid"])
    routing = Routing(draw.randint(1, 4), score, draw.random() < 0.5, draw.choice([1.0, 2.5]))
    logits = p.tensor(tokens, experts, dtype=p.dtype(draw), draw=draw)
    logits[0, :] = logits[0, 0]  # a tie of all
    bias = p.tensor(experts, draw=draw) * 0.3 if score == "sigmoid" and draw.random() < 0.5 else None
    found, shares = p.kernels.route(logits, routing, bias)
    exact, exact_shares = EXACT.route(wide(logits), routing, None if bias is None else bias.cpu())
    for name, x, dtype in (("experts", found, torch.int32), ("shares", shares, torch.float32)):
        if x.shape != exact.shape or x.dtype != dtype:
            raise Violation(f"route's {name} are {list(x.shape)} of {x.dtype}, not {list(exact.shape)} of {dtype}")
    if not torch.equal(found.cpu(), exact):
        token = int((found.cpu() != exact).any(1).nonzero()[0])
        said = f"{found[token].tolist()} for token {token}; {exact[token].tolist()} are right"
        raise Violation(f"route with {routing} chooses the experts {said}" + (" (all logits are equal)" * (token == 0)))
    compare(f"the shares that route gives with {routing}", shares, exact_shares, torch.float32, "token")


@dataclass
class Mixture:
    """Random experts of one layer, and tokens that are routed to them."""

    experts: list[Expert]
    x: Tensor
    experts_TJ: Tensor
    shares_TJ: Tensor

    @classmethod
    def make(cls, p: Provider, tokens: int, dtype: torch.dtype, draw: random.Random) -> Mixture:
        count, size, inner = draw.choice([3, 8]), draw.choice([16, 48]), draw.choice([8, 32])
        top, biases = draw.randint(1, 3), draw.random() < 0.5

        def expert() -> Expert:
            weights = [p.tensor(n, k, dtype=dtype, draw=draw) / k**0.5 for n, k in ((2 * inner, size), (size, inner))]
            return Expert(*weights, *(p.tensor(len(w), dtype=dtype, draw=draw) for w in weights if biases))

        noise = p.tensor(tokens, count, draw=draw) - torch.arange(count, device=p.device) * (3 / count)
        chosen = noise.argsort(dim=-1, descending=True)[:, :top].int()
        shares = p.tensor(tokens, top, draw=draw).softmax(-1)
        return cls([expert() for _ in range(count)], p.tensor(tokens, size, dtype=dtype, draw=draw), chosen, shares)


@check("gated_experts sums the results of a token's experts, each times its share, in the order of experts_TJ", 8)
def gated_experts(p: Provider, draw: random.Random) -> None:
    dtype, activation = p.dtype(draw), draw.choice(ACTIVATIONS)
    m = Mixture.make(p, draw.choice([1, 5, 40]), dtype, draw)
    packed = p.kernels.pack_experts(iter(m.experts), len(m.experts))
    found = p.kernels.gated_experts(m.x, m.experts_TJ, m.shares_TJ, packed, activation)
    exact = torch.zeros(m.x.shape, dtype=torch.float64)
    for index, expert in enumerate(m.experts):
        gate_up, down, *biases = expert
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        inner, outer = (None if bias is None else wide(bias) for bias in biases)
        hidden = EXACT.gated(torch.nn.functional.linear(wide(m.x), wide(gate_up), inner), activation)
        result = torch.nn.functional.linear(hidden, wide(down), outer).double()
        share = (m.shares_TJ * (m.experts_TJ == index)).sum(1, keepdim=True)
        exact += share.cpu().double() * result
    compare(f"gated_experts of {len(m.x)} tokens with {len(m.experts)} experts", found, exact, dtype, "token")


@check("sample draws by the inverse of the cumulative distribution, in vocabulary order, of what the filters keep", 16)
def sample(p: Provider, draw: random.Random) -> None:
    rows, vocab = draw.choice([1, 6, 33]), draw.choice([5, 300, 5000])
    logits = (2 * p.tensor(rows, vocab, draw=draw)).mul(10).round().div(10)  # rounding makes ties
    draws = random_draws(p, rows, draw)
    found = p.kernels.sample(logits, draws).tolist()
    for row in range(rows):
        one = [x[row].item() for x in (draws.temperature_N, draws.top_k_N, draws.top_p_N, draws.min_p_N)]
        said = f"with temperature {one[0]:.3g}, top_k {one[1]}, top_p {one[2]:.3g}, min_p {one[3]:.3g}"
        values = logits[row].cpu().double().numpy()
        if one[0] == 0:
            if found[row] != int(values.argmax()):
                raise Violation(f"sample takes token {found[row]} in row {row}, {said}; {values.argmax()} is likeliest")
            continue
        mass = kept_mass(values, *one)
        if not 0 <= found[row] < vocab:
            raise Violation(f"sample gives token {found[row]} in row {row}, {said}; there are {vocab}")
        if mass[found[row]] == 0:
            raise Violation(f"sample draws token {found[row]} in row {row}, {said}, which the filters drop")
        cumulative, u = np.cumsum(mass) / mass.sum(), float(draws.uniform_N[row])
        if np.abs(cumulative - u).min() > 1e-5:  # rounding may move an edge
            right = int(np.searchsorted(cumulative, u, side="right"))
            if found[row] != right:
                raise Violation(f"sample draws token {found[row]} in row {row}, {said}, by {u:.6f}; {right} is right")
    logits[0, 0] = torch.nan
    if int(p.kernels.sample(logits, draws)[0]) != -1:
        raise Violation("sample gives a token for a row of logits with a NaN; it has to give -1")


def random_draws(p: Provider, rows: int, draw: random.Random) -> Draws:
    def column(dtype: torch.dtype, *values: float) -> Tensor:
        return torch.tensor([draw.choice(values) for _ in range(rows)], dtype=dtype, device=p.device)

    temperature, top_k = column(torch.float32, 0, 0.5, 1, 3), column(torch.int64, 0, 0, 1, 3, 9)
    top_p, min_p = column(torch.float32, 1, 1, 0.3, 0.9), column(torch.float32, 0, 0, 0.1)
    uniform = torch.tensor([draw.random() for _ in range(rows)], dtype=torch.float64, device=p.device)
    ranked = bool(((top_k > 0) | (top_p < 1)).any())
    return Draws(temperature, top_k, top_p, min_p, uniform, bool((temperature == 0).all()), ranked)


def kept_mass(
    logits: np.ndarray[Any, Any], temperature: float, top_k: float, top_p: float, min_p: float
) -> np.ndarray[Any, Any]:
    """What the token is drawn from, in float64: temperature, top-k, top-p over what top-k left, min-p. Top-k keeps
    the first of equals; the others keep all of them."""
    x: np.ndarray[Any, Any] = np.exp((logits - logits.max()) / temperature)
    x /= x.sum()
    keep = np.ones(len(x), bool)
    if top_k > 0:
        keep[np.argsort(-logits, kind="stable")[int(top_k) :]] = False
    if top_p < 1:
        left = np.sort(np.where(keep, x, 0))[::-1]
        before = np.cumsum(left) - left
        keep &= x >= left[(before < np.float32(top_p) * left.sum()).sum() - 1] * (1 - 1e-9)
    keep &= x >= np.float32(min_p) * x.max()
    return np.where(keep, x, 0)


# Attention


def scene(p: Provider, draw: random.Random, kv_dtype: KVDtype = "auto") -> Scene:
    heads, window = draw.choice(HEADS), draw.choice(WINDOWS)
    spec = attention_spec(*heads, window, draw.choice([None, None, 0.7]), draw.choice([(), (), SINKS]))
    if spec.sinks_H is not None:
        spec = replace(spec, sinks_H=spec.sinks_H.to(p.device))
    extends = draw.choices(EXTENDS, k=draw.randint(1, 5))
    size, seed = draw.choice([1, 16, 128, 500]), draw.randrange(1 << 20)
    return Scene(spec, extends, size, p.dtype(draw), seed, p.kernels, str(p.device), kv_dtype)


@check("Each query attends to its sequence's positions up to its own, within the window, with scale, cap and sinks", 60)
def extend_attention(p: Provider, draw: random.Random) -> None:
    scene(p, draw).check()


@check("Attention over int8 K and V is that over the values that the codes stand for", 16)
def extend_attention_int8(p: Provider, draw: random.Random) -> None:
    if "int8" not in p.kv_dtypes:
        raise Skipped("the registration's kv_dtypes do not name int8")
    scene(p, draw, "int8").check()


@check("A NaN in K or V reaches the queries that attend to it, and no other sequence", 4)
def attention_to_nan(p: Provider, draw: random.Random) -> None:
    for kv_dtype in ("auto", "int8") if "int8" in p.kv_dtypes else ("auto",):
        made = Scene(
            attention_spec(),
            [(40, 1), (0, 9), (300, 1)],
            16,
            p.dtype(draw),
            0,
            p.kernels,
            str(p.device),
            kv_dtype,
        )
        which = draw.choice("kv")
        getattr(made, which)[2][draw.randrange(300), 0, 5] = torch.nan
        found = made.attend()
        if not found[-1, :2].isnan().any(-1).all():
            raise Violation(f"a NaN in {which.upper()} of sequence 2 ({kv_dtype}) does not reach its query")
        if not (found[:-1].isfinite().all() and found[-1, 2:].isfinite().all()):
            raise Violation(f"a NaN in {which.upper()} of sequence 2 ({kv_dtype}) reaches others, or other heads")


@check("A query's bits depend neither on how its sequence is cut into chunks nor on other sequences or blocks", 24)
def attention_is_exact(p: Provider, draw: random.Random) -> None:
    spec = attention_spec(*draw.choice(HEADS), draw.choice(WINDOWS), draw.choice([None, 3.0]))
    dtype, length = p.dtype(draw), draw.choice([1, 17, 128, 129, 200, 300])
    kv_dtype: Any = draw.choice(["auto", "int8"]) if "int8" in p.kv_dtypes else "auto"
    whole = Scene(spec, [(0, length)], length, dtype, 0, p.kernels, str(p.device), kv_dtype)
    expected = whole.attend()
    begin = draw.randrange(length)
    end = draw.choice([begin + 1, draw.randint(begin + 1, length), length])
    others = draw.choices(EXTENDS, k=draw.randint(0, 20 if end == begin + 1 else 4))
    place, block_size = draw.randint(0, len(others)), draw.choice([1, 16, 512])
    extends = [*others[:place], (begin, end - begin), *others[place:]]
    part = Scene(spec, extends, block_size, dtype, 1, p.kernels, str(p.device), kv_dtype)
    part.q[place], part.k[place], part.v[place] = whole.q[0][begin:end], whole.k[0][:end], whole.v[0][:end]
    row = sum(n for _, n in others[:place])
    found = part.attend()[row : row + end - begin]
    if not same_bits(found, expected[begin:end]):
        first = begin + int((found != expected[begin:end]).flatten(1).any(1).nonzero()[0])
        raise Violation(
            f"the query at position {first} has other bits in a chunk [{begin}, {end}) beside {len(others)} other "
            f"sequences, over blocks of {block_size}, than in one chunk of {length} alone"
        )


# States

RECURRENT = ("causal_conv", "gated_delta_rule", "state_space")
"""The kernels that keep a state of each sequence."""
GROUPS = ((16, 16, 16), (64, 16, 16), (96, 48, 96), (60, 20, 10), (45, 15, 45), (256, 128, 128))
"""Sizes of rows, of the groups that are normalized, and of weights."""


@dataclass
class Pass:
    """Sequences of one pass, their tokens and the rows of their states."""

    layer: Layer
    inputs: list[Tensor]
    states: Tensor
    rows: StateRows
    ends: list[int]

    @classmethod
    def make(cls, p: Provider, layer: Layer, dtype: torch.dtype, draw: random.Random) -> Pass:
        """Some sequences leave their states where they find them, some have checkpoints on the way, and some begin
        with the same one."""
        lens = [draw.choice([1, 1, 2, 5, 17, 40]) for _ in range(draw.randint(1, 5))]
        lens.insert(draw.randint(0, len(lens)), 0)
        ends = np.cumsum(lens).tolist()
        free = list(range(2, sum(lens) + len(lens) + 4))  # nobody saves rows 0 and 1
        draw.shuffle(free)
        read: list[int] = []
        save: dict[int, int] = {}
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            save |= {t: free.pop() for t in range(begin, end - 1) if draw.random() < 0.2}
            read.append(free.pop() if draw.random() < 0.5 else draw.randrange(2))
            if end > begin:
                save[end - 1] = read[-1] if read[-1] > 1 else free.pop()
        inputs = [p.tensor(sum(lens), n, dtype=dtype, draw=draw) for n in layer.widths]
        states = p.tensor(sum(lens) + len(lens) + 4, *layer.shape, dtype=layer.state_dtype(dtype), draw=draw)
        layer = layer.to(p.device, dtype)
        return cls(layer, sliced(inputs), states, state_rows(lens, read, save, p.device), ends)

    def check(self, p: Provider, dtype: torch.dtype) -> None:
        layer, name, cpu, before = self.layer, self.layer.name, torch.device("cpu"), self.states.clone()
        exact_states = wide(before).clone()
        exact_rows = StateRows(*(x.cpu() for x in self.rows))
        exact = layer.to(cpu, torch.float32).run(EXACT, [wide(x) for x in self.inputs], exact_states, exact_rows)
        with unchanged(name, **{f"number {i + 1}": x for i, x in enumerate(self.inputs)}):
            found = layer.run(p.kernels, self.inputs, self.states, self.rows)
        compare(f"{name} with a state {list(layer.shape)}", found, exact, dtype, "token")
        saved = self.rows.save_T.tolist()
        for row in range(len(before)):
            if row not in saved:
                if not same_bits(self.states[row], before[row]):
                    raise Violation(f"{name} changes the state in row {row}, which no token saves")
                continue
            what = f"the state that {name} saves after token {saved.index(row)}"
            if saved.index(row) + 1 not in self.ends:
                what += ", in the middle of a sequence,"
            compare(what, self.states[row], exact_states[row], before.dtype, "part")


@check("causal_conv sums the last inputs of each channel times its weights, and keeps the last W - 1", 12)
def causal_conv(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    Pass.make(p, random_layer("causal_conv", draw), dtype, draw).check(p, dtype)


@check("gated_delta_rule lets the state decay, moves it toward k v^T, and reads it by q", 12)
def gated_delta_rule(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    Pass.make(p, random_layer("gated_delta_rule", draw), dtype, draw).check(p, dtype)


@check("state_space lets the state decay, adds B (dt x)^T, and reads it by C", 12)
def state_space(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    Pass.make(p, random_layer("state_space", draw), dtype, draw).check(p, dtype)


@check("gated_rms_norm normalizes each group of a row, and multiplies by the weight and by SiLU of the gate", 12)
def gated_rms_norm(p: Provider, draw: random.Random) -> None:
    (size, group, width), dtype, gate_first = draw.choice(GROUPS), p.dtype(draw), draw.random() < 0.5
    rows = draw.choice([1, 3, 40])
    x, gate = (p.tensor(rows, size, dtype=dtype, draw=draw) for _ in range(2))
    (gate,), weight = sliced([2 * gate]), p.tensor(width, dtype=dtype, draw=draw)
    with unchanged("gated_rms_norm", x=x, gate=gate, weight=weight):
        found = p.kernels.gated_rms_norm(x, gate, weight, 1e-3, group, gate_first)
    exact = EXACT.gated_rms_norm(wide(x), wide(gate), wide(weight), 1e-3, group, gate_first)
    what = f"gated_rms_norm of {[rows, size]} in groups of {group}, the gate {'first' if gate_first else 'last'},"
    compare(what, found, exact, dtype)


@check("A token's result and the state after it depend neither on how its sequence is cut nor on other sequences", 18)
def states_are_exact(p: Provider, draw: random.Random) -> None:
    dtype, layer, length = p.dtype(draw), random_layer(draw.choice(RECURRENT), draw), draw.choice([2, 7, 37, 64, 100])
    layer = layer.to(p.device, dtype)
    kind, name = layer.state_dtype(dtype), layer.name
    inputs = [p.tensor(length, n, dtype=dtype, draw=draw) for n in layer.widths]
    state, mark = p.tensor(1, *layer.shape, dtype=kind, draw=draw), draw.randrange(length - 1)
    whole = torch.cat((state, torch.zeros_like(state), torch.zeros_like(state)))
    last = length - 1
    expected = layer.run(p.kernels, inputs, whole, state_rows([length], [0], {mark: 1, last: 2}, p.device))
    ours, checkpoint = state, None
    begin = 0
    while begin < length:
        end = draw.choice([begin + 1, draw.randint(begin + 1, length), length])
        lens = [draw.choice([0, 1, 3, 20]) for _ in range(draw.choice([0, 0, 2, 9]))]
        place, others = draw.randint(0, len(lens)), len(lens)
        lens.insert(place, end - begin)
        first = sum(lens[:place])
        ends = np.cumsum(lens).tolist()
        in_place = draw.random() < 0.5
        save = {e - 1: 3 + b for b, (e, n) in enumerate(zip(ends, lens, strict=True)) if n}
        save[first + end - begin - 1] = 0 if in_place else 1
        if begin <= mark < end - 1:
            save[first + mark - begin] = 2
        states = p.tensor(3 + len(lens), *layer.shape, dtype=kind, draw=draw)
        states[:1] = ours
        read = [0 if b == place else 3 + b for b in range(len(lens))]
        beside = [p.tensor(sum(lens), n, dtype=dtype, draw=draw) for n in layer.widths]
        for x, own in zip(beside, inputs, strict=True):
            x[first : first + end - begin] = own[begin:end]
        found = layer.run(p.kernels, sliced(beside), states, state_rows(lens, read, save, p.device))
        found = found[first : first + end - begin]
        ours = states[:1] if in_place else states[1:2]
        if begin <= mark < end:
            checkpoint = states[2:3] if mark < end - 1 else ours
        chunk = f"in a chunk [{begin}, {end}) beside {others} other sequences than in one chunk of {length} alone"
        if not same_bits(found, expected[begin:end]):
            at = begin + int((found != expected[begin:end]).flatten(1).any(1).nonzero()[0])
            raise Violation(f"{name} gives the token at position {at} other bits {chunk}")
        for position, one, other in ((mark, checkpoint, whole[1:2]), (last, ours, whole[2:])):
            if begin <= position < end and one is not None and not same_bits(one, other):
                raise Violation(f"{name} leaves a state of other bits after position {position} {chunk}")
        begin = end


@check("A NaN in a token or in a state reaches its own sequence, and no other", 6)
def states_of_nan(p: Provider, draw: random.Random) -> None:
    dtype, layer = p.dtype(draw), random_layer(draw.choice(RECURRENT), draw).to(p.device, torch.float32)
    layer = layer.to(p.device, dtype)
    inputs = [p.tensor(9, n, dtype=dtype, draw=draw) for n in layer.widths]
    states = p.tensor(6, *layer.shape, dtype=layer.state_dtype(dtype), draw=draw)
    in_state = draw.random() < 0.5
    if in_state:
        states[1] = torch.nan
    else:
        draw.choice(inputs)[4] = torch.nan  # of tokens 3 to 6, which are sequence 1
    found = layer.run(p.kernels, inputs, states, state_rows([3, 4, 2], [0, 1, 2], {2: 0, 6: 4, 8: 5}, p.device))
    where = f"a NaN in {'the state' if in_state else 'a token'} of sequence 1"
    if not found[3 if in_state else 4].isnan().any():
        raise Violation(f"{where} does not reach the result of {layer.name}")
    if not (found[:3].isfinite().all() and found[7:].isfinite().all()):
        raise Violation(f"{where} reaches another sequence's results of {layer.name}")
    if not (states[[0, 5]].isfinite().all()):
        raise Violation(f"{where} reaches another sequence's state of {layer.name}")


# A row's bits are its own

Rowwise = Callable[..., "Tensor | tuple[Tensor, ...]"]


def rowwise(what: str, kernel: Rowwise, *inputs: Tensor) -> None:
    """Raises Violation unless rows computed among others have the bits that they have among MOST_ROWS."""
    most = len(inputs[0])
    whole, varying = _several(kernel(*inputs)), []
    for n in (n for n in ROWS if n < most):
        for begin in sorted({0, (most - n) // 2, most - n}):
            part = _several(kernel(*(x[begin : begin + n] for x in inputs)))
            if not all(_same(a, b[begin : begin + n]) for a, b in zip(part, whole, strict=True)):
                varying.append(n)
                break
    if varying:
        sizes = ", ".join(map(str, varying[:6])) + (", ..." if len(varying) > 6 else "")
        raise Violation(f"{what} gives a row other bits in a batch of {sizes} rows than among {most}")
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0)).to(inputs[0].device)
    for a, b in zip(_several(kernel(*(x[order] for x in inputs))), whole, strict=True):
        if not _same(a, b[order]):
            raise Violation(f"{what} gives a row other bits if the rows stand in another order")


def _several(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and same_bits(a, b)


@check("Each row of a norm, of an activation and of rope depends on that row alone, bit for bit", 6)
def rows_of_elementwise(p: Provider, draw: random.Random) -> None:
    dtype, size = p.dtype(draw), draw.choice([16, 48, 65, 128, 1000])
    x, weight = 3 * p.tensor(MOST_ROWS, 2 * size, dtype=dtype, draw=draw), p.tensor(size, dtype=dtype, draw=draw)
    left, unit, activation = x[:, :size].contiguous(), draw.random() < 0.5, draw.choice(ACTIVATIONS)
    rowwise("rms_norm", lambda x: p.kernels.rms_norm(x, weight, 1e-6, unit), left)
    rowwise("add_rms_norm", lambda x: p.kernels.add_rms_norm(x, 2 * x, weight, 1e-6, unit), left)
    rowwise(f"gated with {activation}", lambda x: p.kernels.gated(x, activation), x)
    heads, head = draw.choice([(1, 16), (3, 18), (2, 128)])
    q = p.tensor(MOST_ROWS, heads, head, dtype=dtype, draw=draw)
    angles, norms = p.tensor(MOST_ROWS, head // 2, draw=draw), head_norms(p, head, dtype, draw)
    turn = lambda q, angles: p.kernels.rope(q, q, Rotary(angles.cos(), angles.sin(), norms))  # noqa: E731
    rowwise("rope", turn, q, angles)
    size, group, width = draw.choice(GROUPS)
    x, gate = (p.tensor(MOST_ROWS, size, dtype=dtype, draw=draw) for _ in range(2))
    weight, first = p.tensor(width, dtype=dtype, draw=draw), draw.random() < 0.5
    rowwise("gated_rms_norm", lambda x, gate: p.kernels.gated_rms_norm(x, gate, weight, 1e-6, group, first), x, gate)


@check("Each row of a product depends on that row alone, bit for bit, whatever the number of rows", 8)
def rows_of_linear(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    n, k = draw.choice([(2, 4), (48, 64), (200, 72), (64, 1000), (512, 256), (256, 512)])
    weight, x = p.tensor(n, k, dtype=dtype, draw=draw), p.tensor(MOST_ROWS, k, dtype=dtype, draw=draw)
    bias = p.tensor(n, dtype=dtype, draw=draw) if draw.random() < 0.5 else None
    packed, both = p.kernels.pack(weight, bias), p.kernels.pack_gated(weight, bias)
    rowwise(f"linear with a weight {[n, k]}", lambda x: p.kernels.linear(x, packed), x)
    rowwise(f"gated_linear with a weight {[n, k]}", lambda x: p.kernels.gated_linear(x, both, "silu"), x)


@check("Each row of a product with a grouped weight depends on that row alone, bit for bit", 4)
def rows_of_linear_grouped(p: Provider, draw: random.Random) -> None:
    dtype, group = p.dtype(draw), draw.choice([16, 32, 64])
    weight = grouped_weight(p, 48, 4 * group, group, dtype, draw)
    try:
        packed = p.kernels.pack(weight)
    except SettingsError as refusal:
        raise Skipped(f"grouped weights are refused: {refusal}") from None
    x = p.tensor(MOST_ROWS, 4 * group, dtype=dtype, draw=draw)
    rowwise(f"linear with {weight}", lambda x: p.kernels.linear(x, packed), x)


@check("Each token's experts, shares and their result depend on that token alone, bit for bit", 4)
def rows_of_experts(p: Provider, draw: random.Random) -> None:
    dtype = p.dtype(draw)
    m = Mixture.make(p, MOST_ROWS // 2, dtype, draw)
    packed = p.kernels.pack_experts(iter(m.experts), len(m.experts))
    rowwise(
        "gated_experts",
        lambda x, experts, shares: p.kernels.gated_experts(x, experts, shares, packed, "silu"),
        *(m.x, m.experts_TJ, m.shares_TJ),
    )
    logits = p.tensor(MOST_ROWS, 32, dtype=dtype, draw=draw)
    rowwise("route", lambda logits: p.kernels.route(logits, Routing(4)), logits)


@check("The token that is drawn from a row depends on that row and its own parameters alone", 4)
def rows_of_sample(p: Provider, draw: random.Random) -> None:
    logits = 2 * p.tensor(65, draw.choice([7, 500]), dtype=p.dtype(draw), draw=draw)
    draws = random_draws(p, 65, draw)
    columns = (draws.temperature_N, draws.top_k_N, draws.top_p_N, draws.min_p_N, draws.uniform_N)

    def kernel(logits: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
        ranked = bool(((top_k > 0) | (top_p < 1)).any())
        return p.kernels.sample(logits, Draws(heat, top_k, top_p, min_p, uniform, bool((heat == 0).all()), ranked))

    rowwise("sample", kernel, logits, *columns)


# Recorded


@dataclass
class Stage:
    """The tensors of a decode pass of some sequences, which keep their addresses, and the kernels that read them."""

    p: Provider
    rows: int
    dtype: torch.dtype
    draw: random.Random

    def __post_init__(self) -> None:
        p, dtype, draw = self.p, self.dtype, self.draw
        self.spec = attention_spec(4, 2, 16, draw.choice([None, 20]))
        context = CacheContext([self.spec], SWAPPED, 64, dtype, p.device, p.kernels)
        self.storage = KVStorage(context, 4 * SWAPPED + 1, 16)
        self.ids = FixedTensor(torch.zeros(self.rows, dtype=torch.int64, device=p.device))
        self.x, self.y = (torch.zeros(self.rows, 64, dtype=dtype, device=p.device) for _ in range(2))
        self.kv = torch.zeros(self.rows, 2, 2, 16, dtype=dtype, device=p.device)
        self.cos, self.sin = (torch.zeros(self.rows, 8, device=p.device) for _ in range(2))
        self.weight_D = p.tensor(64, dtype=dtype, draw=draw)
        weight = p.tensor(64, 64, dtype=dtype, draw=draw) / 8
        self.packed, self.gated = p.kernels.pack(weight), p.kernels.pack_gated(weight)
        self.mixture = Mixture.make(p, self.rows, dtype, draw)
        self.experts = p.kernels.pack_experts(iter(self.mixture.experts), len(self.mixture.experts))
        self.logits = torch.zeros(self.rows, len(self.mixture.experts), dtype=dtype, device=p.device)
        self.inner = torch.zeros_like(self.mixture.x)
        layers = (conv(48, 4), delta(1, 2, 8, 16), space(2, 16, 1, 8))
        self.layers = [layer.to(p.device, dtype) for layer in layers]
        self.states = [
            torch.zeros(3 * SWAPPED, *layer.shape, dtype=layer.state_dtype(dtype), device=p.device)
            for layer in self.layers
        ]
        self.product = torch.zeros(self.rows, 80, dtype=dtype, device=p.device)
        self.state_rows = state_rows([1] * self.rows, [0] * self.rows, {}, p.device)
        self.next()

    def next(self) -> None:
        """Other sequences, at other positions, with other tokens."""
        draw, p = self.draw, self.p
        blocks = draw.sample(range(4 * SWAPPED), 4 * self.rows)
        table = np.array(blocks, dtype=np.int32).reshape(self.rows, 4)
        self.view = self.storage.fixed_view(table, [draw.randrange(64) for _ in range(self.rows)])
        for cache in (*self.storage.k, *self.storage.v):
            assert isinstance(cache, Tensor)
            cache.copy_(p.tensor(*cache.shape, dtype=self.dtype, draw=draw))
        self.ids.write(np.array([draw.randrange(64) for _ in range(self.rows)]))
        for x in (self.x, self.y, self.kv, self.cos, self.sin, self.logits, self.inner, self.product, *self.states):
            x.copy_(p.tensor(*x.shape, draw=draw))
        found = draw.sample(range(3 * SWAPPED), 2 * self.rows)
        left = [draw.choice(pair) for pair in zip(found[: self.rows], found[self.rows :], strict=True)]
        self.state_rows.read_B.copy_(torch.tensor(found[: self.rows]))
        self.state_rows.save_T.copy_(torch.tensor(left))

    def kept(self) -> list[Tensor]:
        """What the calls write to."""
        return [*self.storage.k, *self.storage.v, *self.states]  # type: ignore[list-item]

    def calls(self) -> dict[str, Callable[[], Tensor]]:
        """A call of each kernel that takes part in a pass."""
        k, rotary, s = self.p.kernels, Rotary(self.cos, self.sin), self.storage
        q, ragged, caches = self.x.view(-1, 4, 16), self.view.ragged, (s.k[0], s.v[0])

        def routed() -> Tensor:
            experts, shares = k.route(self.logits, Routing(self.mixture.experts_TJ.shape[1]))
            return k.gated_experts(self.inner, experts, shares, self.experts, "silu")

        def stored(rotate: bool) -> Tensor:
            if rotate:
                k.rope_store_kv(q, self.kv[:, 0], self.kv[:, 1], rotary, *caches, ragged.flat_T)
            else:
                k.store_kv(self.kv[:, 0], self.kv[:, 1], *caches, ragged.flat_T)
            return caches[0] + caches[1]  # type: ignore[operator]

        def recurrent(layer: Layer, states: Tensor) -> Callable[[], Tensor]:
            def run() -> Tensor:
                inputs = torch.split_with_sizes(self.product[:, : sum(layer.widths)], layer.widths, 1)
                out = layer.run(k, inputs, states, self.state_rows)
                return torch.cat((out.flatten(1), states[self.state_rows.save_T].flatten(1)), 1)

            return run

        return {
            "embedding": lambda: k.embedding(self.ids.tensor, self.packed),
            "linear": lambda: k.linear(self.x, self.packed),
            "gated_linear": lambda: k.gated_linear(self.x, self.gated, "silu"),
            "gated": lambda: k.gated(self.x, "silu"),
            "rms_norm": lambda: k.rms_norm(self.x, self.weight_D, 1e-6),
            "add_rms_norm": lambda: torch.cat(k.add_rms_norm(self.x, self.y, self.weight_D, 1e-6)),
            "rope": lambda: torch.cat(k.rope(q, self.kv[:, 0], rotary), 1),
            "store_kv": lambda: stored(False),
            "rope_store_kv": lambda: stored(True),
            "extend_attention": lambda: k.extend_attention(q, *caches, ragged, self.spec),
            "route and gated_experts": routed,
            **{layer.name: recurrent(layer, kept) for layer, kept in zip(self.layers, self.states, strict=True)},
            "gated_rms_norm": lambda: k.gated_rms_norm(self.x, self.product[:, 8:72], self.weight_D, 1e-6, 16, False),
        }


@check("A recorded call, replayed with other values in its tensors, gives the bits that a call gives", 4)
def recorded(p: Provider, draw: random.Random) -> None:
    stage = Stage(p, draw.choice([1, 2, 5]), p.dtype(draw), draw)
    reasons = []
    for name, call in stage.calls().items():
        recorder = p.kernels.recorder()
        if recorder is None:
            raise Skipped("these kernels have no recorder")
        with torch.inference_mode():
            _, replay = recorder(call)
        if isinstance(replay, str):
            reasons.append(f"{name} ({replay})")
            continue
        for _ in range(2):
            stage.next()
            before = [kept.clone() for kept in stage.kept()]
            with torch.inference_mode():
                found = replay()
                if isinstance(found, str):
                    reasons.append(f"{name} ({found})")
                    break
                found = found.clone()
                for kept, old in zip(stage.kept(), before, strict=True):
                    kept.copy_(old)
                expected = call()
            if not _same(found, expected):
                row = int((found != expected).flatten(1).any(1).nonzero()[0])
                raise Violation(
                    f"a replay of {name} gives other bits than a call, first in row {row} of {stage.rows}: it has "
                    "fixed something that differs between passes, or left something out"
                )
    if len(reasons) == len(stage.calls()):
        raise Violation(f"there is a recorder, but nothing can be recorded: {'; '.join(reasons)}")
