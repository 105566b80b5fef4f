"""The blocks of a decoder layer: attention and the gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from infer.contracts.attention import AttentionSpec, HeadNorms, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.kernels import Activation, GateActivation
from infer.errors import CheckpointError
from infer_layers.linear import Linear, RMSNorm
from infer_layers.rotary import RopeParameters, ScaledRotary, rotary_order
from infer_layers.table import Weights


class GatedMLP:
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020). An MLP without a gate is two ``Linear`` and the activation.

    ``gate_up`` are the checkpoint's names of the gate and up projections, or the single name of the tensor that holds
    both, gate first.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        size: int,
        intermediate: int,
        activation: Activation,
        bias: bool = False,
        *,
        gate_up: Sequence[str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        names = [f"{name}.{part}" for part in gate_up]
        self._gate_up = Linear(weights, names, size, [intermediate] * 2, bias, activation)
        self._down = Linear(weights, f"{name}.{down}", intermediate, size, bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._down(self._gate_up(x_TD))


class Gate(NamedTuple):
    """What multiplies the results of attention: an activation of a projection of x, one value for each head or for each
    of its values."""

    name: str
    """The checkpoint's name of the projection."""
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    each: bool = False
    """Whether each of a head's values has its own."""


class Attention:
    """The q, K and V projections, optional norms of q and K, rotary embedding (unless ``rope`` is None), attention over
    the cache, and the output projection.

    ``layer`` is the layer's index, and ``size`` the hidden size; x may have another, ``in_size``. ``biases`` says which
    projections have a bias, by letters of "qkvo". ``qkv`` are the checkpoint's names of q, k and v within ``name``, or
    the single name of the tensor that holds all three, stacked by rows; ``out`` is that of the output projection. q and
    K have RMS norms if ``qk_norm_eps`` is given: with ``qk_norm_whole``, one norm spans all heads of q, and another
    those of K; otherwise each head is normalized by itself, and all of them by one weight. With ``interleaved``, a
    head's neighbors are rotated against each other; otherwise its halves. If the spec has sinks, the checkpoint's
    tensor ``sinks`` fills them. V's heads have an RMS norm without a weight if ``v_norm_eps`` is given.

    If ``qkv`` names q and k only, V is what K is before its norm. If ``shared``, ``qkv`` and ``qk_norms`` name q only,
    ``layer`` is the layer whose K and V are read, and x has the wanted rows only.

    If ``gated``, a head's rows of q are followed by those of its gate, and the sigmoid of that multiplies what the head
    yields. A ``gate`` is a projection of its own.

    Raises CheckpointError if the numbers of heads do not fit each other or the head size is odd.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        spec: AttentionSpec,
        rope: RopeParameters | None,
        *,
        biases: str = "",
        qk_norm_eps: float | None = None,
        qk_norm_unit_offset: bool = False,
        qk_norm_whole: bool = False,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "o_proj",
        qk_norms: Sequence[str] = ("q_norm", "k_norm"),
        interleaved: bool = False,
        v_norm_eps: float | None = None,
        shared: bool = False,
        gated: bool = False,
        gate: Gate | None = None,
        in_size: int | None = None,
    ) -> None:
        H, K, E = spec.num_heads, spec.num_kv_heads, spec.head_size
        if H % K:
            raise CheckpointError(
                f"config.json: num_attention_heads, {H}, is not a multiple of num_key_value_heads, {K}."
            )
        if E % 2:
            raise CheckpointError(f"config.json: head_dim is {E}; rotary embeddings need an even one.")
        self.layer, self.spec, self.shared = layer, spec, shared
        self._kernels = weights.context.kernels
        order_E = None if rope is None else rotary_order(rope.rotated(E), E, interleaved)
        order_N = None
        width = H * E * (1 + gated)
        if order_E is not None or gated:
            plain_E = torch.arange(E)
            head_E = plain_E if order_E is None else order_E
            heads = [torch.arange(0, width, width // H)[:, None] + head_E]
            heads += [torch.arange(E, width, 2 * E)[:, None] + plain_E] if gated else []
            heads += [torch.arange(width, width + K * E, E)[:, None] + head_E]
            gates = 0 if gate is None else H * (E if gate.each else 1)
            order_N = torch.cat((*(each.flatten() for each in heads), torch.arange(K * E + gates) + width + K * E))
        names = [f"{name}.{part}" for part in qkv]
        parts = "q" if shared else "qk" if len(qkv) == 2 else "qkv"
        widths = {"q": width, "k": K * E, "v": K * E}
        rows, biased = [widths[part] for part in parts], [part in biases for part in parts]
        if gate is not None:
            assert not gated
            assert not shared
            names, biased = [*names, f"{name}.{gate.name}"], [*biased, False]
            rows = [*rows, H * (E if gate.each else 1)]
        self._qkv = Linear(weights, names, in_size or size, rows, biased, order=order_N)
        self._sizes = [H * E] * gated + [H * E, *self._qkv.sizes[1:]]
        self._gate = 0 if gated else None if gate is None else -1
        """Where the gates are behind q."""
        self._activation: GateActivation = gate.activation if gate else "sigmoid"
        self._v_norm: tuple[Tensor, float] | None = None
        if v_norm_eps is not None and not shared:
            ones_E = torch.ones(E, dtype=weights.context.dtype, device=weights.context.device)
            self._v_norm = ones_E, v_norm_eps
        self._out = Linear(weights, f"{name}.{out}", H * E, size, "o" in biases)
        if spec.sinks_H is not None:
            weights.expect(f"{name}.sinks", (H,), spec.sinks_H.copy_)
        self._head_norms: HeadNorms | None = None
        self._norms: list[RMSNorm] = []
        """Those that are computed here. Norms of heads that are rotated are a part of ``attend``."""
        self._whole = qk_norm_whole
        if qk_norm_eps is not None:
            spans = [(H * E, order_N), (K * E, order_N)] if qk_norm_whole else [(E, order_E)] * 2
            norms = [
                RMSNorm(weights, f"{name}.{part}", width, qk_norm_eps, qk_norm_unit_offset, order)
                for part, (width, order) in zip(qk_norms, spans[: len(qk_norms)], strict=True)
            ]
            if qk_norm_whole or rope is None:
                self._norms = norms
            else:
                weights.when_loaded(lambda: self._take(norms[0], norms[-1]))

    def _take(self, q: RMSNorm, k: RMSNorm) -> None:
        self._head_norms = HeadNorms(q.weight_D, k.weight_D, q.eps, q.unit_offset)

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given."""
        if self.shared:
            return self._reading(x_TD, rotary, cache, rows_N)
        T, E = len(x_TD), self.spec.head_size
        q, *others = torch.split_with_sizes(self._qkv(x_TD), self._sizes, dim=-1)
        gate = None if self._gate is None else others.pop(self._gate)
        k, *own = others
        v = own[0] if own else k
        if self._norms:
            shape = (T, -1) if self._whole else (T, -1, E)
            q, k = (norm(x.view(shape)) for norm, x in zip(self._norms, (q, k), strict=True))
        q_THE, k_TKE, v_TKE = q.view(T, -1, E), k.view(T, -1, E), v.view(T, -1, E)
        if isinstance(rotary, ScaledRotary):
            assert self._head_norms is None, "a norm that follows would take the scale back"
            q_THE, rotary = q_THE * rotary.scale_T11, Rotary(*rotary)
        if self._v_norm is not None:
            v_TKE = self._kernels.rms_norm(v_TKE, *self._v_norm)
        if rotary is not None and self._head_norms is not None:
            rotary = rotary._replace(norms=self._head_norms)
        out_THE = cache.attend(self.layer, q_THE, k_TKE, v_TKE, rotary)
        out_NHE = select(out_THE, rows_N)
        out_ND = out_NHE.flatten(1)
        if gate is not None:
            gate_ND = select(gate, rows_N)
            if gate_ND.shape != out_ND.shape:  # one for each head
                gate_ND = gate_ND[..., None].expand(out_NHE.shape).flatten(1)
            out_ND = self._kernels.gated(gate_ND, out_ND, self._activation)
        return self._out(out_ND)

    def _reading(self, x_ND: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None) -> Tensor:
        """[N, D], of the wanted rows. A view takes queries of all rows, so the others are zeros."""
        assert rotary is not None, "layers that share K and V are rotated"
        q_THE = self._qkv(x_ND).view(len(x_ND), self.spec.num_heads, self.spec.head_size)
        if rows_N is not None:
            q_THE = q_THE.new_zeros(len(rotary.cos), *q_THE.shape[1:]).index_copy_(0, rows_N, q_THE)
        rotary = rotary._replace(norms=self._head_norms)
        out_THE = cache.attend(self.layer, q_THE, None, None, rotary)
        return self._out(select(out_THE, rows_N).flatten(1))


def select(x: Tensor, rows_N: Tensor | None) -> Tensor:
    """The rows ``rows_N`` of x; all rows if it is None."""
    return x if rows_N is None else x.index_select(0, rows_N)
