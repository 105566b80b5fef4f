"""Each kernel's time at the sizes of real models, next to its bound and to torch's own kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.gpu.dry import DEVICE, DRY
from benchmarks.gpu.timing import Ceilings, Run, seconds
from benchmarks.shapes import Costs
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from infer.contracts.attention import AttentionSpec, Ragged, Rotary
from infer.contracts.kernels import Draws
from infer.weight import GroupedWeight
from infer_kernels_triton.provider import TritonKernels

ROWS = (1, 20) if DRY else (1, 8, 32, 128, 256, 2048, 8192)
FORMS = {"int4": (4, 32, False), "int4 with minima": (4, 32, True), "int8": (8, 64, False)}
"""Quantized weights, as (bits, group, whether there are minima)."""
GROUPED_ROWS = (1, 20) if DRY else (1, 4, 16, 64, 512, 4096)
DECODES = ((2, 32),) if DRY else ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (1, 8192), (8, 8192))
"""(number of sequences, positions of each)."""
PREFILLS = (32,) if DRY else (512, 2048, 8192)
TOKENS = (1, 3) if DRY else (1, 256, 8192)
BLOCK_SIZE = 16


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def entry(
    ceilings: Ceilings, what: str, size: str, nbytes: int, flops: int, ours: float, torchs: float | None = None
) -> dict[str, Any]:
    return {
        "kernel": what,
        "size": size,
        "us": ours * 1e6,
        "GB/s": nbytes / ours / 1e9,
        "TFLOP/s": flops / ours / 1e12,
        "of bound": ceilings.bound(nbytes, flops) / ours,
        "vs torch": None if torchs is None else torchs / ours,
    }


def measure(config: dict[str, Any], ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Measure all kernels; one line per kernel and size."""
    costs, kernels = Costs(config), TritonKernels(DEVICE)
    yield from _linear(costs, kernels, ceilings)
    yield from _grouped(costs, kernels, ceilings)
    yield from _attention(costs, kernels, ceilings)
    yield from _elementwise(costs, kernels, ceilings)
    yield from _sampling(costs, kernels, ceilings)


