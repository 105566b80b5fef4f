"""Which of torch's operations give each row bits of its own, and what stands in for those that do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from infer.device import caller

F = torch.nn.functional

ROW_EXACT = frozenset(
    [
        # What moves or makes values.
        *("view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "slice", "select", "split"),
        *("split_with_sizes", "chunk", "unsqueeze", "squeeze", "unbind", "cat", "stack", "clone", "copy_", "alias"),
        *("_to_copy", "detach", "contiguous", "empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros"),
        *("ones", "ones_like", "new_ones", "full", "full_like", "arange", "repeat", "as_strided", "lift_fresh"),
        *("embedding", "index_select", "gather", "scatter", "where", "masked_fill", "constant_pad_nd", "fill_", "flip"),
        *("_reshape_alias", "scalar_tensor", "index", "unfold", "narrow", "one_hot", "zero_"),
        *("scatter_", "scatter_value", "masked_fill_", "view_as_real", "view_as_complex", "squeeze_", "unsqueeze_"),
        # Element by element, with equal results in vectors and in their tails.
        *(
            "add",
            "add_",
            "sub",
            "rsub",
            "mul",
            "mul_",
            "div",
            "div_",
            "neg",
            "abs",
            "relu",
            "relu_",
            "clamp",
            "clamp_",
            "square",
        ),
        *("clamp_min", "clamp_max", "minimum", "maximum", "exp", "log", "log1p", "expm1", "tanh", "erf", "sqrt"),
        *("rsqrt", "reciprocal", "sign", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"),
        *("logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "floor", "ceil", "round", "remainder"),
        # Row by row.
        *("native_layer_norm", "_softmax", "_log_softmax", "topk", "sort", "argmax", "amax", "max"),
    ]
)
REDUCTIONS = frozenset(["sum", "mean", "var", "var_mean", "linalg_vector_norm"])
"""Exact on a CPU along a row that one thread adds up."""
LONGEST_ROW = 32768
"""Values that torch leaves to one thread."""


def sigmoid(x: Tensor) -> Tensor:
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    wide = x.float()
    if approximate == "tanh":
        inner = torch.tanh(math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    else:
        inner = torch.erf(wide * math.sqrt(0.5))
    return (0.5 * wide * (1.0 + inner)).to(x.dtype)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    wide = x.float() * beta
    return torch.where(wide > threshold, wide, torch.log1p(torch.exp(wide.clamp(max=threshold)))).div(beta).to(x.dtype)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x  # nothing is trained here


STAND_INS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.silu: silu,
    F.gelu: gelu,
    F.softplus: softplus,
    F.sigmoid: sigmoid,
    F.dropout: dropout,
    torch.sigmoid: sigmoid,
    Tensor.sigmoid: sigmoid,
}
"""torch's own give an element in the tail of a vector another last bit than one in the middle."""
CONVERSIONS = (Tensor.to, Tensor.type, Tensor.float)


class Loose(Protocol):
    """Knows parameters that a module multiplies by itself, without an ``nn.Linear``; they stay on the meta device."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """The product; None if ``weight`` is no such parameter."""

    def converted(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What stands for ``weight`` in another dtype; None if it is no such parameter."""


class Exactly(TorchFunctionMode):
    """Runs what a module calls in torch by stand-ins where torch's own result depends on other rows."""

    def __init__(self, loose: Loose) -> None:
        super().__init__()
        self.used = False
        """Whether a stand-in has been called; without one, passes need not be run in this mode."""
        self._loose = loose

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = STAND_INS.get(function)
        if stand_in is not None:
            self.used |= function is not F.dropout
            return stand_in(*args, **(kwargs or {}))
        if not kwargs and args:
            out: Tensor | None = None
            if function is F.linear and (len(args) == 2 or args[2] is None):
                out = self._loose.linear(*args[:2])
            elif function in CONVERSIONS and args[0].is_meta:
                dtype = torch.float32 if function is Tensor.float else args[1]
                out = self._loose.converted(args[0], dtype) if isinstance(dtype, torch.dtype) else None
            if out is not None:
                self.used = True
                return out
        return function(*args, **(kwargs or {}))


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first of torch's operations that may mix rows or depends on how many there are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fault: str | None = None
        """Who calls which operation; None if all are row-exact."""
        self._reductions = frozenset() if device.type == "cuda" else REDUCTIONS

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in infer_kernels_cpu.recording: nothing is compiled here

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.fault is None and not self._exact(op, args, kwargs):
            self.fault = f"{caller()} calls {op.name().partition('::')[2]}"
        return op(*args, **kwargs)

    def _exact(self, op: Any, args: Any, kwargs: Any) -> bool:
        name = op.overloadpacket.__name__
        if name in self._reductions:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            x, dims = args[0], [dims] if isinstance(dims, int) else dims
            whole = not dims or any(dim % x.dim() != x.dim() - 1 for dim in dims)
            return not whole and x.shape[-1] < LONGEST_ROW and x.stride(-1) == 1
        if name == "rsqrt" or (name == "pow" and args[1] == -0.5):
            return bool(args[0].dtype == torch.float32)  # narrower ones have other bits in the tail of a vector
        if name == "pow":
            return isinstance(args[1], (int, float)) and args[1] in (2, 3, 0.5)
        if name in ("max", "argmax", "sort", "_softmax", "_log_softmax"):
            return len(args) > 1 and isinstance(args[1], int) and args[1] % args[0].dim() == args[0].dim() - 1
        return name in ROW_EXACT
