"""Passes that are recorded and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.cache import KVStorage
from infer.contracts.attention import Rotary
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Routing
from infer.device import FixedTensor, same_bits
from infer_testing.attention import attention_spec
from infer_testing.kernels.experts import Mixture
from infer_testing.kernels.provider import Provider, check
from infer_testing.recurrent import Layer, conv, delta, space, state_rows
from infer_testing.suite import Skipped, Violation

SWAPPED = 8
"""How many sequences the recorded passes have."""


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
            "gated": lambda: k.gated(self.x, self.y, "silu"),
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
            if not same_bits(found, expected):
                row = int((found != expected).flatten(1).any(1).nonzero()[0])
                raise Violation(
                    f"a replay of {name} gives other bits than a call, first in row {row} of {stage.rows}: it has "
                    "fixed something that differs between passes, or left something out"
                )
    if len(reasons) == len(stage.calls()):
        raise Violation(f"there is a recorder, but nothing can be recorded: {'; '.join(reasons)}")
