"""The mixers of recurrent layers whose state forgets and corrects: gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.states import DeltaRule, State, StateSpec
from infer.errors import CheckpointError
from infer.weight import exponential
from infer_layers.blocks import select
from infer_layers.config import LARGEST
from infer_layers.linear import Linear, RMSNorm
from infer_layers.mamba import CausalConv, state_of
from infer_layers.table import Weights


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a gated delta net. Raises CheckpointError if the key heads do not divide the value heads, or a state
    has no values, or more than anything of a model may have."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    width: int
    """Of the convolution."""
    channel_decay: bool = False
    """As ``DeltaRule``'s."""
    max_beta: float = 1.0
    """As ``DeltaRule``'s."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads, {self.num_value_heads}, is not a multiple of "
                f"linear_num_key_heads, {self.num_key_heads}."
            )
        if not 0 < (values := self.num_value_heads * self.key_size * self.value_size) <= LARGEST:
            raise CheckpointError(
                f"config.json: the state of a gated delta net has {values} values, {self.num_value_heads} heads of "
                f"{self.key_size} times {self.value_size}; it has to have from 1 to {LARGEST}."
            )

    def rule(self, device: torch.device) -> DeltaRule:
        """A delta rule of these sizes, whose tensors have no values yet."""
        H, each = self.num_value_heads, self.key_size if self.channel_decay else 1
        sizes = self.num_key_heads, H, self.key_size, self.value_size
        rate_H, dt_bias_A = (torch.zeros(n, device=device) for n in (H, H * each))
        return DeltaRule(*sizes, rate_H, dt_bias_A, self.channel_decay, self.max_beta)

    def state(self, dtype: torch.dtype) -> StateSpec:
        """What a layer keeps, in a model of that dtype: columns of the convolution, and the recurrent state."""
        rule = self.rule(torch.device("meta"))
        return StateSpec(((self.width - 1, rule.channels), rule.shape), (dtype, torch.float32))


class _DeltaMixer:
    """What stands around a gated delta rule (Yang et al., 2025) in every mixer: q, K and V pass a causal convolution
    with SiLU, and what the rule makes of them has a norm for each head, is gated and projected.

    ``layer`` is the layer's index among those with a state, and ``size`` the hidden size. ``rule`` is what the names of
    the rule's own tensors begin with, and ``out`` the name of the last product."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        sizes: DeltaSizes,
        *,
        rule: str,
        out: str,
    ) -> None:
        self.layer = layer
        self._kernels = weights.context.kernels
        own = self._rule = sizes.rule(weights.context.device)
        self._conv = CausalConv(weights, f"{name}.conv1d", own.channels, sizes.width, bias=False, silu=True)
        H = own.num_value_heads
        weights.expect(f"{rule}.A_log", (H,), lambda log_H: own.rate_H.copy_(exponential(log_H)), torch.float32)
        weights.expect(f"{rule}.dt_bias", tuple(own.dt_bias_A.shape), own.dt_bias_A.copy_, torch.float32)
        self._out = Linear(weights, f"{name}.{out}", H * own.value_size, size)

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given. Nothing is rotated."""
        (columns, state), rows = state_of(cache, self.layer)
        qkv_TC, gate_TG, a_TA, b_TH = self._inputs(x_TD)
        qkv_TC = self._conv(qkv_TC, State((columns,), rows))
        y_THV = self._kernels.gated_delta_rule(qkv_TC, a_TA.contiguous(), b_TH.contiguous(), self._rule, state, rows)
        return self._out(self._gated(select(y_THV.flatten(1), rows_N), select(gate_TG, rows_N)))

    def _inputs(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a token: q, K and V; what the gate is made of; and those of the rule's decays and strengths."""
        raise NotImplementedError

    def _gated(self, y_ND: Tensor, gate_NG: Tensor) -> Tensor:
        """The rule's results, normalized and gated."""
        raise NotImplementedError


