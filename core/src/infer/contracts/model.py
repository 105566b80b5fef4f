"""The contract of model families."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import KVCacheView
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.registration import Registration
from infer.contracts.states import StateSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.weight import Weight


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass's input: T tokens of several sequences, laid end to end without padding. Later versions may add
    fields; a model reads those it needs."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64; each token's index in its sequence."""
    cache: KVCacheView
    rows_N: Tensor | None = None
    """int64: indices of the tokens whose hidden states are wanted; None for all. N may be 0."""
    hidden_TD: Tensor | None = None
    """For a ``DraftHead``, and no other model: hidden states, each of the token before ``token_ids_T``'s: those of the
    model after its final norm or, for a ``LayerReadingHead``, joined; or those that the head has made itself."""


class ModelProtocol(Protocol):
    """A decoder-only transformer. It never sees masks, slots, pages or padding."""

    @property
    def attention(self) -> Sequence[AttentionSpec]:
        """One spec per layer that has K and V of its own; ``attend`` takes a layer's index in this list."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, from 0 on: the columns of the logits."""

    def forward(self, batch: Pass) -> Tensor:
        """The wanted tokens' hidden states after the final norm, [N, D]. The last layer may skip the other tokens after
        its attention."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] in the model's dtype."""

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor that ``load`` needs. Random weights are made from it, too."""

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        """Take the checkpoint's weights, and copy what is kept: tensors may be views of a file that changes later.
        Raises CheckpointError if one is missing, unexpected or of another shape."""


@runtime_checkable
class StatefulModel(Protocol):
    """A model with recurrent layers, whose passes get a ``StatefulView``."""

    @property
    def states(self) -> Sequence[StateSpec]:
        """One spec per recurrent layer; ``StatefulView.state`` takes a layer's index in this list."""


@runtime_checkable
class UnstackingModel(Protocol):
    """A model some of whose checkpoints stack several of its weights in one tensor."""

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The weights that ``load`` takes, each by its own name, as views of the checkpoint's tensors. Weights are
        quantized after that. Raises CheckpointError if a stack has another shape than expected."""


@runtime_checkable
class SparingModel(Protocol):
    """A model that has matrices which are not to be quantized."""

    @property
    def spared(self) -> Collection[str]:
        """The names of weights that ``model.quantization`` leaves as they are, besides those of ``model.plain_layers``:
        routers, and what no product is made with."""


@runtime_checkable
class PackingModel(Protocol):
    """A model that hands some of its weights to the kernels' ``pack`` methods and keeps nothing else of them."""

    @property
    def packed(self) -> Collection[str]:
        """The names of these weights, and of stacks that hold nothing else. ``load`` takes them without values, too, on
        the meta device, if the kernels have what they would pack (``KeepingKernels``)."""


class DraftHead(Protocol):
    """A head that drafts tokens (multi-token prediction): of a token's hidden state and the next token, it computes the
    hidden state that yields the token after that one. Its layers have K and V of their own, in a cache pool of their
    own. Its tensors are among those of its model, which loads them."""

    @property
    def attention(self) -> Sequence[AttentionSpec]:
        """As ``ModelProtocol.attention``, of the head's own layers."""

    @property
    def hidden_size(self) -> int:
        """The D of hidden states."""

    def forward(self, batch: Pass) -> Tensor:
        """The wanted tokens' hidden states after the head's norm, [N, D], each of ``batch.hidden_TD`` and
        ``batch.token_ids_T``. They may stand in the place of the model's for the token that they yield.
        ``batch.positions_T`` are the positions of the tokens that ``batch.hidden_TD`` belongs to."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] in the model's dtype."""

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each of the head's own tensors, as in its model's ``expected``."""


@runtime_checkable
class LayerReadingHead(DraftHead, Protocol):
    """A draft head that reads hidden states from between the model's layers, and has a checkpoint of its own
    (EAGLE-3)."""

    @property
    def layers(self) -> Sequence[int]:
        """Which it reads: those that enter the layers of these indices. 0 stands for the embeddings, and the number of
        layers for what the final norm gets. ``hidden_size`` is that of all of them together."""

    def joined(self, hidden_TD: Tensor) -> Tensor:
        """What it reads, side by side, [T, hidden_size], as the hidden states that ``forward`` takes."""


@runtime_checkable
class DraftingModel(Protocol):
    """A model that may have a draft head."""

    @property
    def draft_head(self) -> DraftHead | None:
        """None unless ``ModelContext.draft_head`` asks for it, or ``ReadableModel.attach`` was called. The model's
        ``forward`` does not run it."""


@runtime_checkable
class ReadableModel(DraftingModel, Protocol):
    """A model whose passes can yield hidden states from between its layers, too."""

    @property
    def hidden_size(self) -> int:
        """The D of hidden states after the final norm."""

    def attach(self, head: LayerReadingHead) -> None:
        """Make it the draft head. From now on, what ``head`` reads follows each row's hidden state in the result of
        ``forward``, [N, D + head.hidden_size], and ``logits`` takes such rows. Both are one tensor, so that a recorded
        pass yields both."""


@dataclass(frozen=True)
class ModelContext:
    """What a model is made from, in addition to its config."""

    kernels: KernelsProtocol
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int
    draft_head: bool = False
    """Whether a ``DraftingModel`` is to have its draft head. If not, it leaves out the head's tensors."""
    adapter_slots: int = 0
    """How many adapters an ``AdaptingModel`` is to have slots for; 0 if it need not apply any."""
    drafts_for: ModelProtocol | None = None
    """The model whose draft head is asked for, a ``LayerReadingHead`` with the methods of a model besides."""


class ModelFactory(Protocol):
    """Makes a model that is not loaded yet; ``config`` is config.json, ``settings`` its own table, ``[model.NAME]``.
    Raises CheckpointError, whose text names the field, if the config is not as it has to be."""

    def __call__(self, config: Mapping[str, Any], context: ModelContext, settings: Any) -> ModelProtocol: ...


@dataclass(frozen=True)
class ModelRegistration(Registration[ModelFactory]):
    """A model family, found by the ``architectures`` of a checkpoint's config.json."""

    architectures: tuple[str, ...] = ()
    """Their names; "*" stands for all, for a family of low ``priority`` that runs what no other knows."""
