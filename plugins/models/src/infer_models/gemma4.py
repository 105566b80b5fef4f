"""Gemma 4's language model. Shapes: T tokens, D hidden size, N wanted rows, L layers, P values per token and layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.kernels import Activation, Routing
from infer.contracts.model import ModelContext, Pass
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_layers import (
    Attention,
    Embedding,
    Experts,
    GatedMLP,
    HiddenAct,
    LayerType,
    Linear,
    PositiveNumber,
    RMSNorm,
    RopeParameters,
    Weights,
    layer_windows,
    select,
)
from infer_models.llama import LlamaConfig
from infer_models.multimodal import LanguageModel

ROPES: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class LayerHeads(BaseModel, extra="forbid"):
    """What a layer has instead of what the config says for all."""

    head_dim: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None


class Gemma4Config(LlamaConfig):
    """The fields of config.json that change the arithmetic. Google's files omit fields that have their default values.

    With ``use_bidirectional_attention`` "vision", only what stands for images attends to what comes after it."""

    vocab_size: PositiveInt = 262_144
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: PositiveInt = 30
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    """That of layers with a window."""
    global_head_dim: PositiveInt = 512
    num_global_key_value_heads: PositiveInt | None = None
    per_layer_config: dict[int, LayerHeads] | None = None
    """By number of layer; transformers writes it in place of the two above, which count where it is missing."""
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_act: HiddenAct = Field("gelu_pytorch_tanh", validation_alias="hidden_activation")
    tie_word_embeddings: bool = True
    sliding_window: PositiveInt = 512
    layer_types: list[LayerType] | None = None
    final_logit_softcapping: PositiveNumber | None = None
    use_bidirectional_attention: Literal["vision"] | None = None
    vocab_size_per_layer_input: PositiveInt = 262_144
    hidden_size_per_layer_input: NonNegativeInt = 256
    attention_k_eq_v: bool = False
    """Whether V is K before its norm, in layers without a window."""
    num_kv_shared_layers: NonNegativeInt = 0
    use_double_wide_mlp: bool = False
    """Whether the MLP is twice as wide in layers that share K and V."""
    enable_moe_block: bool = False
    num_experts: PositiveInt | None = None
    top_k_experts: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None

    @property
    def attention_scale(self) -> float:
        return 1.0

    @property
    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    @property
    def logits_soft_cap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def first_shared(self) -> int:
        """The first layer that reads K and V of an earlier one."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def windows(self) -> list[int | None]:
        """As in transformers, the last layer never has one."""
        count = self.num_hidden_layers
        types: list[LayerType] = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
        types = (self.layer_types or types)[:]
        types[-1:] = ["full_attention"]
        return layer_windows(types, self.sliding_window, count)

    def attention(self) -> list[AttentionSpec]:
        windows, own = self.windows(), self.per_layer_config
        if own is None:
            kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            full = LayerHeads(head_dim=self.global_head_dim, num_key_value_heads=kv_heads)
            own = {i: full for i, window in enumerate(windows) if window is None}
        heads = [own.get(i, LayerHeads()) for i in range(len(windows))]
        return [
            AttentionSpec(
                self.num_attention_heads,
                each.num_key_value_heads or self.num_key_value_heads,
                each.head_dim or self.head_dim,
                self.attention_scale,
                window,
            )
            for each, window in zip(heads, windows, strict=True)
        ]

    def kv_layer(self, index: int) -> int:
        """The layer whose K and V a layer reads: its own, or those of the last layer of its kind that has some. Raises
        CheckpointError if there is none."""
        if index < self.first_shared:
            return index
        windows = self.windows()
        source = next((i for i in reversed(range(self.first_shared)) if windows[i] == windows[index]), None)
        if source is None:
            raise CheckpointError(
                f"config.json: layer {index} shares K and V (num_kv_shared_layers is {self.num_kv_shared_layers}), but "
                "no layer of its kind before those has any."
            )
        return source

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        config = {**config, "rope_parameters": config.get("rope_parameters") or ROPES}
        full, sliding = (
            RopeParameters.read(config, kind, partial=partial)
            for kind, partial in (("full_attention", True), ("sliding_attention", False))
        )
        return [full if window is None else sliding for window in self.windows()]


