"""The contract of adapters: low-rank changes of a model's linear layers (LoRA, Hu et al., 2021), applied to the rows of
those requests that ask for them. R is an adapter's rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from infer.contracts.registration import Registration

if TYPE_CHECKING:
    from torch import Tensor


class LowRank(NamedTuple):
    """What an adapter adds to a linear layer's result: scale * B (A x)."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float


class AdapterPart(NamedTuple):
    """A ``LowRank`` for the columns [begin, begin + N) of a product. Products that belong together, as those of q, k
    and v, are one, and each of them is a part of it."""

    begin: int
    low_rank: LowRank


@dataclass(frozen=True)
class Adapter:
    """An adapter that is loaded, as requests name it."""

    name: str
    slot: int
    """Its index among the adapters that are loaded."""
    digest: str
    """Of its content; prefixes are shared among requests of equal digests only."""
    path: str
    """Where it was loaded from."""


class AdapterRows(NamedTuple):
    """Which adapter each of a pass's T rows has."""

    slots_T: Tensor
    """int32, on the model's device; -1 for none."""
    groups: Iterable[tuple[int, Tensor]]
    """(slot, int64 rows) of each adapter that the pass has, on the model's device. A pass that reads them cannot be
    recorded, because every replay would see those of the recorded pass."""


class AdaptersProtocol(Protocol):
    """The adapters of a model, each in a slot. Slots are numbers from 0 on."""

    def prepare(self, changes: Mapping[str, LowRank]) -> Any:
        """Convert an adapter's changes, by the paths of the layers, to the form that ``put`` takes. Any thread may call
        it while passes run. Raises CheckpointError if it does not fit the model."""

    def put(self, slot: int, prepared: Any) -> None:
        """Have an adapter in a slot; with None, the slot is empty. No pass is under way."""

    def applied(self, rows: AdapterRows) -> AbstractContextManager[None]:
        """While the context is open, the model's passes apply adapters to these rows. Such a pass has all rows in all
        layers (``Pass.rows_N`` is None)."""


@runtime_checkable
class AdaptingModel(Protocol):
    """A model whose linear layers can apply adapters."""

    @property
    def adapters(self) -> AdaptersProtocol | None:
        """None unless ``ModelContext.adapter_slots`` asks for some."""


@runtime_checkable
class NamesBase(Protocol):
    """An adapter's reader that can also say which base it is for; optional."""

    @property
    def base(self) -> str | None:
        """The base's hub id or path, as the adapter has it; None if it says none."""


class AdapterReaderProtocol(Protocol):
    """An adapter's file or folder. Every method may raise CheckpointError."""

    def changes(self) -> Mapping[str, LowRank]:
        """What the adapter changes, by the paths of the linear layers: the checkpoint's names of their weights, without
        ``.weight``. Tensors may be views of a file."""


class AdapterFactory(Protocol):
    """Opens an adapter's file or folder; ``config`` is the base's config.json, and ``settings`` its own table,
    ``[adapters.NAME]``. Raises CheckpointError if it is damaged, or asks for something that is not computed."""

    def __call__(self, path: Path, config: Mapping[str, Any], settings: Any) -> AdapterReaderProtocol: ...


@dataclass(frozen=True)
class AdapterRegistration(Registration[AdapterFactory]):
    """A form of adapter, found by the ending of its file's name."""

    suffixes: tuple[str, ...] = ()
    """The endings, such as ".gguf", in lower case; "/" stands for a folder."""
