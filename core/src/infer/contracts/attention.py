"""What caches, kernels and models say to each other about attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
    v_is_k: bool = False
    """Whether a cache may leave V out and read K in its place, which differs where K is rotated: the model ignores what
    it gets there."""


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
class QuantizedKV:
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


KV: TypeAlias = "Tensor | QuantizedKV"
"""K or V of one layer in the cache, [blocks, block_size, K, E]: in the model's dtype, or quantized."""
KVDtype = Literal["auto", "int8"]
"""How a cache stores K and V: in the model's dtype, or as ``QuantizedKV``."""


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
