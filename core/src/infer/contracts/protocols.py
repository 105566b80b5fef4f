"""The contracts between the engine and its plugins: types, no behaviour.

Shape legend, used throughout: T tokens of a ragged batch, B sequences in it, D hidden size, H query heads, K key/value
heads, E head size, V vocabulary, N sampled rows, P blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.contracts.schedule import Schedule
    from infer.contracts.schedule import Sequence as EngineSequence
    from infer.weight import Weight

PLUGIN_API = 1
"""Version of the contracts in this file and in ``hooks.py``. A plugin states the version it was written for."""


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer asks of the cache; declared once, when the pool is created."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    """Sliding window: position p sees positions p-window+1 .. p. None sees everything before."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap)."""


@dataclass(frozen=True)
class Ragged:
    """One step's queries over block-structured K/V, laid end to end without padding.

    Sequence b's queries are rows ``offsets[b]:offsets[b+1]`` at positions ``starts[b]...``; position p of sequence b is
    kept in block ``block_table_BP[b, p // block_size]`` at offset ``p % block_size``.
    """

    starts: tuple[int, ...]
    """A pass that asks for them is not recorded: a replay would have those of the first pass for ever."""
    lens: tuple[int, ...]
    offsets: tuple[int, ...]
    starts_B: Tensor
    """``starts`` where the kernels run, int32."""
    offsets_B1: Tensor
    """``offsets`` where the kernels run, int32 [B + 1]."""
    block_table_BP: Tensor
    """int32."""
    flat_T: Tensor
    """Where each new token's K/V go, as an index into the blocks laid end to end; int64."""


class HeadNorms(NamedTuple):
    """RMS norms of every head of q and of K."""

    q_weight_E: Tensor
    k_weight_E: Tensor
    eps: float
    unit_offset: bool = False
    """As ``KernelsProtocol.rms_norm``'s."""


class Rotary(NamedTuple):
    """What q and K go through before they meet: norms, where a model has them, and rotation of their halves."""

    cos: Tensor
    """fp32 [T, E/2], or [1, E/2] when the whole batch shares it."""
    sin: Tensor
    norms: HeadNorms | None = None


Activation = Literal["silu", "gelu_pytorch_tanh"]
"""By the hub's names."""


@dataclass(frozen=True)
class Draws:
    """How N tokens are to be drawn: tensors of N values on the logits' device."""

    temperature_N: Tensor
    """fp32; 0 takes the likeliest token, whatever the rest says."""
    top_k_N: Tensor
    """int64; 0 keeps all."""
    top_p_N: Tensor
    """fp32; 1 keeps all."""
    min_p_N: Tensor
    """fp32; 0 keeps all."""
    uniform_N: Tensor
    """float64 in [0, 1): each row's own random number."""
    greedy: bool
    """No row is drawn at random."""
    ranked: bool
    """Some row has a top-k or top-p."""


