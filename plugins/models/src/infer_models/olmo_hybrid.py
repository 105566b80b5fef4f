"""OLMo Hybrid: gated delta nets, with strengths up to 2, in three of four layers, and in the rest OLMo 2's attention,
which rotates nothing in published models. Layers of the one kind have norms before mixer and MLP, those of the other
after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from infer_layers import DeltaSizes, RopeParameters, config_table
from infer_models.delta import DeltaConfig, DeltaLayer, DeltaModel


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
            max_beta=2.0 if self.linear_allow_neg_eigval else 1.0,
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


class OlmoHybrid(DeltaModel):
    renamed: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    )