class GatedDeltaNet(_DeltaMixer):
    """A gated delta net (Yang et al., 2025). One product yields q, K, V and a gate with SiLU, another the strengths and
    decays of the rule. The two small matrices are spared from ``model.quantization``.

    ``layer`` is the layer's index among those with a state, and ``size`` the hidden size. ``qkvz``, ``ba``, ``norm``
    and ``out`` are the checkpoint's names: those of q, K, V and the gate, which may be four tensors, two or one; those
    of strengths and decays; of the norm; and of the last product. With ``interleaved``, there is one tensor for each
    product, in which the rows of a key head, and of its value heads, stand together.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        sizes: DeltaSizes,
        *,
        norm_eps: float,
        qkvz: Sequence[str] = ("in_proj_qkv", "in_proj_z"),
        ba: Sequence[str] = ("in_proj_b", "in_proj_a"),
        norm: str = "norm",
        out: str = "out_proj",
        interleaved: bool = False,
    ) -> None:
        H = sizes.num_value_heads
        super().__init__(weights, name, layer, size, sizes, rule=name, out=out)
        K, V = sizes.key_size, sizes.value_size
        keys = sizes.num_key_heads * K
        self._sizes = [self._rule.channels, H * V]
        orders: list[Tensor | None] = [None, None]
        if interleaved:
            each = H // sizes.num_key_heads
            orders = [_apart(sizes.num_key_heads, parts) for parts in ((K, K, each * V, each * V), (each, each))]
        parts = [keys, keys, H * V, H * V] if len(qkvz) == 4 else self._sizes
        self._qkvz = Linear(weights, [f"{name}.{part}" for part in qkvz], size, parts, order=orders[0])
        self._ba = Linear(weights, [f"{name}.{part}" for part in ba], size, [H, H], order=orders[1])
        weights.spared.update(f"{name}.{part}.weight" for part in ba)
        self._eps = norm_eps
        self._norm_weight_V: Tensor
        weights.expect(f"{name}.{norm}.weight", (V,), self._take_norm)

    def _take_norm(self, weight_V: Tensor) -> None:
        self._norm_weight_V = weight_V.clone()

    def _inputs(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv_TC, gate_TD = torch.split_with_sizes(self._qkvz(x_TD), self._sizes, dim=-1)
        b_TH, a_TH = self._ba(x_TD).chunk(2, dim=-1)
        return qkv_TC, gate_TD, a_TH, b_TH

    def _gated(self, y_ND: Tensor, gate_NG: Tensor) -> Tensor:
        return self._kernels.gated_rms_norm(
            y_ND, gate_NG, self._norm_weight_V, self._eps, self._rule.value_size, gate_first=False
        )


class KimiDelta(_DeltaMixer):
    """Kimi Delta Attention (Kimi Team, 2025): each row of a head's state decays by itself. Decays, and a gate by
    sigmoids, are made of latent vectors, which the product that yields q, K and V and the one that yields strengths
    yield, too. The matrices of decays and strengths are spared from ``model.quantization``.

    ``layer`` is the layer's index among those with a state, and ``size`` the hidden size; a latent vector has as many
    values as a head."""

    def __init__(
        self, weights: Weights, name: str, layer: int, size: int, sizes: DeltaSizes, *, norm_eps: float
    ) -> None:
        H, K, V, forget = sizes.num_value_heads, sizes.key_size, sizes.value_size, f"{name}.forget_gate"
        super().__init__(weights, name, layer, size, sizes, rule=forget, out="o_proj")
        keys = sizes.num_key_heads * K
        names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj", "g_a_proj")]
        self._qkvg = Linear(weights, names, size, [keys, keys, H * V, V])
        self._fb = Linear(weights, [f"{forget}.f_a_proj", f"{name}.b_proj"], size, [K, H])
        self._decays = Linear(weights, f"{forget}.f_b_proj", K, H * K)
        weights.spared.update(
            f"{part}.weight" for part in (f"{forget}.f_a_proj", f"{forget}.f_b_proj", f"{name}.b_proj")
        )
        self._gate = Linear(weights, f"{name}.g_b_proj", V, H * V)
        self._norm = RMSNorm(weights, f"{name}.o_norm", V, norm_eps)

    def _inputs(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, V = self._rule.channels, self._rule.value_size
        qkv_TC, gate_TV = torch.split_with_sizes(self._qkvg(x_TD), [channels, V], dim=-1)
        forget_TK, b_TH = torch.split_with_sizes(self._fb(x_TD), self._fb.sizes, dim=-1)
        return qkv_TC, gate_TV.contiguous(), self._decays(forget_TK.contiguous()), b_TH

    def _gated(self, y_ND: Tensor, gate_NG: Tensor) -> Tensor:
        normal_ND = self._norm(y_ND.view(-1, self._rule.value_size)).view(y_ND.shape)
        return self._kernels.gated(self._gate(gate_NG), normal_ND, "sigmoid")


def _apart(groups: int, parts: tuple[int, ...]) -> Tensor:
    """The order of rows in which each part of all groups comes before the next part. A checkpoint has so many groups,
    each with all its parts."""
    rows = torch.arange(groups * sum(parts)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split_with_sizes(parts, dim=1)])
