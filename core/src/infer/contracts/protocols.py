"""The contracts between the engine and its plugins: types, no behaviour.

Shape legend, used throughout: T tokens of a ragged batch, B sequences in it, D hidden size, H query heads, K key/value
heads, E head size, V vocabulary size, N wanted rows, P blocks per sequence. Of a weight [N, K], N is the number of
outputs and K the number of inputs. In mixtures of experts, X is the number of experts, J of those that a token has, and
I the size of an expert's hidden values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from pydantic import BaseModel

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    import torch
    from aiohttp.typedefs import Handler
    from tokenizers import Tokenizer
    from torch import Tensor

    from infer.contracts.request import Request
    from infer.contracts.schedule import Schedule
    from infer.contracts.schedule import Sequence as EngineSequence
    from infer.weight import GroupedWeight, Weight

PLUGIN_API = 1
"""Version of the contracts in this file and in ``hooks.py``. A plugin states which version it was written for."""


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer needs from the cache; declared once, when the pool is created."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    """Sliding window: position p attends to positions p-window+1 .. p. None: to all positions up to p."""
    soft_cap: float | None = None
    """If set, scores become soft_cap * tanh(scores / soft_cap)."""
    sinks_H: Tensor | None = field(default=None, compare=False)
    """If set, a logit for each query head that joins the denominator of its softmax and adds no value; fp32, on the
    kernels' device. It is not scaled or capped. The spec is declared before the weights are loaded: the model makes the
    tensor with the spec, and writes the values into it when it loads them."""


@dataclass(frozen=True)
class Ragged:
    """Where the tokens of one pass are: the rows of its queries, and the blocks of its K/V.

    The sequences' tokens are laid end to end without padding. Rows ``offsets[b]:offsets[b+1]`` belong to sequence b, at
    positions ``starts[b]`` and up. Position p of sequence b is stored in block ``block_table_BP[b, p // block_size]``
    at offset ``p % block_size``. Layers may have tables of their own. A block that lies wholly behind a layer's window
    for all of the sequence's queries may be any block of finite values."""

    starts: tuple[int, ...]
    """Each sequence's first position in this pass. A pass that reads them cannot be recorded, because every replay
    would see the values of the recorded pass."""
    lens: tuple[int, ...]
    """Each sequence's number of tokens in this pass."""
    offsets: tuple[int, ...]
    starts_B: Tensor
    """``starts`` on the kernels' device, int32."""
    offsets_B1: Tensor
    """``offsets`` on the kernels' device, int32 [B + 1]."""
    block_table_BP: Tensor
    """int32."""
    flat_T: Tensor
    """int64: where each new token's K/V are written, as an index into all blocks laid end to end."""


@dataclass(frozen=True)
class QuantisedKV:
    """K, or V, of one layer as codes of 8 bits, with a scale for each token's head: a value is code * scale.

    A token's codes and scales depend on that token alone. If m is the greatest magnitude of a head's values, the scale
    is m / 127, and a code is value / scale, rounded to the nearest integer and from the middle to the even one. If m is
    below 2^-100, scale and codes are 0. If a value is NaN or infinite, the scale is NaN and the codes are 0, so that
    every query that attends to the token gets NaN."""

    codes: Tensor
    """int8 [blocks, block_size, K, E]."""
    scales: Tensor
    """fp32 [blocks, block_size, K]."""

    @property
    def shape(self) -> torch.Size:
        """[blocks, block_size, K, E]."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


KV: TypeAlias = "Tensor | QuantisedKV"
"""K or V of one layer in the cache, [blocks, block_size, K, E]: in the model's dtype, or quantised."""
KVDtype = Literal["auto", "int8"]
"""How a cache stores K and V: in the model's dtype, or as ``QuantisedKV``."""


class HeadNorms(NamedTuple):
    """RMS norms that are applied to each head of q and K."""

    q_weight_E: Tensor
    k_weight_E: Tensor
    eps: float
    unit_offset: bool = False
    """As in ``KernelsProtocol.rms_norm``."""


class Rotary(NamedTuple):
    """What is done to q and K before attention: norms, if the model has them, then rotation of each head's two halves
    against each other."""

    cos: Tensor
    """fp32 [T, E/2], or [1, E/2] if all tokens share it."""
    sin: Tensor
    norms: HeadNorms | None = None


Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""Activation functions, by their names in ``config.json``; ``clamped_swiglu`` is gpt-oss's (see ``gated``)."""


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen by its router logits, and which share each of them has in the result.

    The ``top`` experts of the highest scores are chosen, the highest first; of equal scores, the one of the expert with
    the lower index counts as higher. To choose first and take the softmax of the chosen is the same as ``softmax`` with
    ``renormalise``."""

    top: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of the logits, in fp32. A selection bias is added to sigmoids, only to choose by the sums."""
    renormalise: bool = True
    """Whether shares are the scores divided by the sum of those that are chosen, or the scores themselves."""
    scale: float = 1.0
    """What shares are multiplied by in the end."""


class Expert(NamedTuple):
    """One expert of a mixture: a gated MLP."""

    gate_up_NK: Weight
    """[2 I, D]: the first half of the rows computes the gate, the other the values."""
    down_NK: Weight
    """[D, I]."""
    gate_up_bias_N: Tensor | None = None
    down_bias_N: Tensor | None = None


@dataclass(frozen=True)
class Draws:
    """How to draw N tokens. All tensors have N values and are on the logits' device."""

    temperature_N: Tensor
    """fp32; 0 takes the likeliest token, whatever the other fields say."""
    top_k_N: Tensor
    """int64; 0 keeps all."""
    top_p_N: Tensor
    """fp32; 1 keeps all."""
    min_p_N: Tensor
    """fp32; 0 keeps all."""
    uniform_N: Tensor
    """float64 in [0, 1): one random number per row."""
    greedy: bool
    """True if every row has temperature 0."""
    ranked: bool
    """True if any row has a top-k or top-p filter."""


class RecorderProtocol(Protocol):
    """Runs a pass and records it, so that it can be replayed."""

    @property
    def cheap(self) -> bool:
        """True if recording a pass costs no more than running it."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        """Run ``run`` and return its result, with a function that replays it on the same tensors.

        If the pass cannot be recorded, a reason ("who did what") stands in place of the function. The function returns
        such a reason itself if it finds that the pass has to be run instead.

        Two functions that a cheap recorder returned compare equal if they do the same operations with the same numbers.
        """


@runtime_checkable
class KernelsProtocol(Protocol):
    """The arithmetic of a model. ``infer/kernels/reference.py`` defines what every method computes; a provider
    subclasses it and overrides any subset. Each row of a result depends, bit for bit, on that row of the input
    alone.

    Weights without values, on torch's meta device, are packed as well, into tensors on that device, of as many bytes as
    the real ones have: so ``infer doctor``, and the length of sequences by default, know what weights will take before
    any is read.
    """

    def recorder(self) -> RecorderProtocol | None:
        """What records decode passes; None if these kernels cannot be recorded. With a recorder, the kernels read
        whatever differs between passes of one shape from tensors on their device, and never wait for the device."""

    def quantise(self, weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
        """A plain weight in codes, as ``model.quantization`` asks while a checkpoint is loaded. The result has the bits
        of ``infer/kernels/quantise.py`` whatever the kernels are, and it is where ``weight_NK`` is."""

    def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
        """Convert a weight, plain or grouped (``infer/weight.py``), to the layout that ``linear`` and ``embedding``
        work on. The result is a copy: it keeps no reference to ``weight_NK``. Kernels that do not support such weights
        raise a SettingsError."""

    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        """x W^T + bias, [T, N]."""

    def pack_gated(self, gate_up_NK: Weight, bias_N: Tensor | None = None) -> Any:
        """``pack`` for ``gated_linear``: the first N/2 rows of the weight compute the gate, the others the values."""

    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Activation) -> Tensor:
        """``gated`` of ``linear``, [T, N/2]."""

    def route(self, logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Each token's experts, int32 [T, J], and their shares, fp32 [T, J]. ``bias_X`` is the selection bias, fp32,
        with sigmoids only. Logits that are NaN choose any experts, and their shares are NaN."""

    def pack_experts(self, experts: Iterable[Expert], count: int) -> Any:
        """``pack`` for ``gated_experts``: the ``count`` experts of a layer, one after the other, so that whoever yields
        them need not hold all at once."""

    def gated_experts(
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: Activation
    ) -> Tensor:
        """The results of each token's experts, summed with its shares, [T, D].

        An expert's result is what ``linear`` of ``gated_linear`` yields. Multiplied by their shares, the results are
        added up in fp32 in the order of the token's row of ``experts_TJ``, and the sum is rounded. With a recorder, the
        kernels find out on their device which rows each expert has."""

    def embedding(self, token_ids_T: Tensor, packed: Any) -> Tensor:
        """Rows of a weight [V, D] that ``pack`` has packed, so that a model whose output head is tied to its embedding
        holds the weight once."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """RMS norm over the last dimension. With ``unit_offset`` the scale is 1 + weight, as in Gemma."""

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def rope(self, q_THE: Tensor, k_TKE: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """q and K, normalised if ``rotary`` has norms, and rotated."""

    def rope_store_kv(
        self,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        rotary: Rotary,
        k_cache: KV,
        v_cache: KV,
        flat_T: Tensor,
    ) -> Tensor:
        """``rope``, then ``store_kv`` of the rotated K; returns the rotated q."""

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(left half) * right half of the last dimension.

        With ``clamped_swiglu``, it is gate * sigmoid(1.702 gate) * (right half + 1), in which the gate is the left half
        clamped to at most 7, and the right half is clamped to -7 .. 7."""

    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        """Write each token's K and V at its flat index into the caches [blocks, block_size, K, E]. Caches are quantised
        only if the kernels' registration says in ``kv_dtypes`` that they can be."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        """Causal attention of each query over the cached positions of its sequence, up to and including its own;
        [T, H, E]."""

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        """Draw one token per row, int64 [N]; -1 where the row of logits has no finite maximum.

        Inverse-transform sampling in vocabulary order over the tokens that the filters keep: temperature, then top-k,
        then top-p over what top-k kept, then min-p. Top-k keeps k tokens; of equal logits, those of lower ids. The
        others are thresholds on probability, so that they keep or drop tokens of equal probability together.
        """


class KVCacheView(Protocol):
    """One pass's view of the cache: all that a model sees of it."""

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Write the new tokens' K/V, then return causal attention over all positions up to each token's own, [T, H, E].

        If ``rotary`` is given, q and K are normalised and rotated first.
        """


@dataclass(frozen=True)
class Allocation:
    """A slot that the cache has given to one sequence."""

    slot: int
    num_cached: int = 0
    """How many leading tokens the cache already holds the K/V of; always fewer than the tokens asked for."""


class CachePoolProtocol(Protocol):
    """Owns the K/V of all sequences. A running sequence has a slot: an integer below ``max_batch_size``.

    A pool that does not share K/V between sequences ignores ``reuse``, ``salt`` and ``commit``. If ``shares`` is True,
    sequences share the K/V of a common prefix; schedulers then make the answers to one prompt wait until the first of
    them has its prompt in the cache. A pool that can take positions back also has ``truncate(slot, num_tokens)``: see
    ``infer.cache.TruncatingBooks``. A pool that has ``room``, with the number of positions that each slot has room for,
    is not asked to ``grow`` a slot within it. One that has ``states()``, a ``BlockState`` per block as bytes, shows
    observers a map of itself (``StepRecord.blocks``).
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the K/V of all positions."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """Allocate a slot with room for all of ``token_ids``; None if there is no room now.

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
        repeat the last slot.
        """


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


class ModelProtocol(Protocol):
    """A decoder-only transformer. It never sees masks, slots, pages or padding."""

    @property
    def attention(self) -> Sequence[AttentionSpec]:
        """One spec per layer; ``attend`` takes a layer's index in this list."""

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
class UnstackingProtocol(Protocol):
    """A model some of whose checkpoints stack several of its weights in one tensor."""

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The weights that ``load`` takes, each by its own name, as views of the checkpoint's tensors. Weights are
        quantised after that. Raises CheckpointError if a stack has another shape than expected."""


@runtime_checkable
class SparingProtocol(Protocol):
    """A model that has matrices which are not to be quantised."""

    @property
    def spared(self) -> Collection[str]:
        """The names of weights that ``model.quantization`` leaves as they are, besides those of ``model.plain_layers``:
        routers, and what no product is made with."""


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


class SchedulerProtocol(Protocol):
    """Decides which sequences compute which positions in a step. It handles integers only: no tensors, no text."""

    def add(self, sequence: EngineSequence) -> None:
        """A new sequence waits from now on."""

    def schedule(self) -> Schedule:
        """Plan one step; the schedule is empty if nothing can run."""

    def finish(self, sequence: EngineSequence) -> None:
        """The sequence, running or waiting, has ended: free its place in the cache at once."""

    def has_work(self) -> bool:
        """Whether any sequence runs or waits, even if nothing of it can run now."""


class Ask(NamedTuple):
    """What a proposer is asked for one sequence."""

    request: Request
    """The request, the same object each time. A request's id is unique among those that have not ended."""
    token_ids: Sequence[int]
    """The tokens of the prompt and of the answer so far. The engine's own list, to be read during the call only. From
    call to call it grows, and does not change otherwise."""
    most: int
    """How many draft tokens may be proposed; at least 1."""


class ProposerProtocol(Protocol):
    """Guesses how sequences go on. A wrong guess costs time, but changes no answer: the engine computes all draft
    tokens in one pass and takes them as long as they equal the tokens that it draws.

    It runs in the engine's thread, between two passes. If it raises, the log says so, and the engine goes on without
    speculation."""

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """For each ask, up to ``most`` token ids that may come next, the likelier the better, or none. Not every
        sequence is asked about in every step."""

    def end(self, request_id: str) -> None:
        """The request has ended, whether it was asked about or not: forget it."""


Tools = Mapping[str, Mapping[str, Any]]
"""The functions that an answer may call, by name, with the JSON schema of their arguments."""


PieceKind = Literal["content", "reasoning", "call", "arguments"]


class Piece(NamedTuple):
    """A bit of an answer. A ``call`` begins one, ``text`` being the function's name, and ``arguments`` go on with its
    arguments, in JSON."""

    kind: PieceKind
    text: str


class PartProtocol(Protocol):
    """Reads one answer: takes its text as it comes, cut anywhere, and gives the same pieces however it is cut, as early
    as it can tell them.

    It runs in the server's event loop with every delta: it must take no longer than the text is long, and hold no more
    of it than a bounded look ahead. ``infer.text.tool_formats.reader`` has the means.
    """

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now that ``text`` has come behind what came before."""
        ...

    def flush(self) -> Iterator[Piece]:
        """What is left at the end."""
        ...


class ReasoningTags(NamedTuple):
    """What stands between these at the beginning of an answer is reasoning. A prompt that ends in the opening one
    leaves the model within it."""

    opening: str
    closing: str
    reader: Callable[[Tools], PartProtocol] | None = None
    """Reads a whole answer that may call these tools, if tags alone do not tell its parts."""


class ObserverProtocol(Protocol):
    """Watches the engine. An observer has ``infer_step_finished``, ``infer_request_finished`` or both, which the
    engine's thread calls as it calls the hooks of these names. It may have ``close``, called once when the engine has
    ended."""


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


@dataclass(frozen=True)
class ModelContext:
    """What a model is made from, in addition to its config."""

    kernels: KernelsProtocol
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int


@dataclass(frozen=True)
class SchedulerContext:
    """What a scheduler is made from. ``engine`` is the ``[engine]`` section of the settings."""

    pool: CachePoolProtocol
    engine: Any


class SecondModel(NamedTuple):
    """A second model that has been loaded."""

    model: ModelProtocol
    pool: CachePoolProtocol
    """A cache pool of its own."""
    tokenizer: Tokenizer
    max_seq_len: int
    """How many positions a sequence may have in it, at most those of the first model."""


@dataclass(frozen=True)
class ProposerContext:
    """What a proposer is made from."""

    engine: Any
    """The ``[engine]`` section of the settings."""
    tokenizer: Tokenizer
    vocab_size: int
    max_seq_len: int
    device: torch.device
    kernels: KernelsProtocol
    load: Callable[[str], SecondModel]
    """Loads a further checkpoint (a folder, file, hub id or bundled name) by the settings of the first. Raises
    InferError."""


@dataclass(frozen=True)
class Route:
    """An endpoint of the server, as its router and /openapi.json see it."""

    method: str
    """``GET``, ``POST`` and so on."""
    path: str
    """As aiohttp has it: ``/v1/models/{model}``."""
    handler: Handler
    """An async function from aiohttp's request to its response. What it raises is answered as an error in JSON."""
    summary: str
    """One line."""
    answer: Any
    """The shape of a 200's JSON, a type such as a TypedDict; a media type where it is something else; None keeps the
    endpoint, which only a page of the plugin's own uses, out of /openapi.json. A GET that has one, or is ``open``, is
    answered to HEAD, too."""
    body: type[BaseModel] | None = None
    """The request's, an ``infer.server.schemas.Body`` at the top of its module; ``Service.read`` checks it."""
    chunk: Any = None
    """The shape of an event's data, where the answer may be streamed."""
    open: bool = False
    """Whether it needs no API key, as for load balancers and the page that asks for the key. If it reads a body, that
    should be small: anybody may send it (``Service.read``'s ``most``)."""


@dataclass(frozen=True)
class CommandContext:
    """What a command works with, besides its own arguments."""

    settings: Any
    """``infer.settings.Settings``: what all sources say together, checked."""
    sources: Mapping[str, str]
    """Where each setting's value came from, by its dotted key."""
    plugins: Any
    """``infer.plugins.Plugins``: what is installed. ``LLM.from_settings(settings, plugins)`` loads the model."""
    argv: tuple[str, ...]
    """The settings that the command line gave, as words, for a process of its own."""


class CommandFactory(Protocol):
    """Runs a command and returns its exit code: 0, or 1 where its work has failed. What the user can mend it raises as
    an InferError, whose text is shown, and the exit code is 2."""

    def __call__(self, args: argparse.Namespace, context: CommandContext, /) -> int: ...


class RoutesFactory(Protocol):
    """Called once, in the server's event loop, before it serves. ``service`` is ``infer.server.service.Service``: the
    model, as endpoints see it, and what they share."""

    def __call__(self, service: Any, settings: Any, /) -> Sequence[Route]: ...


class CacheFactory(Protocol):
    """Makes a cache pool; ``settings`` is its own table, ``[cache.NAME]``."""

    def __call__(self, context: CacheContext, settings: Any) -> CachePoolProtocol: ...


class ModelFactory(Protocol):
    """Makes a model that is not loaded yet; ``config`` is config.json, ``settings`` its own table, ``[model.NAME]``.
    Raises CheckpointError, whose text names the field, if the config is not as it has to be."""

    def __call__(self, config: Mapping[str, Any], context: ModelContext, settings: Any) -> ModelProtocol: ...


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


class SchedulerFactory(Protocol):
    """Makes a scheduler; ``settings`` is its own table, ``[engine.NAME]``."""

    def __call__(self, context: SchedulerContext, settings: Any) -> SchedulerProtocol: ...


class ProposerFactory(Protocol):
    """Makes a proposer of draft tokens; ``settings`` is its own table, ``[engine.NAME]``."""

    def __call__(self, context: ProposerContext, settings: Any) -> ProposerProtocol: ...


class KernelsFactory(Protocol):
    """Makes kernels that compute on ``device``; ``settings`` is their own table, ``[kernels.NAME]``."""

    def __call__(self, device: torch.device, settings: Any) -> KernelsProtocol: ...


class ToolFormatFactory(Protocol):
    """Called for each answer that may call functions. What looks like a call of any other function than ``tools`` is
    content."""

    def __call__(self, tools: Tools, settings: Any, /) -> PartProtocol: ...


class ReasoningFactory(Protocol):
    """Makes the tags of one way to write reasoning; ``settings`` is its own table, ``[model.NAME]``."""

    def __call__(self, settings: Any, /) -> ReasoningTags: ...


class ObserverFactory(Protocol):
    """Makes an observer; ``settings`` is its own table, ``[observers.NAME]``."""

    def __call__(self, settings: Any) -> ObserverProtocol: ...


class NoSettings(BaseModel, extra="forbid"):
    """The settings model of a plugin that has no settings."""
