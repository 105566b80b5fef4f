"""EAGLE-3 (Li et al., 2025): a draft head that reads hidden states from between the layers of the model that it was
trained for. Its checkpoint is one of its own. Shapes: T tokens, A size of what is read of a token, D the head's hidden
size, N wanted rows, V vocabulary size, W how many tokens the head can draft."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext, Pass
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_layers import (
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    Weights,
    config_table,
    read_config,
    select,
)
from infer_models.llama import LlamaConfig

log = logging.getLogger(__name__)

LAYER = "midlayer"
IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = (IDS, "use_aux_hidden_state", "norm_before_fc", "fc_norm", "norm_output")
"""Fields that may stand in config.json's ``eagle_config``."""


class Eagle3Config(LlamaConfig):
    """The fields of config.json that change the arithmetic."""

    draft_vocab_size: PositiveInt | None = None
    target_hidden_size: PositiveInt | None = None
    eagle_aux_hidden_state_layer_ids: list[NonNegativeInt] | None = None
    use_aux_hidden_state: bool = True
    norm_before_residual: bool = False
    """Whether what attention is added to has been normalized, too."""
    norm_before_fc: bool = False
    """Whether all that is read is normalized together."""
    fc_norm: bool = False
    """Whether what is read of each layer is normalized by itself."""
    norm_output: bool = False
    """Whether the head goes on from its hidden states after the norm, not before it."""
    embed_requires_grad: bool = False
    """Whether the head has been trained with an embedding of its own."""
    layer_types: list[str] | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> tuple[Eagle3Config, dict[str, Any]]:
        """Of config.json as EAGLE, SpecForge and ModelOpt write it, or as speculators do, with the layer's fields in a
        table. Returns the fields, and these as one table. Raises CheckpointError for what the head cannot be."""
        kind, table = config.get("speculators_model_type"), config_table(config, "transformer_layer_config")
        if kind not in (None, "eagle3"):
            raise CheckpointError(f"config.json: speculators_model_type is {kind!r}; infer knows 'eagle3'.")
        layer = table if kind else config
        if (model_type := layer.get("model_type", "llama")) != "llama":
            raise CheckpointError(f"config.json: model_type is {model_type!r}; infer knows EAGLE-3 heads of 'llama'.")
        nested = config_table(config, "eagle_config")
        flat = {
            **({"norm_before_residual": True} if kind else {}),
            **{key: nested[key] for key in NESTED if nested.get(key) is not None},
            **table,
            **{key: value for key, value in config.items() if value is not None},
        }
        c = read_config(cls, flat)
        if c.num_hidden_layers != 1:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {c.num_hidden_layers}; infer knows EAGLE-3 heads of 1 layer."
            )
        if not c.use_aux_hidden_state:
            raise CheckpointError(
                "config.json: use_aux_hidden_state is false; infer knows EAGLE-3 heads that read hidden states from "
                "between the model's layers."
            )
        if others := {*(c.layer_types or ())} - {"full_attention"}:
            raise CheckpointError(
                f"config.json: layer_types has {min(others)!r}; infer knows EAGLE-3 heads with 'full_attention'."
            )
        return c, flat

    def layers(self, count: int) -> tuple[int, ...]:
        """Which hidden states are read, of a model of ``count`` layers: those that enter these. Where config.json does
        not say, they are those of the authors of EAGLE-3. Ids that begin with 1 are those of layers whose results are
        read, as SpecForge and ModelOpt write them, and others those of layers that get them. Raises CheckpointError if
        there are no such layers."""
        ids = self.eagle_aux_hidden_state_layer_ids
        found = tuple(ids or (2, count // 2, count - 3))
        if found[0] == 1:
            found = tuple(id + 1 for id in found)
        if not all(0 <= layer <= count for layer in found):
            raise CheckpointError(
                f"config.json: {IDS} is {ids or 'not set'}, so that the head reads what enters layers "
                f"{', '.join(map(str, found))}, but the model that is served has {count} layers."
            )
        return found


class Eagle3Head:
    """A LayerReadingHead: hidden states of some of the model's layers are joined into one; this and the embedding of
    the next token, each normalized, go side by side into a layer, whose residual stream is the joined one.

    The embedding is the model's unless their sizes differ or the head has trained its own. The output head yields a
    part of the vocabulary: its row w is token w + d2t[w]. Raises CheckpointError if the head was made for another
    model."""

    def __init__(self, config: Mapping[str, Any], context: ModelContext) -> None:
        c, flat = Eagle3Config.read(config)
        model = context.drafts_for
        if model is None:
            raise CheckpointError(
                "config.json is that of a draft head, which cannot answer by itself: set model.path to the model that "
                'it was made for, engine.speculation to "eagle3", and engine.eagle3.path to this checkpoint.'
            )
        if not isinstance(model, Decoder):
            raise CheckpointError(
                f"config.json is that of a draft head, which infer does not know for {type(model).__name__}."
            )
        read = c.target_hidden_size or c.hidden_size
        for field, own, there in (
            ("vocab_size", c.vocab_size, model.vocab_size),
            ("target_hidden_size" if c.target_hidden_size else "hidden_size", read, model.hidden_size),
        ):
            if own != there:
                raise CheckpointError(
                    f"config.json: {field} is {own}, but that of the model that is served is {there}; a draft head "
                    "drafts for the model that it was made for."
                )
        drafted = c.draft_vocab_size or c.vocab_size
        if drafted > c.vocab_size:
            raise CheckpointError(
                f"config.json: draft_vocab_size is {drafted}, more than vocab_size, which is {c.vocab_size}."
            )
        self.layers: Sequence[int] = c.layers(len(model.layers))
        w, size, eps = Weights(context), c.hidden_size, c.rms_norm_eps
        self.hidden_size, self.vocab_size = read * len(self.layers), c.vocab_size
        (spec,), (rope,) = c.attention(), c.ropes(flat)
        assert spec is not None
        assert rope is not None
        self.attention: Sequence[AttentionSpec] = [spec]
        self._weights, self._size, self._read = w, size, read
        self._rotary = RotaryEmbedding(context, rope, spec.head_size)
        self._own_embedding = size != read or c.embed_requires_grad
        self._embedding = Embedding(w, "embed_tokens", c.vocab_size, size) if self._own_embedding else model.embedding
        self._whole_norm = RMSNorm(w, "input_norm", self.hidden_size, eps) if c.norm_before_fc else None
        self._norms = [RMSNorm(w, f"fc_norm.{i}", read, eps) for i in range(len(self.layers))] if c.fc_norm else []
        self._fc = Linear(w, "fc", self.hidden_size, size)
        self._embedding_norm = RMSNorm(w, f"{LAYER}.input_layernorm", size, eps)
        self._hidden_norm = RMSNorm(w, f"{LAYER}.hidden_norm", size, eps)
        self._norm_before_residual, self._norm_output = c.norm_before_residual, c.norm_output
        name = f"{LAYER}.self_attn"
        self._attention = Attention(w, name, 0, size, spec, rope, biases=c.biases, in_size=2 * size)
        self._mlp_norm = RMSNorm(w, f"{LAYER}.post_attention_layernorm", size, eps)
        self._mlp = GatedMLP(w, f"{LAYER}.mlp", size, c.intermediate_size, c.hidden_act, c.mlp_bias)
        self._norm = RMSNorm(w, "norm", size, eps)
        self._head = Linear(w, "lm_head", size, drafted)
        self._drafted = drafted
        self._tokens_W: Tensor | None = None
        """The token of each row of the output head; None for the rows' own indices."""
        if context.device.type != "meta":
            entering = ", ".join(map(str, self.layers))
            log.info("the draft head reads what enters layers %s of the model's %d", entering, len(model.layers))

    def joined(self, hidden_TD: Tensor) -> Tensor:
        if self._whole_norm is not None:
            hidden_TD = self._whole_norm(hidden_TD.contiguous())
        if self._norms:
            parts = torch.split_with_sizes(hidden_TD, [self._read] * len(self.layers), dim=-1)
            hidden_TD = torch.cat([norm(x.contiguous()) for norm, x in zip(self._norms, parts, strict=True)], dim=-1)
        return self._fc(hidden_TD)

    def forward(self, batch: Pass) -> Tensor:
        assert batch.hidden_TD is not None
        normed_TD = self._hidden_norm(batch.hidden_TD)
        residual_TD = normed_TD if self._norm_before_residual else batch.hidden_TD
        x_TD = torch.cat((self._embedding_norm(self._embedding.rows(batch.token_ids_T)), normed_TD), dim=-1)
        x_ND = self._attention(x_TD, self._rotary(batch.positions_T), batch.cache, batch.rows_N)
        x_ND, residual_ND = self._mlp_norm.add(x_ND, select(residual_TD, batch.rows_N))
        hidden_ND = self._mlp(x_ND) + residual_ND
        return self._norm(hidden_ND) if self._norm_output else hidden_ND

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]; of tokens that cannot be drafted, -inf."""
        logits_NW = self._head(hidden_ND if self._norm_output else self._norm(hidden_ND))
        if self._tokens_W is None:
            return logits_NW
        logits_NV = logits_NW.new_full((len(logits_NW), self.vocab_size), -math.inf)
        return logits_NV.index_copy_(1, self._tokens_W, logits_NW)

    # As a model of a checkpoint of its own

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes() | ({} if self._drafted == self.vocab_size else {"d2t": (self._drafted,)})

    @property
    def spared(self) -> Collection[str]:
        return self._weights.spared

    @property
    def packed(self) -> Collection[str]:
        return self._weights.packed()

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The tensors that are used, by EAGLE's names. Speculators has "layers.0." for "midlayer."."""
        for name, tensor in tensors:
            name = name.removeprefix("model.")
            if name.startswith("layers.0."):
                name = f"{LAYER}.{name.removeprefix('layers.0.')}"
            if name != "t2d" and (self._own_embedding or name != "embed_tokens.weight"):
                yield name, tensor

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        held = list[Weight]()

        def weights() -> Iterator[tuple[str, Weight]]:
            for name, tensor in tensors:
                if name == "d2t":
                    held.append(tensor)
                else:
                    yield name, tensor

        self._weights.load(weights())
        if self._drafted < self.vocab_size and not held:
            raise CheckpointError(
                "The checkpoint lacks 'd2t', which says which tokens the head drafts, since draft_vocab_size is "
                f"{self._drafted} and vocab_size {self.vocab_size}."
            )
        for tensor in held:
            self._take(tensor)

    def _take(self, offsets: Weight) -> None:
        if not isinstance(offsets, Tensor) or tuple(offsets.shape) != (self._drafted,):
            raise CheckpointError(
                f"The tensor 'd2t' has shape {list(offsets.shape)}, but config.json asks for {[self._drafted]}."
            )
        if offsets.is_meta:
            return
        tokens_W = torch.arange(self._drafted) + offsets.cpu().long()
        tokens = {token for token in tokens_W.tolist() if 0 <= token < self.vocab_size}
        if len(tokens) < self._drafted:
            raise CheckpointError(
                f"The tensor 'd2t' does not lead to {self._drafted} different tokens from 0 to {self.vocab_size - 1}."
            )
        self._tokens_W = tokens_W.to(self._weights.context.device)
