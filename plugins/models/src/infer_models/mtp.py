"""Multi-token prediction (Gloeckle et al., 2024): a layer with attention that drafts tokens, and the models that it
belongs to. Shapes: T tokens, D hidden size, N wanted rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext, Pass
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_layers import CoarseHead, Decoder, DecoderConfig, DecoderLayer, Linear, RopeParameters, Weights
from infer_models.glm4_moe import Glm4MoeConfig
from infer_models.multimodal import LanguageModel
from infer_models.qwen3_5 import Qwen3_5Config

MakeLayer = Callable[[Weights, str, int, Any, AttentionSpec, RopeParameters | None], DecoderLayer]
PREFIX = "mtp."


class HeadNames(NamedTuple):
    """What a checkpoint calls the parts of a head."""

    embedding_norm: str
    hidden_norm: str
    fc: str
    layer: str
    norm: str


class MTPModel(LanguageModel):
    """A ``LanguageModel`` and DraftingModel, whose draft head is left out unless the context asks for it. The head has
    names of its own, as in Qwen3.5 and Qwen3-Next."""

    def __init__(
        self, config: Mapping[str, Any], context: ModelContext, schema: type[Qwen3_5Config], layer: MakeLayer
    ) -> None:
        super().__init__(config, context, schema, layer)
        if context.draft_head:
            self.left_out = tuple(tower for tower in self.left_out if tower != PREFIX)
            c = self.config
            assert isinstance(c, Qwen3_5Config)
            own = c.model_copy(update={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
            parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm")
            names = HeadNames(*(f"{PREFIX}{part}" for part in parts))
            self.draft_head = MTPHead(self, layer, own, names, "mtp_num_hidden_layers", c.mtp_num_hidden_layers)


class NextLayerModel(Decoder):
    """A Decoder and DraftingModel, whose draft head is left out unless the context asks for it. The head is the layer
    behind the last one, with copies of embedding and output head, as in DeepSeek-V3 and GLM."""

    def __init__(
        self, config: Mapping[str, Any], context: ModelContext, schema: type[DecoderConfig], layer: MakeLayer
    ) -> None:
        super().__init__(config, context, schema, layer)
        c = self.config
        assert isinstance(c, Glm4MoeConfig)
        self._next = f"{c.layers_name}.{c.num_hidden_layers}"
        layers = range(c.num_hidden_layers, c.num_hidden_layers + max(1, c.num_nextn_predict_layers or 0))
        self._beyond = tuple(f"{c.layers_name}.{i}." for i in layers)
        if self.adapters is not None:
            self.adapters.draft_head = f"{self._next}."
        if context.draft_head:
            embedding_norm, hidden_norm, fc = (f"{self._next}.{part}" for part in ("enorm", "hnorm", "eh_proj"))
            names = HeadNames(embedding_norm, hidden_norm, fc, self._next, f"{self._next}.shared_head.norm")
            field = "num_nextn_predict_layers"
            self.draft_head = MTPHead(self, layer, c.of_next_layer(), names, field, c.num_nextn_predict_layers)

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return super().unstack(self._served(tensors))

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        super().load(self._served(tensors))

    def _served(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        copies = (f"{self._next}.embed_tokens.", f"{self._next}.shared_head.head.")
        left_out = copies if self.draft_head is not None else self._beyond
        return ((name, tensor) for name, tensor in tensors if not name.startswith(left_out))


class MTPHead:
    """A DraftHead: the embedding of the next token and the hidden state, each normalized, become one vector, which goes
    through a layer and a norm. The embedding is the model's, and the output head a coarse copy of the model's. ``own``
    is the config of a model of the head's layer alone, and ``count``, which config.json calls ``field``, how many
    layers it has. Raises CheckpointError if there are several."""

    def __init__(
        self, model: Decoder, layer: MakeLayer, own: DecoderConfig, names: HeadNames, field: str, count: int | None
    ) -> None:
        if (count or 1) > 1:
            raise CheckpointError(f"config.json: {field} is {count}; infer knows draft heads of 1 layer.")
        w = model.weights
        index = next(i for i, rotary in enumerate(model.rotary) if rotary is not None)
        rotary = model.rotary[index]
        assert rotary is not None
        before, size = w.shapes(), own.hidden_size
        self.attention: Sequence[AttentionSpec] = model.attention[:1]
        self.hidden_size = size
        self._head, self._scaled = CoarseHead(w, model.head), model.scaled
        self._embedding, self._rotary = model.embedding, rotary
        self._embedding_norm = own.norm(w, names.embedding_norm)
        self._hidden_norm = own.norm(w, names.hidden_norm)
        self._fc = Linear(w, names.fc, 2 * size, size)
        self._layer = layer(w, names.layer, 0, own, self.attention[0], model.ropes[index])
        self._norm = own.norm(w, names.norm)
        self._expected = {name: shape for name, shape in w.shapes().items() if name not in before}

    def forward(self, batch: Pass) -> Tensor:
        assert batch.hidden_TD is not None
        parts = self._embedding_norm(self._embedding(batch.token_ids_T)), self._hidden_norm(batch.hidden_TD)
        x_TD, rotary = self._fc(torch.cat(parts, dim=-1)), self._rotary(batch.positions_T)
        return self._norm.add(*self._layer(x_TD, None, rotary, batch.cache, batch.rows_N))[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._scaled(self._head(hidden_ND))

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self._expected
