"""Scenes: sequences in blocks, to which attention is applied; the exact result, one query at a time in float64; and
what a wrong result says about what a query sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from infer.cache import ExtendView, KVStorage
from infer.contracts.attention import AttentionSpec, KVDtype, QuantizedKV
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import KernelsProtocol
from infer.kernels.reference import ReferenceKernels, quantize
from infer_testing.numbers import differing, random_tensor
from infer_testing.suite import Violation

LOUD = 1000.0
"""What is added to a value to find out who sees it."""


def attention_spec(
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
        self.k, self.v, self.q = [], [], []
        for b, (start, length) in enumerate(self.extends):
            seed = 10 * (self.seed + b)
            shape = (start + length, spec.num_kv_heads, spec.head_size)
            self.k.append(random_tensor(*shape, dtype=self.dtype, seed=seed))
            self.v.append(random_tensor(*shape, dtype=self.dtype, seed=seed + 1))
            q = random_tensor(start + length, spec.num_heads, spec.head_size, dtype=self.dtype, seed=seed + 2)
            self.q.append(q[start:])
        self.forget()

    def forget(self) -> None:
        """Make everything that is stored NaN."""
        for cache in (self.storage.k[0], self.storage.v[0]):
            (cache.scales if isinstance(cache, QuantizedKV) else cache).fill_(torch.nan)

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
        where = torch.device(self.device)
        for b, (start, _) in enumerate(self.extends):
            if start:
                before = self.extend([b], [0], [start])
                k, v = self.storage.k[0], self.storage.v[0]
                old = (self.k[b][:start].to(where), self.v[b][:start].to(where))
                self.kernels.store_kv(*old, k, v, before.ragged.flat_T)
        k, v = (torch.cat([x[b][start:] for b, (start, _) in enumerate(self.extends)]) for x in (self.k, self.v))
        return self.view().attend(0, torch.cat(self.q).to(where), k.to(where), v.to(where))

    def kept(self, x_TKE: Tensor) -> Tensor:
        """What K or V is once it has been stored."""
        if self.kv_dtype == "auto":
            return x_TKE
        codes, scales = quantize(x_TKE)
        return codes.double() * scales[..., None].double()

    def queries(self) -> Iterator[tuple[int, int]]:
        """(sequence, index in its chunk) of each row."""
        yield from ((b, i) for b, (_, length) in enumerate(self.extends) for i in range(length))

    def attend64(self) -> Tensor:
        """Masked softmax attention in float64, one query at a time."""
        return torch.stack([self.query64(b, i) for b, i in self.queries()])

    def query64(self, b: int, i: int) -> Tensor:
        """One query's result, [H, E]."""
        spec, end = self.spec, self.extends[b][0] + i + 1
        group = spec.num_heads // spec.num_kv_heads
        first = 0 if spec.window is None else max(0, end - spec.window)
        k, v = (self.kept(x[b][first:end]).double().repeat_interleave(group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("he,she->hs", self.q[b][i].double(), k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if spec.sinks_H is not None:
            scores = torch.cat((scores, spec.sinks_H.cpu().double()[:, None]), dim=-1)
        return torch.einsum("hs,she->he", scores.softmax(-1)[:, : end - first], v)

    def check(self) -> None:
        """Raises Violation if the kernels' answer is not the exact one but for rounding. The text says what the first
        wrong query sees, and should not, or the reverse."""
        found, expected = self.attend(), self.attend64()
        if found.shape != expected.shape or found.dtype != self.dtype:
            raise Violation(
                f"extend_attention gives {list(found.shape)} of {found.dtype}, not {list(expected.shape)} "
                f"of {self.dtype}"
            )
        wrong_TH = differing(found, expected, self.dtype).any(-1)
        if wrong_TH.any():
            row, head = wrong_TH.nonzero()[0].tolist()
            b, i = list(self.queries())[row]
            raise Violation(f"query {i} of sequence {b} (position {self.extends[b][0] + i}) {self._why(row, head)}")

    def _why(self, row: int, head: int) -> str:
        spec, (b, i) = self.spec, list(self.queries())[row]
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        at = self.extends[b][0] + i
        first = 0 if spec.window is None else max(0, at - spec.window + 1)
        if not self._sees(row, head, b, at):
            return "does not see its own key"
        for position in range(at + 1, min(at + 3, len(self.k[b]))):
            if self._sees(row, head, b, position):
                return f"sees the key of position {position}, which comes after it"
        if first and self._sees(row, head, b, first - 1):
            return f"sees position {first - 1}, which is behind its window of {spec.window}"
        if not self._sees(row, head, b, first):
            which = (
                "the first position" if spec.window is None else f"the first position of its window of {spec.window}"
            )
            return f"does not see position {first}, {which}"
        for position in sorted({*range(first, at, max(1, (at - first) // 16))}):
            if not self._sees(row, head, b, position):
                return f"does not see position {position}"
        for other in range(len(self.extends)):
            if other != b and self._sees(row, head, other, None):
                return f"sees keys of sequence {other}"
        for other in range(spec.num_kv_heads):
            if self._sees(row, head, b, at, other) != (other == kv_head):
                return f"reads K/V head {other} with query head {head}, which belongs to K/V head {kv_head}"
        found = self.attend()[row].cpu().double()
        for name, simpler in (("soft_cap", replace(spec, soft_cap=None)), ("sinks_H", replace(spec, sinks_H=None))):
            without = replace(self, spec=simpler)
            without.q, without.k, without.v = self.q, self.k, self.v
            given = simpler != spec or (name == "sinks_H" and spec.sinks_H is not None)
            if given and not differing(found, without.query64(b, i), self.dtype).any():
                return f"gets a result as if {name} were not set"
        off = (found - self.query64(b, i)).abs().amax()
        return f"sees the right keys, but its result is off by {off:.3g} in head {head}: scale, soft cap or softmax"

    def _sees(self, row: int, head: int, b: int, position: int | None, kv_head: int | None = None) -> bool:
        """Whether a row's result follows a change of V at a position of a sequence, or at all of them."""
        at = slice(None) if position is None else slice(position, position + 1)
        heads = slice(None) if kv_head is None else slice(kv_head, kv_head + 1)
        found, before = self.attend()[row, head], self.v[b].clone()
        self.v[b][at, heads] += LOUD
        after = self.attend()[row, head]
        self.v[b] = before
        return not torch.equal(found, after)
