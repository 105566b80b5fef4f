"""Multi-head latent attention (DeepSeek-AI, 2024): all heads share one latent vector per position, which is cached in
place of their K and V. Shapes: T tokens, N wanted rows, D hidden size, H heads; R, P, C and V as in ``LatentSizes``,
E = R + P."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_layers.blocks import select
from infer_layers.linear import Linear, RMSNorm
from infer_layers.rotary import rotary_order
from infer_layers.table import Weights

NORM_EPS = 1e-6
"""Of the norms of latents, whatever config.json gives for others."""


@dataclass(frozen=True)
class LatentSizes:
    """How many values each vector has."""

    latent: int
    """R, of the vector that K and V of all heads are made of."""
    rotated: int
    """P, of the part of K that is rotated, which all heads share, and of a head's part of q that it meets."""
    plain: int
    """C, of a head's part of q that is not rotated."""
    value: int
    """V, of what a head yields."""
    query: int | None
    """Of the latent vector that q is made of; None if q is made of the hidden state."""

    def spec(self, heads: int, scale: float) -> AttentionSpec:
        """All heads read the same K, which is the rotated part and the latent vector. V is the latent vector, and so
        is read from K."""
        return AttentionSpec(heads, 1, self.latent + self.rotated, scale, v_is_k=True)


class LatentAttention:
    """The projections to latent vectors and their norms, q, attention over the cache, and the output projection.

    A head's K is a product of the latent vector, U l, so that a score is q U l: what is multiplied by q once is U, and
    not each position's l. Likewise, a head's values are summed as latents before they are multiplied once. So the cache
    has one head of R + P values, and K and V of the heads are never there.

    ``layer`` is the layer's index, ``size`` the hidden size. With ``bias``, the projections of the hidden state and the
    output have one. With ``interleaved``, neighbors of the rotated part are rotated against each other; otherwise its
    halves. Raises CheckpointError if R or P is odd."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        spec: AttentionSpec,
        sizes: LatentSizes,
        *,
        bias: bool = False,
        interleaved: bool = True,
    ) -> None:
        H, R, P, C, V = spec.num_heads, sizes.latent, sizes.rotated, sizes.plain, sizes.value
        if R % 2 or P % 2:
            raise CheckpointError(
                f"config.json: kv_lora_rank is {R} and qk_rope_head_dim {P}; infer knows latent attention with even "
                "ones."
            )
        self.layer, self.spec, self._sizes = layer, spec, sizes
        self._kernels = weights.context.kernels
        rotated_P = torch.arange(P) if (order := rotary_order(P, P, interleaved)) is None else order
        heads_H1 = torch.arange(0, H * (C + P), C + P)[:, None]
        q_order = torch.cat([(heads_H1 + torch.arange(C)).flatten(), (heads_H1 + C + rotated_P).flatten()])
        own_order = torch.cat((torch.arange(R), R + rotated_P))
        first, width = ("q_proj", H * (C + P)) if sizes.query is None else ("q_a_proj", sizes.query)
        before = q_order if sizes.query is None else torch.arange(sizes.query)
        names = [f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"]
        biases = [bias and sizes.query is not None, bias]
        self._down = Linear(weights, names, size, [width, R + P], biases, order=torch.cat((before, width + own_order)))
        self._query: tuple[RMSNorm, Linear] | None = None
        if sizes.query is not None:
            norm = RMSNorm(weights, f"{name}.q_a_layernorm", sizes.query, NORM_EPS)
            self._query = norm, Linear(weights, f"{name}.q_b_proj", sizes.query, H * (C + P), order=q_order)
        self._norm = RMSNorm(weights, f"{name}.kv_a_layernorm", R, NORM_EPS)
        self._keys: list[object] = []
        """Per head, the product that makes a query of latents of one of C values."""
        self._values: list[object] = []
        """Per head, the product that makes its values of a sum of the cache's."""
        up = f"{name}.kv_b_proj.weight"
        weights.expect(up, (H * (C + V), R), self._take, packed=True)
        weights.spared.add(up)  # which is multiplied in two ways
        self._out = Linear(weights, f"{name}.o_proj", H * V, size, bias)

    def _take(self, weight: Weight) -> None:
        plain, s = weight.dequantize() if isinstance(weight, GroupedWeight) else weight, self._sizes
        for head_NR in plain.view(self.spec.num_heads, -1, s.latent):
            key_CR, value_VR = head_NR[: s.plain], head_NR[s.plain :]
            self._keys.append(self._kernels.pack(key_CR.T.contiguous()))
            # What attention yields where K is rotated is multiplied by zeros.
            value_VE = value_VR.new_zeros(s.value, s.rotated + s.latent)
            for half_VE, half_VR in zip(value_VE.chunk(2, dim=-1), value_VR.chunk(2, dim=-1), strict=True):
                half_VE[:, s.rotated // 2 :] = half_VR
            self._values.append(self._kernels.pack(value_VE))

    def _placed(self, rotated: Tensor, latent: Tensor) -> Tensor:
        """Vectors of E values, in the order in which ``attend`` rotates the halves of both parts against each other."""
        (left, right), (low, high) = rotated.chunk(2, dim=-1), latent.chunk(2, dim=-1)
        return torch.cat((left, low, right, high), dim=-1)

    def _each(self, x_THK: Tensor, packed: list[object]) -> Tensor:
        """Each head's product, [T, H, N]."""
        x_HTK = x_THK.transpose(0, 1).contiguous()
        return torch.stack([self._kernels.linear(x_TK, each) for x_TK, each in zip(x_HTK, packed, strict=True)], dim=1)

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given."""
        s, T, H = self._sizes, len(x_TD), self.spec.num_heads
        q, own = torch.split_with_sizes(self._down(x_TD), self._down.sizes, dim=-1)
        if self._query is not None:
            norm, product = self._query
            q = product(norm(q))
        plain, rotated = torch.split_with_sizes(q, [H * s.plain, H * s.rotated], dim=-1)
        latent_TR, rotated_TP = torch.split_with_sizes(own, [s.latent, s.rotated], dim=-1)
        q_THE = self._placed(rotated.view(T, H, -1), self._each(plain.view(T, H, -1), self._keys))
        k_T1E = self._placed(rotated_TP, self._norm(latent_TR))[:, None]
        out_THE = cache.attend(self.layer, q_THE, k_T1E, k_T1E, rotary)
        return self._out(self._each(select(out_THE, rows_N), self._values).flatten(1))