class RecorderProtocol(Protocol):
    """Runs a pass, and records it on the way."""

    @property
    def cheap(self) -> bool:
        """Recording costs no more than running."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        """What the pass yields, and a function that does it again to the same tensors; or why there is none, as who
        did what. The function returns such words too, where it turns out that the pass has to be run.

        Two functions of a cheap recorder's are equal if they do the same with the same numbers.
        """


@runtime_checkable
class KernelsProtocol(Protocol):
    """The arithmetic. ``infer/kernels/reference.py`` is the meaning of every method; a provider subclasses it and
    replaces any subset. Every row of a result depends on that row of the input alone, bit for bit."""

    def recorder(self) -> RecorderProtocol | None:
        """What records decode passes; None where they cannot be. Whatever differs between passes of one shape is then
        read from tensors, where the kernels run, and nothing waits."""

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        """Turn a weight, plain or grouped (``infer/weight.py``), into what ``linear`` and ``embedding`` like best. What
        is kept of it is copied. Kernels that do not multiply such weights raise a SettingsError that says so."""

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor: ...

    def pack_gated(self, gate_up_NK: Weight, bias_N: Tensor | None = None) -> Any:
        """``pack`` for ``gated_linear``: the upper half of the rows makes the gate."""

    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Activation) -> Tensor:
        """``gated`` of the product, [T, N/2]."""

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        """Rows of a packed weight [V, D]: a model whose head is tied to its embedding holds it once."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """Over the last dimension. ``unit_offset`` scales by (1 + weight), as Gemma does."""

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""

    def rope(self, q_THE: Tensor, k_TKE: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """q and K, normed and rotated."""

    def rope_store_kv(
        self,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        rotary: Rotary,
        k_cache: Tensor,
        v_cache: Tensor,
        flat_T: Tensor,
    ) -> Tensor:
        """``rope``, then ``store_kv`` of the rotated K; returns the rotated q."""

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(left half) * right half of the last dimension."""

    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: Tensor, v_cache: Tensor, flat_T: Tensor) -> None:
        """Write each token's K and V at its flat index of the caches [blocks, block_size, K, E]."""

    def extend_attention(
        self, q_THE: Tensor, k_cache: Tensor, v_cache: Tensor, ragged: Ragged, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each query over its sequence's cached positions up to and including its own."""

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        """A token per row, int64 [N]; -1 where the logits have no finite maximum.

        Inverse-transform sampling in vocabulary order over what the filters keep. Filters are thresholds on
        probability, so that ties stay together: temperature, then top-k, then top-p over what top-k left, then min-p.
        """


class KVCacheView(Protocol):
    """One step's window on the cache; all that a model sees of it."""

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Write K/V of the new tokens, then return attention over everything before and in the chunk, [T, H, E].

        ``rotary`` has q and K normed and rotated first.
        """


@dataclass(frozen=True)
class Allocation:
    """A place in the cache for one sequence."""

    slot: int
    num_cached: int = 0
    """Leading tokens whose K/V the cache already holds; always fewer than the tokens asked for."""


class CachePoolProtocol(Protocol):
    """Owns the K/V of all sequences. Slots are small integers below ``max_batch_size``.

    A pool that shares nothing disregards ``reuse``, ``salt`` and ``commit``. One whose ``shares`` is True lets
    sequences share what their tokens begin with; schedulers then have the answers to one prompt wait until the first of
    them has its prompt in the cache. A pool that can take back positions has ``truncate(slot, num_tokens)``: see
    ``infer.cache.TruncatingBooks``.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the K/V of all positions."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """Room for all of ``token_ids``, or None when there is none now.

        ``reuse=False`` asks for no cached tokens (prompt logprobs need every position computed). Tokens are shared
        between sequences of equal ``salt`` only.
        """

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions in all; False when there is none now."""

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        """The K/V of the leading ``num_computed`` of the slot's tokens have been computed: they may be shared."""

    def free(self, slot: int) -> None: ...

    def free_tokens(self) -> int:
        """Positions that could still be allocated."""

    def length(self, slot: int) -> int:
        """Positions of the slot that have been handed to a view for writing."""

    def batched_chunked_prefill_view(
        self, slots: Sequence[int], start_positions: Sequence[int], chunk_lens: Sequence[int]
    ) -> KVCacheView:
        """A view that extends each slot by a chunk. A start position other than ``length(slot)`` is a ValueError."""

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> KVCacheView:
        """The same with every length 1, at each slot's current length.

        ``rows`` asks for a view on tensors that stay where they are, so that a pass recorded with one such view may be
        replayed after the next was made: of so many rows, whatever the slots need beyond the first ones repeating
        the last slot.
        """


@dataclass(frozen=True, eq=False)
class Pass:
    """What goes through a model at once: T tokens of several sequences, end to end without padding. It may get further
    fields; a model takes those that concern it."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64; each token's index in its sequence."""
    cache: KVCacheView
    rows_N: Tensor | None = None
    """int64: the tokens whose hidden states are wanted; None for all. N may be 0."""


class ModelProtocol(Protocol):
    """A decoder. It never sees masks, slots, pages or padding."""

    @property
    def attention(self) -> Sequence[AttentionSpec]:
        """One per layer, in the order of ``attend``'s layer index."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: Pass) -> Tensor:
        """Hidden states after the last norm, [N, D], of the tokens that are wanted. What the last layer does after
        attention need be done for these only."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] in the model's dtype."""

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor that ``load`` asks for: what made-up weights are made from."""

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        """Take the checkpoint's weights. A missing, unexpected or misshapen one is a CheckpointError."""


class TensorFilesProtocol(Protocol):
    """A checkpoint's tensors as its files have them."""

    def names(self) -> Iterable[str]:
        """In the order in which they are read fastest."""

    def tensor(self, name: str) -> Tensor:
        """A view of the file: whoever keeps it copies it."""


class WeightFormatProtocol(Protocol):
    """How a checkpoint stores the weights that models ask for by name."""

    def names(self) -> Iterable[str]:
        """Of all weights that the checkpoint has, as models call them, in the order in which they are read fastest."""

    def weight(self, name: str) -> Weight:
        """It may be a view of the file: whoever keeps it copies it. A damaged one is a CheckpointError."""


class SchedulerProtocol(Protocol):
    """Decides who computes what in a step. Integers only: no tensors, no text."""

    def add(self, sequence: EngineSequence) -> None: ...

    def schedule(self) -> Schedule:
        """Plan one step; empty passes when nothing can run."""

    def finish(self, sequence: EngineSequence) -> None:
        """The sequence has ended, whether it runs or waits: free its room at once."""

    def has_work(self) -> bool: ...


class ObserverProtocol(Protocol):
    """Watches the engine. It has ``infer_step_finished``, ``infer_request_finished`` or both, called in the engine's
    thread as the hooks of these names are, and perhaps ``close``, called once when the engine has ended."""


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
    """Positions that are wanted in all; None: as many as ``max_batch_size`` sequences of ``max_seq_len`` have."""


@dataclass(frozen=True)
class ModelContext:
    """What a model is made from, besides its config."""

    kernels: KernelsProtocol
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int


@dataclass(frozen=True)
class SchedulerContext:
    """What a scheduler is made from. ``engine`` is the settings' section of that name."""

    pool: CachePoolProtocol
    engine: Any


class CacheFactory(Protocol):
    def __call__(self, context: CacheContext, settings: Any) -> CachePoolProtocol: ...


class ModelFactory(Protocol):
    def __call__(self, config: Mapping[str, Any], context: ModelContext, settings: Any) -> ModelProtocol: ...


class WeightFormatFactory(Protocol):
    def __call__(
        self, config: Mapping[str, Any], files: TensorFilesProtocol, settings: Any
    ) -> WeightFormatProtocol: ...


class SchedulerFactory(Protocol):
    def __call__(self, context: SchedulerContext, settings: Any) -> SchedulerProtocol: ...


class KernelsFactory(Protocol):
    def __call__(self, device: torch.device, settings: Any) -> KernelsProtocol: ...


class ObserverFactory(Protocol):
    def __call__(self, settings: Any) -> ObserverProtocol: ...


class NoSettings(BaseModel, extra="forbid"):
    """For plugins that need none."""
