"""Which adapter each slot has, and which open requests use it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.contracts.adapters import Adapter
from infer.contracts.request import Request
from infer.device import caller, upload
from infer.errors import RequestError


@dataclass
class RowGroups:
    """The ``groups`` of a pass's ``AdapterRows``, made when they are asked for. A replay cannot follow them, so
    ``read`` names the function that has asked."""

    slots_T: np.ndarray[tuple[int], np.dtype[np.int64]]
    device: torch.device
    read: str | None = None
    _made: Sequence[tuple[int, Tensor]] = ()

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        if self.read is None:
            self.read = f"{caller()} reads AdapterRows.groups"
            slots = np.unique(self.slots_T).tolist()
            groups = [(slot, np.flatnonzero(self.slots_T == slot)) for slot in slots if slot >= 0]
            self._made = [(slot, upload(rows, self.device)) for slot, rows in groups]
        return iter(self._made)


class AdapterSlots:
    """The slots of adapters. All methods may be called from any thread.

    A slot is free, reserved while its adapter is read, or has an adapter that requests may ask for. An adapter that is
    let go serves the requests that are open; after the last of them, ``empty`` is called with its slot, which is free
    once ``release`` is called."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._count = count
        self._reserved: set[str] = set()
        self._loaded: dict[str, Adapter] = {}
        self._open: Counter[int] = Counter()
        """How many open requests use each slot."""
        self._leaving: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()

    @property
    def loaded(self) -> Sequence[Adapter]:
        """Those that requests may ask for, by name."""
        with self._lock:
            return [self._loaded[name] for name in sorted(self._loaded)]

    def find(self, name: str) -> Adapter | None:
        """The adapter of that name that requests may ask for."""
        return self._loaded.get(name)

    def reserve(self, name: str) -> int:
        """A free slot for an adapter of this name. Raises RequestError if there is one already, or no slot."""
        with self._lock:
            if name in self._loaded or name in self._reserved:
                raise RequestError(
                    f"An adapter {name!r} is loaded already; unload it first, or choose another name.",
                    param="lora_name",
                )
            if not self._free:
                raise RequestError(
                    f"All {self._count} slots of adapters are taken (adapters.max_loaded); unload one first. Its slot "
                    "is free after its last request.",
                    param="lora_name",
                )
            self._reserved.add(name)
            return self._free.pop()

    def give_up(self, name: str, slot: int) -> None:
        """A reserved slot gets no adapter."""
        with self._lock:
            self._reserved.remove(name)
            self._free.append(slot)

    def open(self, adapter: Adapter) -> None:
        """The adapter is in its reserved slot: requests may ask for it from now on."""
        with self._lock:
            self._reserved.remove(adapter.name)
            self._loaded[adapter.name] = adapter

    def let_go(self, name: str, empty: Callable[[int], None]) -> Adapter | None:
        """Take an adapter out of those that requests may ask for; None if there is none of that name."""
        with self._lock:
            adapter = self._loaded.pop(name, None)
            if adapter is not None and self._open[adapter.slot]:
                self._leaving[adapter.slot] = empty
                return adapter
        if adapter is not None:
            empty(adapter.slot)
        return adapter

    def release(self, slot: int) -> None:
        """A slot is empty, and free again."""
        with self._lock:
            self._free.append(slot)

    def take(self, requests: Iterable[Request]) -> None:
        """These requests are open from now on. Raises RequestError, and takes none, if the adapter of one is gone."""
        with self._lock:
            wanted = [request.adapter for request in requests if request.adapter is not None]
            for adapter in wanted:
                if self._loaded.get(adapter.name) is not adapter:
                    raise RequestError(
                        f"The adapter {adapter.name!r} has been unloaded; load it again, or ask for another model.",
                        param="model",
                        code="model_not_found",
                    )
            self._open.update(adapter.slot for adapter in wanted)

    def end(self, adapter: Adapter | None) -> None:
        """A request with this adapter has ended."""
        if adapter is None:
            return
        with self._lock:
            self._open[adapter.slot] -= 1
            empty = None if self._open[adapter.slot] else self._leaving.pop(adapter.slot, None)
        if empty is not None:
            empty(adapter.slot)
