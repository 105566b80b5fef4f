"""The start-up check of meaning: kernels compute what torch computes on the same device, mostly in float64.

It finds kernels that are wrong in the same way whatever the batch, which comparing them with themselves cannot: those
that a compiler has spoiled, say. Each kernel that the model has called is compared once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from infer.cache import KVStorage
from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Expert, KernelsProtocol
from infer.contracts.params import SamplingParams
from infer.engine.sampler import make_draws
from infer.kernels.reference import ReferenceKernels

BOUND = 0.03
"""The norm of the error, as a part of the result's, from which on a kernel is wrong. Rounding to bfloat16, and
activations to int8, takes a third of it at most."""
COLUMNS = 64
"""How many of a product's columns are compared."""
REFERENCE = ReferenceKernels()


class Called(Protocol):
    """A call that the model has made of a kernel that works row by row."""

    @property
    def name(self) -> str: ...
    @property
    def rest(self) -> tuple[Any, ...]: ...


def wrong_calls(kernels: KernelsProtocol, calls: Iterable[tuple[Called, tuple[Tensor, ...]]]) -> Iterator[str]:
    """A phrase for each call whose result is not torch's, for the rows that stand beside it."""
    for call, rows in calls:
        compare: Callable[..., tuple[Tensor, Tensor] | None] = COMPARED.get(call.name, _as_reference)
        pair = compare(kernels, call.name, rows, call.rest)
        if pair is not None and (error := _error(*pair)) > BOUND:
            yield f"{type(kernels).__name__}.{call} is wrong: it differs from torch's by {error:.2g} of its norm"


def _error(found: Tensor, expected: Tensor) -> float:
    """0 if torch's result is not finite either: that is the model's doing."""
    error, size = (float(torch.linalg.norm(x.double())) for x in (found.double() - expected.double(), expected))
    if error == 0 or not math.isfinite(size):
        return 0.0
    return error / size if math.isfinite(error) and size > 0 else math.inf


Pair = tuple[Tensor, Tensor]
"""What was found, and what was expected."""


def _as_reference(kernels: KernelsProtocol, name: str, rows: tuple[Tensor, ...], rest: tuple[Any, ...]) -> Pair:
    found, expected = (getattr(each, name)(*rows, *rest) for each in (kernels, REFERENCE))
    if name == "route":  # of equal logits, any may come first
        return found[1], expected[1]
    if isinstance(found, tuple):
        found, expected = torch.cat(found, -1), torch.cat(expected, -1)
    return found, expected


def _linear(kernels: KernelsProtocol, name: str, rows: tuple[Tensor, ...], rest: tuple[Any, ...]) -> Pair:
    (x,), packed = rows, rest[0]
    found = kernels.linear(x, packed)
    some = torch.linspace(0, found.shape[1] - 1, min(COLUMNS, found.shape[1]), device=x.device).long()
    bias = kernels.linear(torch.zeros_like(x[:1]), packed)
    expected = x.double() @ kernels.embedding(some, packed).double().T + bias[:, some].double()
    return found[:, some], expected


def _weights(x: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(x)


def _gated_linear(kernels: KernelsProtocol, name: str, rows: tuple[Tensor, ...], rest: tuple[Any, ...]) -> Pair:
    """With a weight of its own: no kernel tells what it has made of the model's."""
    (x,), (_, activation) = rows, rest
    weight = _weights(x, 2 * COLUMNS, x.shape[1])
    found = kernels.gated_linear(x, kernels.pack_gated(weight), activation)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    return found, REFERENCE.gated(gate, up, activation)


def _gated_experts(kernels: KernelsProtocol, name: str, rows: tuple[Tensor, ...], rest: tuple[Any, ...]) -> Pair:
    """With two experts of its own, one of them for every third token."""
    x, (_, activation) = rows[0], rest
    wide = COLUMNS if activation == "relu2" else 2 * COLUMNS
    experts = [Expert(sign * _weights(x, wide, x.shape[1]), _weights(x, x.shape[1], COLUMNS)) for sign in (1, -1)]
    chosen = (torch.arange(len(x), device=x.device) % 3 == 0).int()[:, None]
    shares = torch.full((len(x), 1), 0.5, device=x.device)
    found = kernels.gated_experts(x, chosen, shares, kernels.pack_experts(experts, len(experts)), activation)

    def result(expert: Any) -> Tensor:
        inner = x.double() @ expert.gate_up_NK.double().T
        if activation == "relu2":
            hidden = inner.relu().square()
        else:
            gate, up = inner.chunk(2, dim=-1)
            hidden = REFERENCE.gated(gate, up, activation)
        out: Tensor = hidden.to(x.dtype).double() @ expert.down_NK.double().T
        return out

    results = list(map(result, experts))
    return found, 0.5 * torch.where(chosen.bool(), results[1], results[0])


COMPARED: dict[str, Callable[..., Pair | None]] = {
    "linear": _linear,
    "gated_linear": _gated_linear,
    "gated_experts": _gated_experts,
    "embedding": lambda *_: None,  # products are compared by way of it
}


def wrong_attention(
    kernels: KernelsProtocol, layer: int, spec: AttentionSpec, q_THE: Tensor, k_TKE: Tensor, rotary: Rotary | None
) -> Iterator[str]:
    """A phrase if attention to one sequence, of these queries and keys, and of the keys in reverse as values unless V
    is K, is not torch's, rotation and store included."""
    T, block = len(q_THE), 16
    v_TKE, blocks = k_TKE.flip(0).contiguous(), -(-T // block)
    storage = KVStorage(CacheContext([spec], 1, T, q_THE.dtype, q_THE.device, kernels), blocks, block)
    view = storage.view(np.arange(blocks, dtype=np.int32)[None], [0], [T])
    found = view.attend(0, q_THE, k_TKE, v_TKE, rotary)
    q, k = (q_THE, k_TKE) if rotary is None else REFERENCE.rope(q_THE, k_TKE, rotary)
    expected = _attend64(spec, q.double(), k.double(), (k if spec.v_is_k else v_TKE).double())
    if (error := _error(found, expected)) > BOUND:
        name = f"{type(kernels).__name__}'s attention of layer {layer}"
        yield f"{name} is wrong: it differs from torch's by {error:.2g} of its norm"


def _attend64(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhe,she->hqs", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    at = torch.arange(len(q), device=q.device)
    distance = at[:, None] - at
    scores = scores.masked_fill((distance < 0) | (distance >= (spec.window or len(q))), -torch.inf)
    if spec.sinks_H is not None:
        sinks = spec.sinks_H.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.einsum("hqs,she->qhe", scores.softmax(-1)[..., : len(q)], v)


def wrong_draws(kernels: KernelsProtocol, logits_NV: Tensor) -> Iterator[str]:
    """A phrase if the likeliest tokens are not drawn without a temperature, and with one from the likeliest alone."""
    top = logits_NV.double().amax(-1)
    for temperature in (0.0, 1.0):
        top_k = int(temperature > 0)
        N, params = len(logits_NV), SamplingParams(temperature=temperature, top_k=top_k)
        draws = make_draws([params] * N, logits_NV.device, [0.7] * N)
        tokens = kernels.sample(logits_NV, draws).long()
        if not torch.equal(logits_NV.double().gather(1, tokens.clamp(min=0)[:, None])[:, 0], top):
            yield f"{type(kernels).__name__}.sample is wrong: it draws other tokens than the likeliest"
            return
