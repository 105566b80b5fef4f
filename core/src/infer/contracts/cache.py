"""The contract of cache pools, which own the K/V of all sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from infer.contracts.attention import AttentionSpec, KVDtype, Rotary
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.registration import Registration
from infer.contracts.states import State, StateSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BlockState(IntEnum):
    """What a block of the cache is to the sequences."""

    FREE = 0
    OWNED = 1
    """By one sequence."""
    SHARED = 2
    """By several sequences."""
    CACHED = 3
    """By none, but its K/V may be used again."""


class KVCacheView(Protocol):
    """One pass's view of the cache: all that a model sees of it."""

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
    ) -> Tensor:
        """Write the new tokens' K/V, then return causal attention over all positions up to each token's own, [T, H, E].

        If ``rotary`` is given, q and K are normalized and rotated first. K and V are None in a layer that shares those
        of an earlier one: ``layer`` is then the earlier one, which has written them in this pass, and nothing is
        written. Only q is normalized and rotated.
        """


class StatefulView(KVCacheView, Protocol):
    """A view of a pool that keeps states, too."""

    def state(self, layer: int) -> State:
        """The states of a recurrent layer, by its index in ``StatefulModel.states``. A pass hands each layer's to the
        kernels once, and they save the states after it."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """While it is open, passes of this view leave all states as they are, so that one can be run again. It has one
        token for each sequence."""


@dataclass(frozen=True)
class Allocation:
    """A slot that the cache has given to one sequence."""

    slot: int
    num_cached: int = 0
    """How many leading tokens the cache already holds the K/V of; always fewer than the tokens asked for."""


class CachePoolProtocol(Protocol):
    """Owns the K/V of all sequences. A running sequence has a slot: an integer below ``max_batch_size``.

    A pool that does not share K/V between sequences ignores ``reuse``, ``salt`` and ``commit``. What a pool may have
    besides is in protocols of its own: ``SharingPool``, ``TruncatingPool``, ``RoomyPool``,
    ``ForkingPool``, ``StatefulPool``, ``LastingPool`` and ``MappedPool``.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the K/V of all positions, and of all states."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """Allocate a slot with room for all of ``token_ids``; None if there is no room now, or if a ``LastingPool`` is
        ``loading`` K/V of them.

        ``reuse=False`` asks that no cached tokens be used (prompt logprobs need every position computed). Only
        sequences of equal ``salt`` share cached tokens."""

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions in all; False if there is no room now."""

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Say that the K/V of the slot's first ``num_computed`` tokens have been computed and may be shared."""

    def free(self, slot: int) -> None:
        """The slot's sequence has ended: its positions and the slot are free again, but for what is shared."""

    def free_tokens(self) -> int:
        """How many positions can still be allocated, to sequences of full length."""

    def length(self, slot: int) -> int:
        """How many of the slot's positions have been handed to a view for writing."""

    def batched_chunked_prefill_view(
        self, slots: Sequence[int], start_positions: Sequence[int], chunk_lens: Sequence[int]
    ) -> KVCacheView:
        """A view that extends each slot by a chunk. Raises ValueError if a start position is not ``length(slot)``."""

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> KVCacheView:
        """A view that extends each slot by one position, at its current length.

        With ``rows`` the view's tensors keep their addresses from call to call, so that a pass recorded with one view
        can be replayed with the values of a later one. The view then has ``rows`` rows; those beyond the given slots
        repeat the last slot or, in a pool with states, belong to none: what they read and write is nobody's.
        """


@runtime_checkable
class SharingPool(Protocol):
    """A pool in which sequences may share the K/V of a common prefix."""

    @property
    def shares(self) -> bool:
        """Whether they do. Schedulers then make the answers to one prompt wait until the first of them has its prompt
        in the cache."""


