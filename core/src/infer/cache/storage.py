"""K/V in blocks, and a pass's view of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from infer.cache.arrays import Ints, Ints64
from infer.cache.states import PassStates
from infer.contracts.attention import KV, AttentionSpec, QuantizedKV, Ragged, Rotary
from infer.contracts.cache import CacheContext, KVCacheView
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.states import State
from infer.device import FixedTensor, caller, clear_first_pages, upload, zeros

Table_contra = TypeVar("Table_contra", contravariant=True)
View_co = TypeVar("View_co", bound=KVCacheView, covariant=True)


class StorageProtocol(Protocol[Table_contra, View_co]):
    """What ``Pool`` needs from a storage: its views, and its size."""

    @property
    def nbytes(self) -> int:
        """Bytes of everything that grows with the number of positions."""

    def view(self, table: Table_contra, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> View_co:
        """A view that extends sequence b, whose blocks are row b of the table, by positions
        [starts[b], starts[b] + lens[b])."""

    def fixed_view(self, table: Table_contra, starts: Sequence[int] | Ints) -> View_co:
        """A view that extends each sequence by one position, on tensors that keep their addresses from one such view to
        the next, as ``CachePoolProtocol.decode_view`` describes. The next such view overwrites them."""


class FixedRagged(Ragged):
    """A view's ``Ragged`` whose tensors keep their addresses. A replay cannot follow a change of ``starts``, which are
    Python integers, so ``read`` names the function that has read them."""

    read: str | None = None

    def __getattribute__(self, name: str) -> Any:
        if name != "starts":
            return super().__getattribute__(name)
        vars(self)["read"] = f"{caller()} reads Ragged.starts"
        return tuple(map(int, vars(self)["starts"]))


class ExtendView:
    """One pass's view of the storage. Everything is an extend: full prefills, chunks and decodes differ only in their
    lengths."""

    def __init__(self, storage: KVStorage, *raggeds: Ragged) -> None:
        """``raggeds`` has one for each of the storage's tables."""
        self.storage = storage
        self.raggeds = raggeds
        self.states: PassStates | None = None
        """Those of recurrent layers; the pool sets them."""

    @property
    def ragged(self) -> Ragged:
        """That of the first table, or of the only one."""
        return self.raggeds[0]

    def state(self, layer: int) -> State:
        """``StatefulView.state``."""
        return self._states.state(layer)

    def rehearsal(self) -> AbstractContextManager[None]:
        """``StatefulView.rehearsal``."""
        return self._states.rehearsal()

    @property
    def _states(self) -> PassStates:
        assert self.states is not None, "the pool was made for a model without recurrent layers"
        return self.states

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
    ) -> Tensor:
        s = self.storage
        ragged = self.raggeds[s.table_of[layer]]
        k_cache, v_cache = s.k[layer], s.v[layer]
        if k_TKE is None or v_TKE is None:
            if rotary is not None:
                q_THE, _ = s.kernels.rope(q_THE, q_THE[:, :1], rotary)
        elif rotary is None:
            s.kernels.store_kv(k_TKE, v_TKE, k_cache, v_cache, ragged.flat_T)
        else:
            q_THE = s.kernels.rope_store_kv(q_THE, k_TKE, v_TKE, rotary, k_cache, v_cache, ragged.flat_T)
        return s.kernels.extend_attention(q_THE, k_cache, v_cache, ragged, s.layers[layer])


