"""The contract of kernels: the arithmetic of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from infer.contracts.adapters import AdapterPart, AdapterRows
from infer.contracts.attention import KV, AttentionSpec, Ragged, Rotary
from infer.contracts.registration import Registration
from infer.contracts.states import DeltaRule, StateRows, StateSpace

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.weight import GroupedWeight, Weight

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
"""Activation functions, by their names in ``config.json``; ``clamped_swiglu`` is gpt-oss's (see ``gated``)."""
GateActivation = Literal[Activation, "sigmoid", "softplus"]
"""These, and those of gates that are not an MLP's."""
ExpertActivation = Literal[Activation, "relu2"]
"""Those of experts: ``relu2``, max(x, 0)^2, is that of experts without a gate."""


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen by its router logits, and which share each of them has in the result.

    The ``top`` experts of the highest scores are chosen, the highest first; of equal scores, the one of the expert with
    the lower index counts as higher. To choose first and take the softmax of the chosen is the same as ``softmax`` with
    ``renormalize``."""

    top: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of the logits, in fp32. A selection bias is added to sigmoids, only to choose by the sums."""
    renormalize: bool = True
    """Whether shares are the scores divided by the sum of those that are chosen, or the scores themselves."""
    scale: float = 1.0
    """What shares are multiplied by in the end."""


