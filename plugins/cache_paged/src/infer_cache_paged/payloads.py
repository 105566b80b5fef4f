"""The bytes of a block: what a tier keeps of it, and how they get out of the pool's tensors and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from infer.cache import KVStorage, StateStorage
from infer.cache.storage import parts_of_a_place
from infer.contracts.attention import QuantizedKV
from infer_cache_paged.pages import Block, Group
from infer_cache_paged.tier import Payload


class Payloads:
    """Copies blocks of a pool. ``tables`` are the layers of each block table, in the groups' order."""

    def __init__(
        self,
        storage: KVStorage,
        tables: Sequence[tuple[int | None, Sequence[int]]],
        groups: Sequence[Group],
        states: StateStorage | None,
    ) -> None:
        self.storage = storage
        self.state_storage = states
        layers = [each for _, each in tables]
        parts = iter(zip(layers, parts_of_a_place(storage.layers, layers), strict=True))
        self._groups = [[next(parts) for _ in range(group.pages)] for group in groups]
        """Per group, for each of a block's pages, the layers and the number by which they count it."""
        zero = [(0,) * group.pages for group in groups]
        self.nbytes = [sum(piece.nbytes for piece in self._block(k, block)) for k, block in enumerate(zero)]
        """Per group, the bytes of a block."""
        self.state_bytes = 0 if states is None else sum(piece.nbytes for piece in self._row(0))

    def layout(self) -> str:
        """How the bytes of all groups and of a state are laid out."""
        groups = [
            [(kv.shape[1:], str(kv.dtype)) for kv in self._block(k, (0,) * len(tables))]
            for k, tables in enumerate(self._groups)
        ]
        layers = [[layers for layers, _ in tables] for tables in self._groups]
        states = [] if self.state_storage is None else [(piece.shape, str(piece.dtype)) for piece in self._row(0)]
        return json.dumps([layers, groups, states])

    def block(self, k: int, block: Block) -> Payload:
        """A copy of a group's block."""
        return _copied(self._block(k, block))

    def state(self, row: int) -> Payload:
        """A copy of a row of the recurrent layers' states."""
        return _copied(self._row(row))

    @torch.inference_mode()
    def write_block(self, k: int, block: Block, payload: Payload) -> None:
        self._write(self._block(k, block), payload)

    @torch.inference_mode()
    def write_state(self, row: int, payload: Payload) -> None:
        self._write(self._row(row), payload)

    def _write(self, pieces: Iterator[Tensor], payload: Payload) -> None:
        if not payload:  # of a model without attention
            return
        data, begin = torch.frombuffer(payload, dtype=torch.uint8).to(self.storage.device), 0
        for piece in pieces:
            flat = piece.reshape(-1).view(torch.uint8)
            flat.copy_(data[begin : begin + len(flat)])
            begin += len(flat)

    def _block(self, k: int, block: Block) -> Iterator[Tensor]:
        """The tensors that a block consists of, each contiguous."""
        for (layers, parts), page in zip(self._groups[k], block, strict=True):
            for layer in layers:
                keys, values = self.storage.k[layer], self.storage.v[layer]
                for kv in (keys,) if values is keys else (keys, values):
                    for tensor in (kv.codes, kv.scales) if isinstance(kv, QuantizedKV) else (kv,):
                        yield tensor[page * parts]

    def _row(self, row: int) -> Iterator[Tensor]:
        if self.state_storage is not None:
            for layer in self.state_storage.parts:
                for part in layer:
                    yield part[row]


def _copied(pieces: Iterator[Tensor]) -> Payload:
    parts = [piece.reshape(-1).view(torch.uint8) for piece in pieces]
    return torch.cat(parts).cpu().numpy().data if parts else bytearray()