class KVStorage:
    """K and V of every layer, [num_blocks, block_size, K, E] each, stored as the context's ``kv_dtype`` says.

    There is one block table for all layers, or there are several, each for the layers that ``tables`` lists. The first
    layers of all tables then share their memory, and so do the second ones and so on: a block belongs to one table at a
    time, whichever needs it. All layers of a table then have as many values per position, and where another table's
    have n times as many, n layers have their part of a block where that one has one: in memory, a block of the wider
    layers is n blocks of the narrower ones.

    V is K if all layers have ``v_is_k``, unless the view has an ``attend`` of its own, which may store both.

    Blocks start as zeros, so that a kernel that reads past what has been written reads finite values. A subclass that
    stores or reads in another way has a ``view_type`` of its own.
    """

    view_type: type[ExtendView] = ExtendView

    def __init__(
        self,
        context: CacheContext,
        num_blocks: int,
        block_size: int,
        tables: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.block_size = block_size
        self.layers: list[AttentionSpec] = list(context.layers)
        v_is_k = self._shares(self.layers)
        self.kernels: KernelsProtocol = context.kernels
        self.device = context.device
        tables = [range(len(self.layers))] if tables is None else tables
        place = {layer: (u, i) for u, layers in enumerate(tables) for i, layer in enumerate(layers)}
        self.table_of = [place[layer][0] for layer in range(len(self.layers))]
        """Per layer, the index of its table."""
        self.scratch = num_blocks
        """The block of the rows that pad a pass, if there are states: such a row computes something else than the slot
        whose K and V it would otherwise write again."""
        num_blocks += bool(context.states)
        parts = parts_of_a_place(self.layers, tables)
        self._parts_U11 = np.array(parts, dtype=np.int32)[:, None, None] if max(parts) > 1 else None
        places = _places(self.layers, tables)
        halves = [0.0] if v_is_k else [0.0, 0.5]
        memory = [
            [_Memory(num_blocks, block_size, width, heads, context, share=(i + half) / len(places)) for half in halves]
            for i, (width, heads) in enumerate(places)
        ]
        self.k: list[KV] = []
        self.v: list[KV] = self.k if v_is_k else []
        both = [self.k] if v_is_k else [self.k, self.v]
        for layer, spec in enumerate(self.layers):
            u, i = place[layer]
            at, part = divmod(i, parts[u])
            for caches, one in zip(both, memory[at], strict=True):
                caches.append(one.of(spec, part))
        self._nbytes = num_blocks * block_size * self.bytes_per_token(context, tables)
        size, blocks = context.max_batch_size, -(-context.max_seq_len // block_size)
        self._rows = np.arange(size)
        self._offsets_S1 = torch.arange(size + 1, dtype=torch.int32, device=context.device)
        self._starts_S = FixedTensor(torch.zeros(size, dtype=torch.int32, device=context.device))
        self._tables_USP = FixedTensor(
            torch.zeros((len(tables), size, blocks), dtype=torch.int32, device=context.device)
        )
        self._flat_US = FixedTensor(torch.zeros((len(tables), size), dtype=torch.int64, device=context.device))
        self._fixed: dict[int, list[FixedRagged]] = {}
        """The fixed views' ``Ragged``s, by number of rows."""
        clear_first_pages([one.values for kinds in memory for one in kinds])

    @classmethod
    def bytes_per_token(cls, context: CacheContext, tables: Sequence[Sequence[int]] | None = None) -> int:
        """Bytes of one position's K/V in all layers or, with several tables, in a block of one of them."""
        value, head = context.dtype.itemsize, 0
        if context.kv_dtype == "int8":
            value, head = torch.int8.itemsize, torch.float32.itemsize
        places = _places(context.layers, [range(len(context.layers))] if tables is None else tables)
        kinds = 1 if cls._shares(context.layers) else 2
        return sum(kinds * (width * value + sum(heads.values()) * head) for width, heads in places)

    @classmethod
    def _shares(cls, layers: Sequence[AttentionSpec]) -> bool:
        """Whether V is K."""
        return cls.view_type.attend is ExtendView.attend and bool(layers) and all(spec.v_is_k for spec in layers)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def view(self, table: Ints, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> ExtendView:
        """``table`` is [B, P], or [U, B, P] of U tables."""
        table = self._in_memory(table)
        starts_B, lens_B = np.asarray(starts, dtype=np.int32), np.asarray(lens, dtype=np.int32)
        offsets_B1 = np.zeros(len(lens_B) + 1, dtype=np.int32)
        np.cumsum(lens_B, out=offsets_B1[1:])
        sequence_T = np.repeat(np.arange(len(lens_B)), lens_B)
        position_T = np.arange(offsets_B1[-1]) - np.repeat(offsets_B1[:-1] - starts_B, lens_B)
        starts_, lens_, offsets = tuple(starts_B.tolist()), tuple(lens_B.tolist()), tuple(offsets_B1.tolist())
        on_device_B, offsets_on_device_B1 = upload(starts_B, self.device), upload(offsets_B1, self.device)
        blocks = upload(table, self.device)
        flat = upload(self._flat(table, sequence_T, position_T), self.device)
        each = [(blocks, flat)] if table.ndim == 2 else zip(blocks, flat, strict=True)
        return self.view_type(
            self, *(Ragged(starts_, lens_, offsets, on_device_B, offsets_on_device_B1, *both) for both in each)
        )

    def fixed_view(self, table: Ints, starts: Sequence[int] | Ints) -> ExtendView:
        table, starts_B = self._in_memory(table), np.asarray(starts, dtype=np.int32)
        rows = len(starts_B)
        if (raggeds := self._fixed.get(rows)) is None:
            raggeds = self._fixed[rows] = [
                FixedRagged(
                    starts=(),
                    lens=(1,) * rows,
                    offsets=tuple(range(rows + 1)),
                    starts_B=self._starts_S.tensor[:rows],
                    offsets_B1=self._offsets_S1[: rows + 1],
                    block_table_BP=blocks_SP[:rows],
                    flat_T=flat_S[:rows],
                )
                for blocks_SP, flat_S in zip(self._tables_USP.tensor, self._flat_US.tensor, strict=True)
            ]
        self._starts_S.write(starts_B)
        flat = self._flat(table, self._rows[:rows], starts_B)
        self._tables_USP.write(table if table.ndim == 3 else table[None])
        self._flat_US.write(flat if flat.ndim == 2 else flat[None])
        for ragged in raggeds:
            vars(ragged).update(starts=starts_B, read=None)
        return self.view_type(self, *raggeds)

    def _in_memory(self, table: Ints) -> Ints:
        """The tables' blocks as each table's layers count them."""
        return table if self._parts_U11 is None else table * self._parts_U11

    def _flat(self, table: Ints, sequence_T: Ints64, position_T: Ints | Ints64) -> Ints64:
        """The indices, into all blocks laid end to end, of the given positions of the given sequences (rows of the
        table): [T], or [U, T] of U tables."""
        block_T, within_T = np.divmod(position_T, self.block_size)
        flat = table[..., sequence_T, block_T].astype(np.int64) * self.block_size + within_T
        return np.ascontiguousarray(flat)


def width(spec: AttentionSpec) -> int:
    """How many values K has for one position of a layer, and V as well."""
    return spec.num_kv_heads * spec.head_size


def parts_of_a_place(layers: Sequence[AttentionSpec], tables: Sequence[Sequence[int]]) -> list[int]:
    """Per table, how many of its layers have their part of a block where the widest layer has one."""
    if len(tables) == 1:
        return [1]
    widths = [width(layers[table[0]]) for table in tables]
    return [max(widths) // each for each in widths]


def _places(
    layers: Sequence[AttentionSpec], tables: Sequence[Sequence[int]]
) -> list[tuple[int, dict[tuple[int, int], int]]]:
    """Per place in a block: how many values K has there for one position, and how many heads these are for each shape
    (K, E) that layers have there."""
    places: list[tuple[int, dict[tuple[int, int], int]]] = []
    for table, parts in zip(tables, parts_of_a_place(layers, tables), strict=True):
        for i, layer in enumerate(table[::parts]):
            spec = layers[layer]
            if i == len(places):
                places.append((0, {}))
            most, heads = places[i]
            heads[spec.num_kv_heads, spec.head_size] = parts * spec.num_kv_heads
            places[i] = max(most, parts * width(spec)), heads
    return places


class _Memory:
    """K, or V, of the layers that share a place: they share values, but scales only with layers of their shape, whose
    blocks have as many."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        width: int,
        heads: Mapping[tuple[int, int], int],
        context: CacheContext,
        *,
        share: float,
    ) -> None:
        self.block_size = block_size
        self._found: dict[tuple[int, int, int], KV] = {}
        plain = context.kv_dtype == "auto"
        dtype = context.dtype if plain else torch.int8
        self.values = zeros((num_blocks * block_size * width,), dtype, context.device, share=share)
        self.scales: dict[tuple[int, int], Tensor] = {}
        if not plain:
            self.scales = {
                shape: zeros((num_blocks * block_size * count,), torch.float32, context.device, share=share)
                for shape, count in heads.items()
            }

    def of(self, spec: AttentionSpec, part: int) -> KV:
        """A layer's blocks, of which the first is block ``part`` of this memory."""
        K, E = spec.num_kv_heads, spec.head_size
        if (found := self._found.get((K, E, part))) is None:
            begin, size = part * self.block_size, (self.block_size, K)
            found = values = self.values[begin * K * E :].view(-1, *size, E)
            if self.scales:
                found = QuantizedKV(values, self.scales[K, E][begin * K :].view(-1, *size))
            self._found[K, E, part] = found
        return found
