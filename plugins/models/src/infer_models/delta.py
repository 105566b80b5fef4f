"""What families have in common in which a gated delta net stands in the place of some layers' attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt

from infer.contracts.attention import AttentionSpec
from infer.contracts.states import StateSpec
from infer.weight import Weight
from infer_layers import Decoder, DeltaSizes, GatedDeltaNet, RopeParameters, Weights, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


class DeltaConfig(LlamaConfig):
    """A config whose family says what sizes gated delta nets have. The class variables of these are arguments of
    ``GatedDeltaNet``."""

    per_layer: ClassVar[tuple[str, ...]] = ("layer_types",)
    delta_qkvz: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z")
    delta_ba: ClassVar[tuple[str, ...]] = ("in_proj_b", "in_proj_a")
    delta_norm: ClassVar[str] = "norm"
    delta_out: ClassVar[str] = "out_proj"
    delta_norm_eps: ClassVar[float | None] = None
    """None for ``rms_norm_eps``."""
    delta_interleaved: ClassVar[bool] = False

    full_attention_interval: PositiveInt = 4
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    """Without it, every ``full_attention_interval``-th layer has attention."""

    @property
    def delta(self) -> DeltaSizes:
        raise NotImplementedError

    def attends(self, index: int) -> bool:
        """Whether the layer has attention; if not, it has a gated delta net."""
        if self.layer_types is not None:
            return self.layer_types[index] == "full_attention"
        return (index + 1) % self.full_attention_interval == 0

    def attention(self) -> Sequence[AttentionSpec | None]:
        return [spec if self.attends(i) else None for i, spec in enumerate(super().attention())]

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        spec = self.delta.state(dtype)
        return [None if self.attends(i) else spec for i in range(self.num_hidden_layers)]


class DeltaLayer(LlamaLayer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if spec is not None:
            return super().mixes(w, name, index, c, spec, rope)
        return GatedDeltaNet(
            w,
            f"{name}.linear_attn",
            nth(c.states(w.context.dtype), index),
            c.hidden_size,
            c.delta,
            norm_eps=c.rms_norm_eps if c.delta_norm_eps is None else c.delta_norm_eps,
            qkvz=c.delta_qkvz,
            ba=c.delta_ba,
            norm=c.delta_norm,
            out=c.delta_out,
            interleaved=c.delta_interleaved,
        )


class DeltaModel(Decoder):
    """A Decoder whose checkpoints have other names than transformers' modules, and a convolution in three parts."""

    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns in the names of checkpoints, and what stands in their place in those of modules."""

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return super().unstack(self._modules(tensors))

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        super().load(self._modules(tensors))

    def _modules(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The tensors, named as in transformers' modules. Parts of a convolution are joined wherever they are cut: the
        files that transformers 5 writes have three of about one size."""
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            for pattern, module in self.renamed:
                name = re.sub(pattern, module, name)
            if name.endswith(".A_log") and isinstance(tensor, torch.Tensor):
                tensor = tensor.flatten()  # Kimi Linear has dimensions of 1 besides
            layer, _, part = name.removesuffix(".weight").rpartition(".")
            if part not in CONVOLUTIONS or not isinstance(tensor, torch.Tensor):
                yield name, tensor
                continue
            found = parts.setdefault(layer, {})
            found[part] = tensor.clone()  # the file may be gone before the next part comes
            if len(found) == len(CONVOLUTIONS):
                del parts[layer]
                yield f"{layer}.conv1d.weight", torch.cat([found[part] for part in CONVOLUTIONS])
        for layer, found in parts.items():
            yield from ((f"{layer}.{part}.weight", tensor) for part, tensor in found.items())
