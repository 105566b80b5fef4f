"""The decoder that model families share: a family adds its config and its layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from pydantic import BaseModel, PositiveInt, model_validator
from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.model import DraftHead, LayerReadingHead, ModelContext, Pass
from infer.contracts.states import StateSpec
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_layers.adapters import Adapters
from infer_layers.blocks import select
from infer_layers.config import PositiveNumber, read_config
from infer_layers.linear import Embedding, Head, Norm, RMSNorm
from infer_layers.rotary import RopeParameters, RotaryEmbedding
from infer_layers.table import Weights

log = logging.getLogger(__name__)


class DecoderConfig(BaseModel, extra="ignore"):
    """The fields of config.json that every decoder needs, and what follows from them.

    A family's config is a subclass. It adds fields of config.json, which have a type and a default, gives a field
    another default (``tie_word_embeddings: bool = True``), and overrides what follows from them: class variables,
    properties and methods, each as what it is here. ``norm`` and ``windows`` are the same for all families that do not
    override them: RMS norms, and no windows. Fields that are not declared are ignored."""

    rope_kinds: ClassVar[Mapping[str, type[RopeParameters]] | None] = None
    """The rope types that this family supports; None for all."""
    partial_rotary: ClassVar[bool] = False
    """Whether the family supports rotating only a part of each head."""
    default_theta: ClassVar[float] = 10_000.0
    """The base of the rotary frequencies where config.json has none."""
    norm_unit_offset: ClassVar[bool] = False
    """As in ``RMSNorm``."""
    attention_sinks: ClassVar[bool] = False
    """Whether attention has a tensor ``sinks``, as ``AttentionSpec.sinks_H``."""
    per_layer: ClassVar[tuple[str, ...]] = ()
    """The fields that are lists with an entry for each layer, or None."""
    embedding_name: ClassVar[str] = "model.embed_tokens"
    """The checkpoint's name of the embedding."""
    layers_name: ClassVar[str] = "model.layers"
    """What comes before the layers' numbers in the checkpoint's names."""
    norm_name: ClassVar[str] = "model.norm"
    """The checkpoint's name of the norm before the head."""
    head_name: ClassVar[str] = "lm_head"
    """The checkpoint's name of the head."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveNumber = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError for a field of the name of something that is no field: config.json would set it, or nobody
        read it."""
        super().__pydantic_init_subclass__(**kwargs)
        for name in cls.model_fields:
            owner = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
            if owner is not None:
                what = vars(owner)[name]
                kind = (
                    "a property"
                    if isinstance(what, property)
                    else "a method"
                    if callable(what)
                    else "a class variable (ClassVar)"
                )
                raise TypeError(
                    f"{cls.__name__}.{name} is a field, which config.json sets; in {owner.__name__} it is {kind}: "
                    "override it by one, and give a field of that name in config.json another one, with an alias"
                )

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("without head_dim, hidden_size has to be a multiple of num_attention_heads")
        return self

    @model_validator(mode="after")
    def _lists(self) -> Self:
        for name in self.per_layer:
            found, count = getattr(self, name), self.num_hidden_layers
            if found is not None and len(found) != count:
                raise ValueError(f"{name} has {len(found)} entries, but num_hidden_layers is {count}")
        return self

    @property
    def head_size(self) -> int:
        """How many values a head has, E."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by, as ``AttentionSpec.scale``."""
        return float(self.head_size**-0.5)

    @property
    def attention_soft_cap(self) -> float | None:
        """As ``AttentionSpec.soft_cap``."""
        return None

    @property
    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by; None for 1."""
        return None

    @property
    def residual_scale(self) -> float | None:
        """What the results of attention and of the MLP are multiplied by before they are added to the residual stream;
        None for 1."""
        return None

    @property
    def logits_divisor(self) -> float | None:
        """What logits are divided by; None for 1."""
        return None

    @property
    def logits_soft_cap(self) -> float | None:
        """If not None, logits become soft_cap * tanh(logits / soft_cap)."""
        return None

    def norm(self, weights: Weights, name: str) -> Norm:
        """A norm of hidden states: the one before the head, and those that a layer makes of it."""
        return RMSNorm(weights, name, self.hidden_size, self.rms_norm_eps, self.norm_unit_offset)

    def windows(self) -> list[int | None]:
        """Each layer's sliding window; None for full attention."""
        return [None] * self.num_hidden_layers

    def attention(self) -> Sequence[AttentionSpec | None]:
        """What each layer needs of K and V from the cache; None for a layer without attention."""
        heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads, self.head_size
        scale, cap = self.attention_scale, self.attention_soft_cap
        return [AttentionSpec(*heads, scale, window, cap) for window in self.windows()]

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        """What each layer keeps as its state, in a model of that dtype; None for a layer that is not recurrent."""
        return [None] * self.num_hidden_layers

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        """Each layer's rope; None for a layer that rotates nothing. ``config`` is all of config.json."""
        rope = RopeParameters.read(
            config, partial=self.partial_rotary, kinds=self.rope_kinds, default_theta=self.default_theta
        )
        return [rope] * self.num_hidden_layers


