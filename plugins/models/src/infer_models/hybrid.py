"""What families have in common in which Mamba 2 stands in the place of some layers' attention, or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, PositiveInt

from infer.contracts.attention import AttentionSpec
from infer.contracts.states import StateSpec
from infer.errors import CheckpointError
from infer_layers import Mamba2, MambaSizes, RopeParameters, Weights, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer

HybridLayerType = Annotated[
    Literal["mamba", "attention"],
    BeforeValidator(lambda kind: {"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind)),
]
"""As transformers 4 calls them; transformers 5 has other names."""


def _number(value: Any) -> Any:
    """A number, also as transformers 5 writes those that JSON does not know."""
    return value["__float__"] if isinstance(value, dict) and value.keys() == {"__float__"} else value


StepLimit = Annotated[float, BeforeValidator(_number)]


class HybridConfig(LlamaConfig):
    """A config with the sizes of Mamba 2. A family says which layers have it."""

    mamba_name: ClassVar[str] = "mamba"

    hidden_act: Literal["silu"] = "silu"
    """Mamba's convolution has it, too."""
    mamba_n_heads: PositiveInt = 128
    mamba_d_head: PositiveInt | Literal["auto"] = "auto"
    mamba_n_groups: PositiveInt = 1
    mamba_d_state: PositiveInt = 256
    mamba_d_conv: PositiveInt = 4
    mamba_expand: PositiveInt = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[StepLimit, StepLimit] = (0.0, float("inf"))

    @property
    def mamba_size(self) -> int:
        """How many values x has in Mamba."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba(self) -> MambaSizes:
        """Raises CheckpointError if heads do not make up the whole."""
        size, heads = self.mamba_size, self.mamba_n_heads
        head = size // heads if self.mamba_d_head == "auto" else self.mamba_d_head
        if head * heads != size:
            raise CheckpointError(
                f"config.json: mamba_n_heads is {heads} and mamba_d_head {head}; their product has to be the size of "
                f"Mamba's x, {size}."
            )
        groups, state, width = self.mamba_n_groups, self.mamba_d_state, self.mamba_d_conv
        return MambaSizes(heads, head, groups, state, width, self.time_step_limit)

    def attends(self, index: int) -> bool:
        """Whether the layer has attention; if not, it has Mamba."""
        raise NotImplementedError

    def attention(self) -> Sequence[AttentionSpec | None]:
        return [spec if self.attends(i) else None for i, spec in enumerate(super().attention())]

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        recurrent = [not self.attends(i) for i in range(self.num_hidden_layers)]
        spec = self.mamba.state(dtype) if any(recurrent) else None
        return [spec if each else None for each in recurrent]


class HybridLayer(LlamaLayer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if spec is not None:
            return super().mixes(w, name, index, c, spec, rope)
        return Mamba2(
            w,
            f"{name}.{c.mamba_name}",
            nth(c.states(w.context.dtype), index),
            c.hidden_size,
            c.mamba,
            bias=c.mamba_proj_bias,
            out_bias=c.mamba_proj_bias,
            conv_bias=c.mamba_conv_bias,
            norm_eps=c.rms_norm_eps,
        )
