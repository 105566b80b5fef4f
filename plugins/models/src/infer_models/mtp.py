"""Multi-token prediction (Gloeckle et al., 2024), as Qwen3.5 and Qwen3-Next have it: a layer with attention that drafts
tokens, and the model that it belongs to. Shapes: T tokens, D hidden size, N wanted rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext, Pass
from infer.errors import CheckpointError
from infer_layers import DecoderLayer, Linear, RopeParameters, Weights
from infer_models.multimodal import LanguageModel
from infer_models.qwen3_5 import Qwen3_5Config

MakeLayer = Callable[[Weights, str, int, Any, AttentionSpec, RopeParameters | None], DecoderLayer]
PREFIX = "mtp."


class MTPModel(LanguageModel):
    """A ``LanguageModel`` and DraftingModel, whose draft head is left out unless the context asks for it."""

    def __init__(
        self, config: Mapping[str, Any], context: ModelContext, schema: type[Qwen3_5Config], layer: MakeLayer
    ) -> None:
        super().__init__(config, context, schema, layer)
        if context.draft_head:
            self.left_out = tuple(tower for tower in self.left_out if tower != PREFIX)
            self.draft_head = MTPHead(self, layer)


class MTPHead:
    """A DraftHead: the embedding of the next token and the hidden state, each normalized, become one vector, which goes
    through a layer and a norm. Embedding and output head are the model's. Raises CheckpointError if there are several
    layers."""

    def __init__(self, model: LanguageModel, layer: MakeLayer) -> None:
        c, w = model.config, model.weights
        assert isinstance(c, Qwen3_5Config)
        if (count := c.mtp_num_hidden_layers or 1) > 1:
            raise CheckpointError(f"config.json: mtp_num_hidden_layers is {count}; infer knows draft heads of 1 layer.")
        index = next(i for i, rotary in enumerate(model.rotary) if rotary is not None)
        rotary = model.rotary[index]
        assert rotary is not None
        own = c.model_copy(update={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
        before, size = w.shapes(), c.hidden_size
        self.attention: Sequence[AttentionSpec] = model.attention[:1]
        self.hidden_size = size
        self.logits = model.logits
        self._embedding, self._rotary = model.embedding, rotary
        self._embedding_norm = own.norm(w, f"{PREFIX}pre_fc_norm_embedding")
        self._hidden_norm = own.norm(w, f"{PREFIX}pre_fc_norm_hidden")
        self._fc = Linear(w, f"{PREFIX}fc", 2 * size, size)
        self._layer = layer(w, f"{PREFIX}layers.0", 0, own, self.attention[0], model.ropes[index])
        self._norm = own.norm(w, f"{PREFIX}norm")
        self._expected = {name: shape for name, shape in w.shapes().items() if name not in before}

    def forward(self, batch: Pass) -> Tensor:
        assert batch.hidden_TD is not None
        parts = self._embedding_norm(self._embedding(batch.token_ids_T)), self._hidden_norm(batch.hidden_TD)
        x_TD, rotary = self._fc(torch.cat(parts, dim=-1)), self._rotary(batch.positions_T)
        return self._norm.add(*self._layer(x_TD, None, rotary, batch.cache, batch.rows_N))[0]

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self._expected
