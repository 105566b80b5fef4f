"""OLMo Hybrid: gated delta nets, with strengths up to 2, in three of four layers, and in the rest OLMo 2's attention,
which rotates nothing in published models. Layers of the one kind have norms before mixer and MLP, those of the other
after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt

from infer.weight import Weight
from infer_layers import Decoder, DeltaSizes, RopeParameters, config_table
from infer_models.delta import DeltaConfig, DeltaLayer

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


class OlmoHybridConfig(DeltaConfig):
    qk_norm: ClassVar[bool] = True
    qk_norm_whole: ClassVar[bool] = True
    norms_after: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")
    delta_qkvz: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "g_proj")
    delta_ba: ClassVar[tuple[str, ...]] = ("b_proj", "a_proj")
    delta_norm: ClassVar[str] = "o_norm"
    delta_out: ClassVar[str] = "o_proj"
    delta_norm_eps: ClassVar[float | None] = 1e-5

    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt | None = None
    linear_value_head_dim: PositiveInt | None = None
    linear_num_key_heads: PositiveInt | None = None
    linear_num_value_heads: PositiveInt | None = None
    linear_allow_neg_eigval: bool = True

    @property
    def delta(self) -> DeltaSizes:
        key_heads = self.linear_num_key_heads or self.num_attention_heads
        key_size = self.linear_key_head_dim or int(0.75 * self.hidden_size / key_heads)
        return DeltaSizes(
            key_heads,
            self.linear_num_value_heads or self.num_attention_heads,
            key_size,
            self.linear_value_head_dim or 2 * key_size,
            self.linear_conv_kernel_dim,
            2.0 if self.linear_allow_neg_eigval else 1.0,
        )

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        tables = (config_table(config, name) for name in ("rope_parameters", "rope_scaling"))
        given = {key: value for table in (config, *tables) for key, value in table.items() if value is not None}
        if "rope_theta" not in given and given.get("rope_type", "default") == "default":
            return [None] * self.num_hidden_layers
        return super().ropes(config)


class OlmoHybridLayer(DeltaLayer):
    def norms(self, c: OlmoHybridConfig, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ((), c.norms_after) if c.attends(index) else (c.norms_before, ())


class OlmoHybrid(Decoder):
    """A Decoder whose checkpoints have names of their own for norms, and may have the convolution in three parts."""

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return super().unstack(self._usual(tensors))

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        super().load(self._usual(tensors))

    def _usual(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The tensors, named as in transformers' modules. Parts of a convolution are joined wherever they are cut: the
        files that transformers 5 writes have three of about one size."""
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            name = name.replace(".attention_layer_norm.", ".input_layernorm.")
            name = name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
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
