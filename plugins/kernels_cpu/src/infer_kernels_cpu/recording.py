"""Recording a pass as a list of native calls, so that replaying it needs no Python between two kernels."""

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
"""Functions that give Python a tensor's values. The code may decide by them what to do next, so a pass that calls one
cannot be replayed."""
SHAPED = {"aten.where.default", "aten.narrow.Tensor", "aten.tensor_split.tensor_indices_or_sections"}
"""Operations whose results' shapes depend on values although torch does not tag them so."""


class Recorder:
    """A RecorderProtocol. Its passes share one pool of memory, since no two of them run at the same time.
    ``results_in`` makes the kernels allocate their results from that pool while a pass is recorded."""

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
    """Replays a tape, and returns the recorded pass's result tensor with its new values."""

    def __init__(self, tape: Tape, out: Tensor) -> None:
        self._tape = tape
        self._out = out

    def __call__(self) -> Tensor | str:
        return self._tape.replay() or self._out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replay) and self._tape.done == other._tape.done and self._out.shape == other._out.shape

    __hash__ = None  # type: ignore[assignment]


class Reads(TorchFunctionMode):
    """Makes a tape refuse reads of tensors' values that do not reach ``__torch_dispatch__``."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in READS:
            self._tape.refuse(f"calls Tensor.{function.__name__}")
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is computed while it is entered: runs of native calls, and torch's operations between them."""

    def __init__(self, native: ctypes.CDLL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        """Why the pass cannot be replayed, as "who did what": it let a tensor's values decide, in Python or through a
        shape, or made a tensor from Python's numbers. None if it can be replayed."""
        self.done: list[object] = []
        """Each of torch's operations: its numbers, its tensors' geometry, and how many native calls came before it."""
        self._native = native
        self._calls = native.infer_tape()
        weakref.finalize(self, native.infer_free_tape, self._calls)
        self._recorded = 0
        self._steps: list[Callable[[], object]] = []
        self._kept: list[Tensor] = []
        """Tensors that are kept alive because native calls know only their addresses."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because nothing here is compiled. Otherwise torch imports its compiler in the first pass, which takes
        most of a second and a hundred megabytes."""
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
        """Compute everything again. If a result has another shape than when it was recorded, stop and return the
        reason."""
        try:
            for step in self._steps:
                step()
        except _OtherShapeError as error:
            return str(error)
        return None

    def _cut(self) -> None:
        """End the current run of native calls."""
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
        elif op is torch.ops.aten.lift_fresh.default:  # a tensor made from Python's numbers
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
    """A replayed operation's result has another shape than the recorded one."""


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()


def _shape_depends_on_values(op: Any, leaves: Iterable[Any]) -> bool:
    if op is torch.ops.aten.index.Tensor:  # only where a mask is among the indices
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in list(leaves)[1:])
    return torch.Tag.dynamic_output_shape in op.tags or str(op) in SHAPED


def _again(outs: list[Tensor], op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    results = op(*args, **kwargs)
    for out, new in zip(outs, results if isinstance(results, (tuple, list)) else [results], strict=True):
        if out.shape != new.shape:
            raise _OtherShapeError(f"{op} yields {list(new.shape)} where it yielded {list(out.shape)}")
        out.copy_(new)
