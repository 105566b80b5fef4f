"""The contract of states: what a recurrent layer keeps of a sequence in place of K and V, of one size at any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """What one recurrent layer keeps of each sequence: a tensor of each of these shapes and dtypes, zeros before the
    first token."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        total = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = dtype.itemsize
            for n in shape:
                size *= n
            total += size
        return total


class StateRows(NamedTuple):
    """In which rows of the states' tensors the sequences of one pass find and leave theirs. Tokens
    ``offsets_B1[b]:offsets_B1[b + 1]`` of the pass belong to sequence b. All tensors are on the kernels' device."""

    offsets_B1: Tensor
    """int32 [B + 1]."""
    read_B: Tensor
    """int64: the row with the state before the sequence's first token of this pass. Several sequences may read one."""
    save_T: Tensor
    """int64: the row to copy the state after this token to; -1 for none, but a sequence's last token always has one.

    No row is saved twice, and none that is saved is read by another sequence. The row that a sequence reads may be the
    one that its last token saves, and no other token's. Two passes are exceptions, in which each sequence has one
    token: the rows that pad a pass, and all rows of a rehearsal, save the same row, which nobody reads."""


class State(NamedTuple):
    """The states of one layer, for a pass."""

    parts: tuple[Tensor, ...]
    """For each of the spec's shapes, [rows, *shape]."""
    rows: StateRows


@dataclass(frozen=True, eq=False)
class DeltaRule:
    """A gated delta rule (Yang et al., 2025), as ``KernelsProtocol.gated_delta_rule`` computes it. A model makes the
    tensors with the spec, on the kernels' device, and writes their values when it loads its weights."""

    num_key_heads: int
    num_value_heads: int
    """H, a multiple of the number of key heads: value head h belongs to key head h // (H / num_key_heads)."""
    key_size: int
    value_size: int
    rate_H: Tensor
    """fp32, exp(A_log)."""
    dt_bias_A: Tensor
    """fp32; A is ``num_decays``."""
    channel_decay: bool = False
    """Whether each row of a head's state decays by itself (Kimi Delta Attention; Kimi Team, 2025)."""
    max_beta: float = 1.0
    """The bound of beta, the strength of a change. With 2, a change may turn what the state knows of a key into its
    negative (Grazzi et al., 2025)."""

    @property
    def channels(self) -> int:
        """How many values q, K and V have together."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def num_decays(self) -> int:
        """Of a token: H, or H * key_size with ``channel_decay``."""
        return self.num_value_heads * (self.key_size if self.channel_decay else 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the recurrent state, which is fp32: [H, key_size, value_size]."""
        return self.num_value_heads, self.key_size, self.value_size


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A state space of scalar decays (Mamba 2; Dao and Gu, 2024), as ``KernelsProtocol.state_space`` computes it. A
    model makes the tensors with the spec, on the kernels' device, and writes their values when it loads its weights."""

    num_heads: int
    head_size: int
    num_groups: int
    """Of B and C; head h belongs to group h // (num_heads / num_groups)."""
    state_size: int
    rate_H: Tensor
    """fp32, exp(A_log)."""
    dt_bias_H: Tensor
    """fp32."""
    skip_H: Tensor
    """fp32, D."""
    dt_min: float = 0.0
    dt_max: float = float("inf")
    """Steps are clamped to these bounds."""

    @property
    def channels(self) -> int:
        """How many values x, B and C have together."""
        return self.num_heads * self.head_size + 2 * self.num_groups * self.state_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the recurrent state, which is fp32: [num_heads, state_size, head_size]."""
        return self.num_heads, self.state_size, self.head_size