class Gemma4UnifiedConfig(Gemma4Config):
    """Gemma 4 of 12B, whose towers are parts of a few products. It has neither inputs per layer nor experts."""

    sliding_window: PositiveInt = 1024
    hidden_size_per_layer_input: NonNegativeInt = 0


class Gemma4Experts:
    """A mixture of experts beside the MLP. The router sees the residual stream with a norm of its own."""

    def __init__(self, w: Weights, name: str, c: Gemma4Config) -> None:
        if c.num_experts is None or c.top_k_experts is None or c.moe_intermediate_size is None:
            raise CheckpointError(
                "config.json: with enable_moe_block, num_experts, top_k_experts and moe_intermediate_size have to be "
                "set."
            )
        self.norm = c.norm(w, f"{name}.pre_feedforward_layernorm_2")
        self.mlp_norm, self.out_norm = (c.norm(w, f"{name}.post_feedforward_layernorm_{i}") for i in (1, 2))
        self.eps, self._kernels, self._root = c.rms_norm_eps, w.context.kernels, c.hidden_size**-0.5
        self.router_scale_D: Tensor
        w.expect(f"{name}.router.scale", (c.hidden_size,), self._take)
        self.experts = Experts(
            w,
            name,
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            Routing(c.top_k_experts),
            c.hidden_act,
            router="router.proj",
            share_scales="router.per_expert_scale",
        )

    def _take(self, scale_D: Tensor) -> None:
        self.router_scale_D = scale_D * self._root

    def __call__(self, mlp_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """The MLP's results and those of the experts, [T, D]."""
        routed_TD = self._kernels.rms_norm(residual_TD, self.router_scale_D, self.eps)
        return self.mlp_norm(mlp_TD) + self.out_norm(self.experts(self.norm(residual_TD), routed_TD))


class LayerInputs:
    """What the tokens tell every layer by themselves: an embedding per layer, and a product with the first hidden
    states."""

    def __init__(self, w: Weights, c: Gemma4Config) -> None:
        layers, size = c.num_hidden_layers, c.hidden_size_per_layer_input
        if c.vocab_size_per_layer_input < c.vocab_size:
            raise CheckpointError(
                f"config.json: vocab_size_per_layer_input is {c.vocab_size_per_layer_input}, but there are "
                f"{c.vocab_size} tokens (vocab_size); it has to be as many at least."
            )
        name = "model.embed_tokens_per_layer"
        self.embedding = Embedding(w, name, c.vocab_size_per_layer_input, layers * size, size**0.5)
        self.projection = Linear(w, "model.per_layer_model_projection", c.hidden_size, layers * size)
        self.norm = RMSNorm(w, "model.per_layer_projection_norm", size, c.rms_norm_eps)
        self.scale, self.shape = c.hidden_size**-0.5, (-1, layers, size)

    def __call__(self, token_ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """[L, T, P]."""
        context_TLP = self.norm((self.projection(x_TD) * self.scale).view(self.shape))
        inputs_TLP = (context_TLP + self.embedding(token_ids_T).view(self.shape)) * float(2.0**-0.5)
        return inputs_TLP.transpose(0, 1).contiguous()


class LayerInput:
    """Adds what a token tells a layer by itself to the residual stream."""

    def __init__(self, w: Weights, name: str, c: Gemma4Config) -> None:
        size, self._kernels = c.hidden_size_per_layer_input, w.context.kernels
        self.activation: Activation = c.hidden_act
        self.gate = Linear(w, f"{name}.per_layer_input_gate", c.hidden_size, size)
        self.projection = Linear(w, f"{name}.per_layer_projection", size, c.hidden_size)
        self.norm = c.norm(w, f"{name}.post_per_layer_input_norm")

    def __call__(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        gated_TP = self._kernels.gated(self.gate(x_TD), input_TP, self.activation)
        return x_TD + self.norm(self.projection(gated_TP))


class Gemma4Layer:
    scalar_1: Tensor

    def __init__(
        self, w: Weights, name: str, index: int, c: Gemma4Config, spec: AttentionSpec, rope: RopeParameters | None
    ) -> None:
        self.shared = index >= c.first_shared
        self.input_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            c.norm(w, f"{name}.{part}_layernorm")
            for part in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        parts: tuple[str, ...] = ("q_proj",) if self.shared else ("q_proj", "k_proj", "v_proj")
        if c.attention_k_eq_v and spec.window is None:
            parts = parts[:2]
        self.attention = Attention(
            w,
            f"{name}.self_attn",
            c.kv_layer(index),
            c.hidden_size,
            spec,
            rope,
            biases=c.biases,
            qk_norm_eps=c.rms_norm_eps,
            qkv=parts,
            qk_norms=("q_norm",) if self.shared else ("q_norm", "k_norm"),
            v_norm_eps=c.rms_norm_eps,
            shared=self.shared,
        )
        width = c.intermediate_size * (2 if self.shared and c.use_double_wide_mlp else 1)
        self.mlp = GatedMLP(w, f"{name}.mlp", c.hidden_size, width, c.hidden_act)
        self.experts = Gemma4Experts(w, name, c) if c.enable_moe_block else None
        self.input = LayerInput(w, name, c) if c.hidden_size_per_layer_input else None
        w.expect(f"{name}.layer_scalar", (1,), self._take)

    def _take(self, scalar_1: Tensor) -> None:
        self.scalar_1 = scalar_1.clone()

    def __call__(
        self,
        x_TD: Tensor,
        input_TP: Tensor | None,
        rotary: Rotary | None,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given; a layer that shares K and V then gets x of these rows only, too."""
        mixed_ND = self.attention(self.input_norm(x_TD), rotary, cache, rows_N)
        residual_ND = x_TD if self.shared else select(x_TD, rows_N)
        x_ND, residual_ND = self.mlp_norm.add(self.attention_out_norm(mixed_ND), residual_ND)
        x_ND = self.mlp(x_ND)
        if self.experts is not None:
            x_ND = self.experts(x_ND, residual_ND)
        x_ND = residual_ND + self.mlp_out_norm(x_ND)
        if self.input is not None and input_TP is not None:
            x_ND = self.input(x_ND, select(input_TP, rows_N))
        return x_ND * self.scalar_1


class Gemma4(LanguageModel):
    """Its last layers may have no K and V of their own. They take no place in the cache, and only the wanted rows get
    there."""

    config: Gemma4Config
    layers: list[Gemma4Layer]  # type: ignore[assignment]

    def __init__(
        self, config: Mapping[str, Any], context: ModelContext, schema: type[Gemma4Config] = Gemma4Config
    ) -> None:
        super().__init__(config, context, schema, Gemma4Layer)  # type: ignore[arg-type]
        self.attention = self.attention[: self.config.first_shared]
        self.inputs = LayerInputs(self.weights, self.config) if self.config.hidden_size_per_layer_input else None

    def forward(self, batch: Pass) -> Tensor:
        x_TD, last = self.embedding(batch.token_ids_T), self.config.first_shared - 1
        inputs_LTP = None if self.inputs is None else self.inputs(batch.token_ids_T, x_TD)
        read: dict[int, Tensor] = {}
        for i, (layer, rotary) in enumerate(zip(self.layers, self.rotations(batch), strict=True)):
            if i in self.read:
                read[i] = select(x_TD, batch.rows_N if i <= last else None)
            rows_N = batch.rows_N if i >= last else None
            x_TD = layer(x_TD, None if inputs_LTP is None else inputs_LTP[i], rotary, batch.cache, rows_N)
        read[len(self.layers)] = x_TD
        return self.beside(self.norm(x_TD), read)

    def _texts(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Without the projections that some checkpoints hold for layers that share K and V."""
        unused = tuple(
            f"model.layers.{i}.self_attn.{part}."
            for i in range(self.config.first_shared, self.config.num_hidden_layers)
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        return ((name, tensor) for name, tensor in super()._texts(tensors) if not name.startswith(unused))