class DecoderLayer(Protocol):
    """A layer of ``Decoder``: attention and what stands behind it, each added to the residual stream."""

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary | None,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer's x and residual, [T, D]; [N, D] if ``rows_N`` is given, for then the layer drops all other rows
        after attention.

        The residual stream is x + residual, or x alone if the residual is None. The next norm adds the two, because
        kernels fuse the addition with it.
        """


class Decoder:
    """A ModelProtocol, UnstackingModel, SparingModel, StatefulModel, AdaptingModel and ReadableModel: embedding,
    layers, final norm, head. ``schema`` validates config.json, and names these parts in the checkpoint; ``layer`` makes
    one layer from (weights, name, index, config, AttentionSpec or None, RopeParameters or None). Raises CheckpointError
    if no layer has attention, or config.json is not as it has to be."""

    def __init__(
        self,
        config: Mapping[str, Any],
        context: ModelContext,
        schema: type[DecoderConfig],
        layer: Callable[[Weights, str, int, Any, Any, RopeParameters | None], DecoderLayer],
    ) -> None:
        c = self.config = read_config(schema, config)
        w = self.weights = Weights(context)
        size = c.hidden_size
        self.vocab_size = c.vocab_size
        specs = c.attention()
        if c.attention_sinks:
            specs = [
                spec and replace(spec, sinks_H=torch.zeros(spec.num_heads, device=context.device)) for spec in specs
            ]
        self.attention: Sequence[AttentionSpec] = [spec for spec in specs if spec is not None]
        if not self.attention:
            raise CheckpointError(
                "config.json: no layer has attention; infer serves models in which one has, at least."
            )
        self.states: Sequence[StateSpec] = [spec for spec in c.states(context.dtype) if spec is not None]
        ropes = self.ropes = c.ropes(config)
        sizes = [(rope, spec.head_size) if spec else (None, 0) for rope, spec in zip(ropes, specs, strict=True)]
        tables = {
            (rope, head): None if rope is None else RotaryEmbedding(context, rope, head)
            for rope, head in dict.fromkeys(sizes)
        }
        self.rotary = [tables[size] for size in sizes]
        self.embedding = Embedding(w, c.embedding_name, c.vocab_size, size, c.embedding_scale)
        self.layers = [
            layer(w, f"{c.layers_name}.{i}", i, c, spec, rope)
            for i, (spec, rope) in enumerate(zip(specs, ropes, strict=True))
        ]
        self.norm = c.norm(w, c.norm_name)
        self.head = Head(w, self.embedding, c.head_name, c.vocab_size, size, c.tie_word_embeddings)
        self.soft_cap, self.divisor = c.logits_soft_cap, c.logits_divisor
        self.hidden_size = size
        self.draft_head: DraftHead | None = None
        self.read: Sequence[int] = ()
        """What the draft head reads besides, as ``LayerReadingHead.layers``."""

    def attach(self, head: LayerReadingHead) -> None:
        self.draft_head, self.read = head, head.layers

    def forward(self, batch: Pass) -> Tensor:
        x_TD, residual_TD, last = self.embedding(batch.token_ids_T), None, len(self.layers) - 1
        read: dict[int, Tensor] = {}
        for i, (layer, rotary) in enumerate(zip(self.layers, self.rotations(batch), strict=True)):
            if i in self.read:
                read[i] = select(x_TD if residual_TD is None else x_TD + residual_TD, batch.rows_N)
            rows_N = batch.rows_N if i == last else None
            x_TD, residual_TD = layer(x_TD, residual_TD, rotary, batch.cache, rows_N)
        hidden_ND, read[len(self.layers)] = self.norm.add(x_TD, residual_TD)
        return self.beside(hidden_ND, read)

    def beside(self, hidden_ND: Tensor, read: Mapping[int, Tensor]) -> Tensor:
        """The hidden states with what the draft head reads, of the wanted rows, by index of the layer that it
        enters."""
        return torch.cat((hidden_ND, *(read[i] for i in self.read)), dim=-1) if self.read else hidden_ND

    def rotations(self, batch: Pass) -> list[Rotary | None]:
        """Each layer's rotation of the pass's tokens."""
        made = {rotary: None if rotary is None else rotary(batch.positions_T) for rotary in dict.fromkeys(self.rotary)}
        return [made[rotary] for rotary in self.rotary]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.scaled(self.head(hidden_ND[:, : self.hidden_size].contiguous() if self.read else hidden_ND))

    def scaled(self, logits_NV: Tensor) -> Tensor:
        """What the model makes of the head's logits."""
        if self.divisor is not None:
            logits_NV = logits_NV / self.divisor
        return logits_NV if self.soft_cap is None else self.soft_cap * torch.tanh(logits_NV / self.soft_cap)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self.weights.shapes()

    @property
    def adapters(self) -> Adapters | None:
        """Those of its products, for which there are slots; None if there are no slots."""
        return self.weights.adapters

    @property
    def spared(self) -> Collection[str]:
        return self.weights.spared

    @property
    def packed(self) -> Collection[str]:
        return self.weights.packed()

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return self.weights.unstack(tensors)

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        # Some checkpoints with tied embeddings store the head as a tensor of its own, too.
        sums: dict[str, tuple[torch.dtype, int]] = {}
        self.weights.load(self._summed(self._named(tensors), sums), optional=[self.head.name])
        head, embedding = (sums.get(name) for name in (self.head.name, self.embedding.name))
        if head and embedding and head[0] == embedding[0] and head != embedding:
            log.warning(
                "config.json says that the head is the embedding (tie_word_embeddings), but the checkpoint has another "
                "%r, which is not used; if the model was trained with it, set tie_word_embeddings to false there",
                self.head.name,
            )

    def _summed(
        self, tensors: Iterable[tuple[str, Weight]], sums: dict[str, tuple[torch.dtype, int]]
    ) -> Iterator[tuple[str, Weight]]:
        """The tensors, while the types and sums of a tied embedding and of the head are taken, to compare the two
        without keeping them."""
        names = (self.embedding.name, self.head.name) if self.head.tied else ()

        def passed(named: tuple[str, Weight]) -> tuple[str, Weight]:
            name, weight = named
            if name in names:
                values = weight if isinstance(weight, Tensor) else weight.codes
                if not values.is_meta:
                    sums[name] = values.dtype, _sum(values)
            return named

        return map(passed, tensors)  # a generator would hold each tensor until the next one

    def _named(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The tensors of a whole model. A checkpoint of a model without its head, as those that make embeddings often
        are, has names without the prefix; if it is not tied, its embedding stands in for the head."""
        expected, bare = self.weights.shapes(), False
        prefix = self.embedding.name.rsplit(".", 2)[0]
        embedding: Weight | None = None
        for name, weight in tensors:
            if name not in expected and f"{prefix}.{name}" in expected:
                name, bare = f"{prefix}.{name}", True
            if bare and name == self.embedding.name and self.head.name in expected:
                embedding = weight  # and not otherwise, because a view of a file keeps the file in memory
            expected.pop(name, None)
            yield name, weight
        if embedding is not None and self.head.name in expected:
            log.warning("the checkpoint has no output head: embeddings are as they should be, but texts make no sense")
            yield self.head.name, embedding


def nth(specs: Sequence[object | None], index: int) -> int:
    """The index of a layer among those that have a spec, by which ``attend`` and ``state`` know it."""
    return sum(spec is not None for spec in specs[:index])


def _sum(values: Tensor) -> int:
    """The sum of a tensor's bytes, eight at a time."""
    raw = values.cpu().contiguous().flatten().view(torch.uint8).numpy()
    end = len(raw) // 8 * 8
    return int(raw[:end].view(np.int64).sum()) + int(raw[end:].sum())
