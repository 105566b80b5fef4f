"""A pass as a list of calls, so that the next of its kind needs no Python between two kernels."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infer.device import caller
from infer_kernels_cpu.memory import Buffers

READS = {
    *("tolist", "numpy", "item", "__array__", "__dlpack__", "__repr__", "__format__", "__contains__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
}
"""Functions that tell Python what is in a tensor; it may decide by that what comes next."""
SHAPED = {"aten.where.default", "aten.narrow.Tensor", "aten.tensor_split.tensor_indices_or_sections"}
"""Operations whose results' shapes depend on values, and that torch does not mark so."""


class Recorder:
    """A RecorderProtocol. All its passes share one pool of memory, since they never run at a time: ``results_in`` has
    the kernels put their results there meanwhile."""

    cheap = True

    def __init__(self, native: ctypes.CDLL, results_in: Callable[[Buffers], AbstractContextManager[None]]) -> None:
        self._native = native
        self._results_in = results_in
        self._memory = Buffers(small=0)

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        with self._results_in(self._memory), Tape(self._native) as tape, Reads(tape):
            out = run()
        return out, tape.refused or Replay(tape, out)


class Replay:
    """What a tape did, again, to the tensor that it yielded."""

    def __init__(self, tape: Tape, out: Tensor) -> None:
        self._tape = tape
        self._out = out

    def __call__(self) -> Tensor | str:
        return self._tape.replay() or self._out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replay) and self._tape.done == other._tape.done and self._out.shape == other._out.shape

    __hash__ = None  # type: ignore[assignment]


class Reads(TorchFunctionMode):
    """Has a tape refuse what never gets as far as an operation of torch's."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in READS:
            self._tape.refuse(f"calls Tensor.{function.__name__}")
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is done while it is entered: stretches of native calls, and between them torch's operations."""

    def __init__(self, native: ctypes.CDLL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        """Who did what cannot be replayed: let a tensor's values decide, in Python or in a shape, or make a tensor of
        values of Python's."""
        self.done: list[object] = []
        """Every operation with its numbers and the geometry of its tensors, and how many native calls came before."""
        self._native = native
        self._calls = native.infer_tape()
        weakref.finalize(self, native.infer_free_tape, self._calls)
        self._recorded = 0
        self._steps: list[Callable[[], object]] = []
        self._kept: list[Tensor] = []
        """Memory of which native calls may know the address alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, so nothing has to be kept from it: or torch imports its compiler with the first
        pass, which takes most of a second and a hundred megabytes."""
        return False

    def __enter__(self) -> Tape:
        self._native.infer_record(self._calls)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._native.infer_record(None)
        self._cut()
        self.done.append(self._recorded)

    def refuse(self, what: str) -> None:
        if self.refused is None:
            self.refused = f"{caller()} {what}"

    def replay(self) -> str | None:
        """Do it all again. Where a shape is another than it was, do not go on, and say so."""
        try:
            for step in self._steps:
                step()
        except _OtherShapeError as error:
            return str(error)
        return None

    def _cut(self) -> None:
        """End the stretch of native calls."""
        end = self._native.infer_tape_length(self._calls)
        if end > self._recorded:
            self._steps.append(functools.partial(self._native.infer_replay, self._calls, self._recorded, end))
            self._recorded = end

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._take(op, args, kwargs, list(out) if isinstance(out, (tuple, list)) else [out])
        return out

    def _take(self, op: Any, args: Any, kwargs: Any, outs: list[Any]) -> None:
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        numbers = [repr(x) for x in leaves if not isinstance(x, Tensor)]
        self.done.append((op, numbers, [_geometry(x) for x in given], self._native.infer_tape_length(self._calls)))
        places = {_memory(x) for x in given}
        if not all(isinstance(x, Tensor) for x in outs) or _shape_depends_on_values(op, leaves):
            self.refuse(f"calls {op.name().replace('::', '.')}")
        elif op is torch.ops.aten.lift_fresh.default:  # a tensor of values of Python's
            if outs[0].dim():
                self.refuse("makes a tensor of numbers of Python's")
            else:
                self.done.append(repr(outs[0].item()))
                self._kept += outs
        elif op._schema.is_mutable:
            self._cut()
            self._steps.append(functools.partial(op, *args, **kwargs))
        elif "empty" in op.__name__:
            self._kept += outs
        elif not all(_memory(x) in places for x in outs):  # not a view
            self._cut()
            self._steps.append(functools.partial(_again, outs, op, args, kwargs))


class _OtherShapeError(Exception):
    """A result does not fit where the recorded one is."""


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()


def _shape_depends_on_values(op: Any, leaves: Iterable[Any]) -> bool:
    if op is torch.ops.aten.index.Tensor:  # only where a mask is among the indices
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in list(leaves)[1:])
    return torch.Tag.dynamic_output_shape in op.tags or str(op) in SHAPED


def _again(outs: list[Tensor], op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    found = op(*args, **kwargs)
    for out, new in zip(outs, found if isinstance(found, (tuple, list)) else [found], strict=True):
        if out.shape != new.shape:
            raise _OtherShapeError(f"{op} yields {list(new.shape)} where it yielded {list(out.shape)}")
        out.copy_(new)