@runtime_checkable
class TruncatingPool(Protocol):
    """A pool that can take positions back, as rejected draft tokens require."""

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Keep only the slot's first ``num_tokens`` positions. Raises ValueError if that is more than it holds, or
        fewer than it may share with others."""


@runtime_checkable
class RoomyPool(Protocol):
    """A pool that tells how many positions each slot has room for."""

    @property
    def room(self) -> Sequence[int]:
        """By slot, always the same object. It does not shrink before the slot is freed. Schedulers do not ask the pool
        to ``grow`` a slot within its room."""


@runtime_checkable
class ForkingPool(Protocol):
    """A pool that can use a prefix only up to positions that it has chosen before, and likes to know which."""

    def forks(self, slot: int, positions: Sequence[int]) -> None:
        """Called after ``allocate``, before the slot is extended: ``Request.forks`` of the slot's sequence."""


@runtime_checkable
class StatefulPool(Protocol):
    """A pool that tells how much of its memory states take."""

    @property
    def state_bytes(self) -> int:
        """Of ``nbytes``, those of states."""


@runtime_checkable
class LastingPool(Protocol):
    """A pool that keeps K/V of prefixes where they outlive the process. The engine's thread calls it."""

    @property
    def loading(self) -> bool:
        """Whether the last ``allocate`` was None only because K/V of its tokens are being read; to be tried again."""

    def verify(self, compute: Callable[[Sequence[int]], int | None]) -> None:
        """Called once, while no slot is allocated: compare what was kept with what is computed now, and drop it if it
        differs. ``compute`` returns a slot of these tokens, all computed, which the pool frees; None if it cannot."""

    def rest(self) -> bool:
        """Called while there is nothing to compute: do a little of what is left to keep. False if nothing is left. It
        takes no longer than a step."""

    def close(self) -> None:
        """The engine has ended: keep what is left, as far as a few seconds allow."""


@runtime_checkable
class MappedPool(Protocol):
    """A pool that shows observers a map of itself (``StepRecord.blocks``)."""

    def states(self) -> bytes:
        """A ``BlockState`` per block, each as a byte."""


@dataclass(frozen=True)
class CacheContext:
    """What a cache pool is made from."""

    layers: Sequence[AttentionSpec]
    max_batch_size: int
    max_seq_len: int
    dtype: torch.dtype
    device: torch.device
    kernels: KernelsProtocol
    num_tokens: int | None = None
    """How many positions the pool should hold; None: ``max_batch_size`` * ``max_seq_len``."""
    kv_dtype: KVDtype = "auto"
    """Other than ``auto`` only if the pool's registration and the kernels' say in ``kv_dtypes`` that they know it."""
    max_chunk: int | None = None
    """The most positions by which one pass extends a sequence; None: any number."""
    yet_to_take: int = 0
    """Bytes of the memory that is free now which others will take before the pool is used, such as weights that have
    not been loaded yet."""
    states: Sequence[StateSpec] = ()
    """What recurrent layers keep; only if the pool's registration says in ``states`` that it can keep them."""
    max_drafts: int = 0
    """How many of the positions by which a pass extends a sequence may be taken back, as far as states are concerned:
    K and V can always be. With 0, a pool with states is no TruncatingPool."""
    identity: Callable[[], Mapping[str, str]] | None = None
    """Computes all that the bits of a token's K, V and states depend on, besides the tokens up to it and what is above:
    the checkpoint's content, for example, which takes a while to read. None if they are not to outlive the process."""


class CacheFactory(Protocol):
    """Makes a cache pool; ``settings`` is its own table, ``[cache.NAME]``."""

    def __call__(self, context: CacheContext, settings: Any) -> CachePoolProtocol: ...


@dataclass(frozen=True)
class CacheRegistration(Registration[CacheFactory]):
    """A cache pool that says how long a sequence may become in it, and how it can store K and V."""

    longest: Callable[[CacheContext, Any, int], int] | None = None
    """(context, the pool's settings, bytes that the weights have still to take) -> how many positions of one sequence
    fit into memory. Without it, sequences have at most 4096 positions unless ``engine.max_seq_len`` is set."""
    states: bool = False
    """Whether it keeps the states of recurrent layers, and its views are ``StatefulView``s."""
    kv_dtypes: tuple[str, ...] = ()
    """The values of ``cache.kv_dtype`` other than ``auto`` that it stores K and V by, such as ``int8``; a pool whose
    storage is ``infer.cache.KVStorage`` knows them all."""
