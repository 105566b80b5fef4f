"""Sequences in blocks for tests of attention, and attention itself, computed one query at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.cache import ExtendView, KVStorage
from infer.kernels.reference import ReferenceKernels
from infer.protocols import AttentionSpec, CacheContext, KernelsProtocol, KVDtype, QuantisedKV


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for what one or two roundings to the result's type may do."""
    assert expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected.to(actual.dtype))


def quantised(x_TKE: Tensor) -> tuple[Any, Any]:
    """Codes [T, K, E] and scales [T, K] of finite values, in numpy."""
    x = x_TKE.float().numpy()
    top = np.abs(x).max(-1)
    scales = np.where(top < 2.0**-100, np.float32(0), top / np.float32(127))
    with np.errstate(all="ignore"):
        return np.where(scales[..., None] > 0, np.rint(x / scales[..., None]), 0).astype(np.int8), scales


@dataclass
class Scene:
    """Sequences whose chunks ``[start, start + length)`` attend to everything before. What no query may see is NaN."""

    spec: AttentionSpec
    extends: Sequence[tuple[int, int]]
    block_size: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    kernels: KernelsProtocol = field(default_factory=ReferenceKernels)
    device: str = "cpu"
    kv_dtype: KVDtype = "auto"

    def __post_init__(self) -> None:
        spec = self.spec
        blocks = [-(-(start + length) // self.block_size) for start, length in self.extends]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in blocks]
        where = torch.device(self.device)
        context = CacheContext([spec], len(blocks), 0, self.dtype, where, self.kernels, kv_dtype=self.kv_dtype)
        self.storage = KVStorage(context, sum(blocks) + 2, self.block_size)
        for cache in (self.storage.k[0], self.storage.v[0]):
            (cache.scales if isinstance(cache, QuantisedKV) else cache).fill_(torch.nan)
        self.k, self.v, self.q = [], [], []
        for b, (start, length) in enumerate(self.extends):
            seed = 10 * (self.seed + b)
            shape = (start + length, spec.num_kv_heads, spec.head_size)
            self.k.append(random(*shape, dtype=self.dtype, seed=seed))
            self.v.append(random(*shape, dtype=self.dtype, seed=seed + 1))
            q = random(start + length, spec.num_heads, spec.head_size, dtype=self.dtype, seed=seed + 2)
            self.q.append(q[start:])

    def view(self) -> ExtendView:
        starts, lens = zip(*self.extends, strict=True)
        return self.extend(range(len(self.extends)), starts, lens)

    def extend(self, sequences: Sequence[int], starts: Sequence[int], lens: Sequence[int]) -> ExtendView:
        table_BP = np.zeros((len(sequences), max(len(self.tables[b]) for b in sequences)), dtype=np.int32)
        for row, b in enumerate(sequences):
            table_BP[row, : len(self.tables[b])] = self.tables[b]
        return self.storage.view(table_BP, starts, lens)

    def attend(self) -> Tensor:
        """The kernels' answer, [T, H, E]."""
        for b, (start, _) in enumerate(self.extends):
            if start:
                before = self.extend([b], [0], [start])
                k, v = self.storage.k[0], self.storage.v[0]
                self.kernels.store_kv(self.k[b][:start], self.v[b][:start], k, v, before.ragged.flat_T)
        k, v = (torch.cat([x[b][start:] for b, (start, _) in enumerate(self.extends)]) for x in (self.k, self.v))
        return self.view().attend(0, torch.cat(self.q), k, v)

    def kept(self, x_TKE: Tensor) -> Tensor:
        """What K or V is once it has been stored."""
        if self.kv_dtype == "auto":
            return x_TKE
        codes, scales = quantised(x_TKE)
        return torch.from_numpy(codes * scales[..., None].astype(np.float64))

    def attend64(self) -> Tensor:
        """Masked softmax attention in float64, one query at a time."""
        spec, out = self.spec, []
        group = spec.num_heads // spec.num_kv_heads
        for b, (start, length) in enumerate(self.extends):
            k, v = (self.kept(x[b]).double().repeat_interleave(group, dim=1) for x in (self.k, self.v))
            for i in range(length):
                end = start + i + 1
                first = 0 if spec.window is None else max(0, end - spec.window)
                scores = torch.einsum("he,she->hs", self.q[b][i].double(), k[first:end]) * spec.scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                if spec.sinks_H is not None:
                    scores = torch.cat((scores, spec.sinks_H.cpu().double()[:, None]), dim=-1)
                out.append(torch.einsum("hs,she->he", scores.softmax(-1)[:, : end - first], v[first:end]))
        return torch.stack(out)


def spec(
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    window: int | None = None,
    cap: float | None = None,
    sinks: Sequence[float] = (),
) -> AttentionSpec:
    """With ``sinks``, one per head: they are repeated as often as there are heads."""
    sinks_H = torch.tensor([sinks[i % len(sinks)] for i in range(heads)]) if sinks else None
    return AttentionSpec(heads, kv_heads, size, size**-0.5, window, cap, sinks_H)