class Expert(NamedTuple):
    """One expert of a mixture: an MLP with a gate or without one."""

    gate_up_NK: Weight
    """[2 I, D]: the first half of the rows computes the gate, the other the values; [I, D], the values, without a
    gate."""
    down_NK: Weight
    """[D, I]."""
    gate_up_bias_N: Tensor | None = None
    down_bias_N: Tensor | None = None

    @property
    def gated(self) -> bool:
        """All experts of a layer are alike in this."""
        return self.gate_up_NK.shape[0] != self.down_NK.shape[1]


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
    top_k: bool
    """True if any row that draws has a top-k filter."""
    top_p: bool
    """True if any row that draws has a top-p filter."""


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

    def quantize(self, weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
        """A plain weight in codes, as ``model.quantization`` asks while a checkpoint is loaded. The result has the bits
        of ``infer/kernels/quantize.py`` whatever the kernels are, and it is where ``weight_NK`` is."""

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
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: ExpertActivation
    ) -> Tensor:
        """The results of each token's experts, summed with its shares, [T, D].

        An expert's result is what ``linear`` of ``gated_linear`` yields; with ``relu2``, what ``linear`` of the squared
        positive values of ``linear`` yields. Multiplied by their shares, the results are added up in fp32 in the order
        of the token's row of ``experts_TJ``, and the sum is rounded. With a recorder, the kernels find out on their
        device which rows each expert has."""

    def pack_adapter(self, parts: Sequence[AdapterPart]) -> Any:
        """Convert what an adapter changes in one product to the layout that ``add_adapters`` works on. The parts change
        different columns, in ascending order. The result is a copy. Any thread may call it while passes run."""

    def adapter_table(self, slots: int) -> Any:
        """The adapters of one product, by slot; there are none yet."""

    def set_adapter(self, table: Any, slot: int, packed: Any | None) -> None:
        """Put what ``pack_adapter`` has made, or nothing, into a slot of a table. No pass is under way. A
        pass that was recorded before finds in each replay what the table has then."""

    def add_adapters(self, product_TN: Tensor, x_TK: Tensor, rows: AdapterRows, table: Any) -> None:
        """Add scale * B (A x) to each row whose adapter is in the table, in place.

        The product has been rounded. A x, multiplied by the scale, and B times that are summed in fp32, each in an
        order that depends on nothing but the adapter, and the sum with the product is rounded once more. Other rows
        keep their bits."""

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
        """q and K, normalized if ``rotary`` has norms, and rotated."""

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

    def gated(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        """activation(gate) * up, of tensors of one shape, whose last dimension is contiguous or, in ``gate``, one value
        expanded. Either may be a part of the last dimension of another tensor. The activation is rounded to the
        tensors' type before it multiplies.

        With ``clamped_swiglu``, it is gate * sigmoid(1.702 gate) * (up + 1), in which the gate is clamped to at most 7,
        and ``up`` to -7 .. 7."""

    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        """Write each token's K and V at its flat index into the caches [blocks, block_size, K, E]. If ``v_cache`` is
        ``k_cache``, V is K, and ``v_TKE`` is ignored. Caches are quantized only if the kernels' registration says in
        ``kv_dtypes`` that they can be."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        """Causal attention of each query over the cached positions of its sequence, up to and including its own;
        [T, H, E]."""

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        silu: bool,
        columns_RWC: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """A depthwise causal convolution over each sequence's tokens, and SiLU of it if ``silu``; [T, C].

        Token t's result is the sum of weight[c, i] * x[t - W + 1 + i, c] over i in fp32, the oldest first, then the
        bias. The last W - 1 inputs are the state, [rows, W - 1, C], the oldest first. The rows of ``x_TC`` may be parts
        of longer rows."""

    def gated_delta_rule(
        self, qkv_TC: Tensor, a_TA: Tensor, b_TH: Tensor, rule: DeltaRule, state_RHKV: Tensor, rows: StateRows
    ) -> Tensor:
        """Each value head's output, [T, H, V].

        ``qkv_TC`` has all heads of q, then those of K, then those of V. In fp32, q and k of a head are divided by
        sqrt(the sum of their squares + 1e-6), and q by sqrt(key_size). Then, token by token, with
        g = -rate * softplus(a + dt_bias) and beta = max_beta * sigmoid(b), the state S of a head becomes
        S' = D S + k ((v - (D S)^T k) beta)^T, and its output is S'^T q. D S is S with each row times its e^g, of which
        a head has one or, with ``rule.channel_decay``, one for each row."""

    def state_space(
        self, xbc_TC: Tensor, dt_TH: Tensor, space: StateSpace, state_RHNP: Tensor, rows: StateRows
    ) -> Tensor:
        """Each head's output, [T, H, P].

        ``xbc_TC`` has x of all heads, then B of all groups, then C of all groups. In fp32, token by token, with
        dt = clamp(softplus(dt + dt_bias)), the state S [N, P] of a head becomes S' = e^(-rate dt) S + B (dt x)^T, and
        its output is S'^T C + skip x."""

    def gated_rms_norm(
        self, x_TD: Tensor, gate_TD: Tensor, weight_W: Tensor, eps: float, group: int, gate_first: bool
    ) -> Tensor:
        """RMS norm of each ``group`` neighboring values of a row, and a gate: norm(x) * weight * silu(gate), or, if
        ``gate_first``, norm(x * silu(gate)) * weight; [T, D], in fp32 until it is rounded.

        Value d is multiplied by weight[d % W]. The rows of ``gate_TD`` may be parts of longer rows."""

    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        """Draw one token per row, int64 [N]; -1 where the row of logits has no finite maximum.

        Inverse-transform sampling in vocabulary order over the tokens that the filters keep: temperature, then top-k,
        then top-p over what top-k kept, then min-p. Top-k keeps k tokens; of equal logits, those of lower ids. The
        others are thresholds on probability, so that they keep or drop tokens of equal logits together.
        """


class PackedMemory(Protocol):
    """Where packed weights are, one after the other in the order in which they are packed."""

    def find(self, nbytes: int) -> memoryview | None:
        """The next packed weight, which has so many bytes; None if it has to be packed. Raises CheckpointError if there
        is another one."""

    def add(self, weight: memoryview) -> None:
        """The next one has been packed, and stays where it is."""


@runtime_checkable
class KeepingKernels(Protocol):
    """Kernels whose packed weights can be kept in a file for the next start."""

    @property
    def layout(self) -> str:
        """What the bytes of packed weights depend on besides the weights: another layout has another text."""

    def packed_in(self, memory: PackedMemory) -> AbstractContextManager[None]:
        """While the context is open, the ``pack`` methods take from ``memory`` what it has, and tell it of what they
        pack."""


class KernelsFactory(Protocol):
    """Makes kernels that compute on ``device``; ``settings`` is their own table, ``[kernels.NAME]``."""

    def __call__(self, device: torch.device, settings: Any) -> KernelsProtocol: ...


@dataclass(frozen=True)
class KernelsRegistration(Registration[KernelsFactory]):
    """A kernel provider and where it can run."""

    devices: tuple[str, ...] = ()
    """Device types (``cpu``, ``cuda``) it can run on; empty for all."""
    kv_dtypes: tuple[str, ...] = ()
    """The values of ``cache.kv_dtype`` other than ``auto`` with which it stores and attends: with ``int8``, caches are
    ``QuantizedKV``."""
    about: str = ""
    """Which variant of it runs on this machine and, after a comma or a colon, why: a line for ``infer plugins``,
    ``infer doctor`` and the log. Variants may compute other bits."""
