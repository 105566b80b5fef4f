"""How much memory a model takes, found without reading the values of its weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infer.checkpoint.quantize import Quantizer
from infer.contracts.model import ModelProtocol


@dataclass(frozen=True)
class Sketch:
    """A model whose tensors have no values, and what it would take with them."""

    model: ModelProtocol
    quantizer: Quantizer
    """It has counted the weights as the checkpoint has them."""
    nbytes: int
    """Of the weights as the kernels hold them, and of the model's other tensors, such as tables of rotations."""
    peak: int
    """The most that is held at a time while the weights are loaded: those that are packed, the layer that is being
    packed, and a tensor of the file."""
    approximate: str | None = None
    """Why ``nbytes`` and ``peak`` are those of the weights before they are packed; None if they are exact."""


class Meter(TorchDispatchMode):
    """While it is entered, counts the memory that tensors on torch's meta device would take if they were real, or that
    those on another device do: of each storage once, for as long as a tensor uses it."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.live = self.peak = 0
        self._held: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes a second, to keep it away from this class."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type == self._device:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        place, nbytes = storage._cdata, storage.nbytes()
        if place in self._held:
            return

        def gone(_: object) -> None:
            del self._held[place]
            self.live -= nbytes

        self._held[place] = weakref.ref(storage, gone)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class Taken(NamedTuple):
    """What a model takes of a machine's memory."""

    nbytes: int
    """The most at a time, while it is loaded and then: weights and cache, and those of what drafts for it."""
    weights: int
    """Bytes of the weights as the kernels hold them."""
    positions: int
    """How many a sequence may have."""