def _linear(costs: Costs, kernels: TritonKernels, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    shapes = costs.linear_shapes | {"head": (costs.vocab_size, costs.hidden_size)}
    for name, (n, k) in shapes.items():
        for rows in ROWS:
            if name == "head" and rows > 256:
                continue
            nbytes = 2 * (n * k + rows * (n + k))

            def ours(rows: int = rows, n: int = n, k: int = k) -> Run:
                x, packed = randn(rows, k), kernels.pack(randn(n, k))
                return lambda: kernels.linear(x, packed)

            def torchs(rows: int = rows, n: int = n, k: int = k) -> Run:
                x, weight = randn(rows, k), randn(n, k)
                return lambda: linear(x, weight)

            own, other = seconds(ours, nbytes), seconds(torchs, nbytes)
            yield entry(ceilings, f"linear {name}", f"{rows}x{n}x{k}", nbytes, 2 * rows * n * k, own, other)


def _grouped(costs: Costs, kernels: TritonKernels, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Products with quantized weights, next to torch's own with plain ones."""
    shapes: dict[str, tuple[int, int]] = costs.linear_shapes
    for (name, (n, k)), (form, (bits, group, minimum)), rows in itertools.product(
        shapes.items(), FORMS.items(), GROUPED_ROWS
    ):
        group = math.gcd(k, group)
        nbytes = n * k * bits // 8 + n * k // group * (4 if minimum else 2) + 2 * rows * (n + k)

        def ours(
            rows: int = rows, n: int = n, k: int = k, bits: Any = bits, group: int = group, minimum: bool = minimum
        ) -> Run:
            codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device=DEVICE)
            scales = randn(n, k // group).abs() / 2**bits
            weight = GroupedWeight(codes, scales, bits, -scales if minimum else None, dtype=torch.bfloat16)
            x, packed = randn(rows, k), kernels.pack(weight)
            return lambda: kernels.linear(x, packed)

        def torchs(rows: int = rows, n: int = n, k: int = k) -> Run:
            x, weight = randn(rows, k), randn(n, k)
            return lambda: linear(x, weight)

        own, other = seconds(ours, nbytes), seconds(torchs, 2 * (n * k + rows * (n + k)))
        yield entry(ceilings, f"{form} {name}", f"{rows}x{n}x{k}", nbytes, 2 * rows * n * k, own, other)


def ragged(lens: list[int], starts: list[int], blocks: int) -> Ragged:
    """A batch of sequences whose blocks are in random order."""
    per_sequence = blocks // len(lens)
    offsets = torch.tensor([0, *lens]).cumsum(0)
    table = torch.randperm(blocks)[: per_sequence * len(lens)].view(len(lens), per_sequence)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    flat = table[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Ragged(
        starts=tuple(starts),
        lens=tuple(lens),
        offsets=tuple(offsets.tolist()),
        starts_B=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        offsets_B1=offsets.int().to(DEVICE),
        block_table_BP=table.int().to(DEVICE),
        flat_T=flat.to(DEVICE),
    )


def _attention(costs: Costs, kernels: TritonKernels, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    H, K, E = costs.num_attention_heads, costs.num_key_value_heads, costs.head_dim
    for window in dict.fromkeys(costs.windows()):
        spec = AttentionSpec(H, K, E, E**-0.5, window)
        title = "attention" if window is None else f"attention window {window}"
        for batch, context in DECODES:
            seen = min(context, window or context)
            nbytes = 2 * batch * (2 * seen * K * E + 2 * H * E)

            def ours(batch: int = batch, context: int = context, spec: AttentionSpec = spec) -> Run:
                blocks = batch * -(-context // BLOCK_SIZE)
                k, v = (randn(blocks, BLOCK_SIZE, K, E) for _ in range(2))
                where, q = ragged([1] * batch, [context - 1] * batch, blocks), randn(batch, H, E)
                return lambda: kernels.extend_attention(q, k, v, where, spec)

            def torchs(batch: int = batch, seen: int = seen) -> Run:
                q, k, v = randn(batch, H, 1, E), randn(batch, K, seen, E), randn(batch, K, seen, E)
                return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)

            size, flops = f"{batch} at {context}", 4 * batch * seen * H * E
            yield entry(
                ceilings, f"{title} decode", size, nbytes, flops, seconds(ours, nbytes), seconds(torchs, nbytes)
            )
        for length in PREFILLS:
            seen = sum(min(i + 1, window or i + 1) for i in range(length))
            nbytes = 2 * length * (2 * K * E + 2 * H * E)

            def prefill(length: int = length, spec: AttentionSpec = spec) -> Run:
                blocks = length // BLOCK_SIZE
                k, v = (randn(blocks, BLOCK_SIZE, K, E) for _ in range(2))
                where, q = ragged([length], [0], blocks), randn(length, H, E)
                return lambda: kernels.extend_attention(q, k, v, where, spec)

            def flash(length: int = length) -> Run:
                q, k, v = randn(1, H, length, E), randn(1, K, length, E), randn(1, K, length, E)
                return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            own, other = seconds(prefill, nbytes), seconds(flash, nbytes) if window is None else None
            yield entry(ceilings, f"{title} prefill", str(length), nbytes, 4 * seen * H * E, own, other)


def _elementwise(costs: Costs, kernels: TritonKernels, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    D, width = costs.hidden_size, costs.intermediate_size
    H, K, E = costs.num_attention_heads, costs.num_key_value_heads, costs.head_dim
    for tokens in TOKENS:

        def norm(tokens: int = tokens) -> Run:
            x, residual, weight = randn(tokens, D), randn(tokens, D), randn(D)
            return lambda: kernels.add_rms_norm(x, residual, weight, 1e-6)

        def rope(tokens: int = tokens) -> Run:
            q, k, v = (randn(tokens, heads, E) for heads in (H, K, K))
            angles = randn(tokens, E // 2, dtype=torch.float32)
            rotary = Rotary(angles, angles)
            caches = [randn(tokens // BLOCK_SIZE + 1, BLOCK_SIZE, K, E) for _ in range(2)]
            flat = torch.randperm(tokens, device=DEVICE)
            return lambda: kernels.rope_store_kv(q, k, v, rotary, caches[0], caches[1], flat)

        def gated(tokens: int = tokens) -> Run:
            gate, up = randn(tokens, 2 * width).chunk(2, dim=-1)
            return lambda: kernels.gated(gate, up, "silu")

        sizes = {
            "add_rms_norm": (norm, 2 * (4 * tokens * D + D)),
            "rope_store_kv": (rope, 2 * tokens * (2 * H + 4 * K) * E + 4 * tokens * E),
            "gated": (gated, 2 * tokens * 3 * width),
        }
        for name, (make, nbytes) in sizes.items():
            yield entry(ceilings, name, f"{tokens} tokens", nbytes, 0, seconds(make, nbytes))


def _sampling(costs: Costs, kernels: TritonKernels, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    V = costs.vocab_size
    for rows in (2,) if DRY else (1, 32, 256):
        for name, temperature, top_k, top_p in (("greedy", 0, 0, 1), ("drawn", 1, 0, 1), ("top-k, top-p", 1, 50, 0.9)):

            def make(
                rows: int = rows, temperature: float = temperature, top_k: int = top_k, top_p: float = top_p
            ) -> Run:
                def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
                    return torch.full((rows,), value, dtype=dtype, device=DEVICE)

                draws = Draws(
                    full(temperature),
                    full(top_k, torch.int64),
                    full(top_p),
                    full(0),
                    torch.rand(rows, dtype=torch.float64, device=DEVICE),
                    greedy=temperature == 0,
                    top_k=top_k > 0,
                    top_p=top_p < 1,
                )
                logits = randn(rows, V)
                return lambda: kernels.sample(logits, draws)

            nbytes = 2 * rows * V
            yield entry(ceilings, f"sample {name}", f"{rows}x{V}", nbytes, 0, seconds(make, nbytes))
