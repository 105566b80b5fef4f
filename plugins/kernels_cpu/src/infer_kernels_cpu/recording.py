"""A pass as a list of calls, so that the next of its kind needs no Python between two kernels."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infer_kernels_cpu.memory import Buffers

if TYPE_CHECKING:
    from infer_kernels_cpu.provider import CpuKernels

log = logging.getLogger(__name__)


class Recorder:
    """A RecorderProtocol. All its passes share one pool of memory, since they never run at a time."""

    cheap = True

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._memory = Buffers(small=0)

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor] | None]:
        with self._kernels.results_in(self._memory), Tape(self._kernels.native) as tape:
            out = run()
        if tape.refused is not None:
            log.warning("decode passes are not replayed: the model calls %s", tape.refused)
            return out, None

        def replay() -> Tensor:
            tape.replay()
            return out

        return out, replay


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is done while it is entered: stretches of native calls, and between them torch's operations."""

    def __init__(self, native: ctypes.CDLL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        """An operation whose result went to Python, where it may have decided what came next."""
        self._native = native
        self._calls = native.infer_tape()
        weakref.finalize(self, native.infer_free_tape, self._calls)
        self._recorded = 0
        self._steps: list[Callable[[], object]] = []

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

    def replay(self) -> None:
        for step in self._steps:
            step()

    def _cut(self) -> None:
        """End the stretch of native calls."""
        end = self._native.infer_tape_length(self._calls)
        if end > self._recorded:
            self._steps.append(functools.partial(self._native.infer_replay, self._calls, self._recorded, end))
            self._recorded = end

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else [out]
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if not all(isinstance(x, Tensor) for x in outs):
            self.refused = str(op)
        elif op._schema.is_mutable:
            self._cut()
            self._steps.append(functools.partial(op, *args, **kwargs))
        elif "empty" not in op.__name__ and not all(_memory(x) in given for x in outs):  # neither new nor a view
            self._cut()
            self._steps.append(functools.partial(_again, outs, op, args, kwargs))
        return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _again(outs: Iterable[Tensor], op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    found = op(*args, **kwargs)
    for out, new in zip(outs, found if isinstance(found, (tuple, list)) else [found], strict=True):
        out.copy_(new)
