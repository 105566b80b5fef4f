"""Products with weights, plain and quantized, and with adapters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infer.contracts.adapters import AdapterPart, AdapterRows, LowRank
from infer.device import same_bits
from infer.errors import SettingsError
from infer.kernels.quantize import quantize_weight
from infer.weight import GroupedWeight, Weight, form_of
from infer_testing.kernels.provider import ACTIVATIONS, EXACT, LAYERS, Provider, check, wide
from infer_testing.numbers import compare, differing, equal_bits, nbytes_of, unchanged
from infer_testing.suite import Skipped, Violation


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
    gate, up = wide(p.kernels.linear(x, p.kernels.pack(weight, bias))).chunk(2, dim=-1)
    compare(f"gated_linear with {activation} of {rows} rows", found, EXACT.gated(gate, up, activation), dtype)


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
        if not same_bits(added(order), found[order]):
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
