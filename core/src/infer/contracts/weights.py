"""The contracts of checkpoints: what they are kept in, and how they store weights and tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infer.contracts.registration import Registration

if TYPE_CHECKING:
    from torch import Tensor

    from infer.weight import Weight


class TensorFilesProtocol(Protocol):
    """A checkpoint's tensors as its files store them."""

    def names(self) -> Iterable[str]:
        """All tensors' names, in the order in which they are read fastest."""

    def tensor(self, name: str) -> Tensor:
        """A tensor that may be a view of the file: a caller that keeps it has to copy it."""


class ContainerProtocol(Protocol):
    """The file or folder that a checkpoint is kept in. Whatever its form, it answers in the terms of the hub's files.
    Every method may raise CheckpointError."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    def config(self) -> dict[str, Any]:
        """config.json."""

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json; empty if there is none."""

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, of which the special tokens and ``chat_template`` are used; empty if there is none."""

    def tokenizer(self) -> bytes:
        """tokenizer.json."""

    def tensors(self) -> TensorFilesProtocol:
        """The tensors. A weight format makes weights of them, by the ``quant_method`` in config.json."""


class WeightFormatProtocol(Protocol):
    """How a checkpoint stores the weights that models ask for by name."""

    def names(self) -> Iterable[str]:
        """All weights' names, as models call them, in the order in which they are read fastest."""

    def weight(self, name: str) -> Weight:
        """A weight that may be a view of the file: a caller that keeps it has to copy it. Raises CheckpointError if it
        is damaged."""


class ContainerFactory(Protocol):
    """Opens the file or folder that a checkpoint is kept in; ``settings`` is its own table, ``[model.NAME]``. Raises
    CheckpointError if it is damaged."""

    def __call__(self, path: Path, settings: Any) -> ContainerProtocol: ...


class WeightFormatFactory(Protocol):
    """Makes the reader of a checkpoint's weights; ``config`` is config.json, whose ``quantization_config`` says how
    they are stored, and ``settings`` its own table, ``[model.NAME]``. The tensors of ``files`` may be without values
    (``infer doctor``). Raises CheckpointError if it cannot read such weights."""

    def __call__(
        self, config: Mapping[str, Any], files: TensorFilesProtocol, settings: Any
    ) -> WeightFormatProtocol: ...


class TokenizerFactory(Protocol):
    """Reads a tokenizer's file, and returns it as the hub's tokenizer.json; ``settings`` is its own table,
    ``[model.NAME]``. Other files of the checkpoint may lie beside it. Raises CheckpointError."""

    def __call__(self, file: Path, settings: Any) -> bytes: ...


@dataclass(frozen=True)
class ContainerRegistration(Registration[ContainerFactory]):
    """A form of checkpoint, found by the ending of its file's name."""

    suffixes: tuple[str, ...] = ()
    """The endings, such as ".gguf", in lower case; "/" stands for a folder."""


@dataclass(frozen=True)
class TokenizerRegistration(Registration[TokenizerFactory]):
    """A form of tokenizer, found by its file's name in a folder without tokenizer.json, or in ``model.tokenizer``."""

    files: tuple[str, ...] = ()
    """The names, such as "tekken.json"."""


@dataclass(frozen=True)
class WeightFormatRegistration(Registration[WeightFormatFactory]):
    """A way to store weights, found by the ``quant_method`` of config.json's ``quantization_config``."""

    methods: tuple[str, ...] = ()
    """The ``quant_method`` values; "" stands for checkpoints without a ``quantization_config``."""
