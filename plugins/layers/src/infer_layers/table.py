"""The table that gives each layer its tensors of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.contracts.model import ModelContext
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_layers.adapters import Adapters


@dataclass(frozen=True)
class _Expected:
    shape: tuple[int, ...]
    take: Callable[[Any], object]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Stack:
    shape: tuple[int, ...]
    cut: Callable[[Tensor], Iterable[tuple[str, Tensor]]]


class Weights:
    """The tensors that a model expects, by their names in the checkpoint, and the layers that take them."""

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.adapters = Adapters(context.kernels, context.adapter_slots) if context.adapter_slots else None
        self.spared: set[str] = set()
        """Names of tensors that ``model.quantization`` leaves as they are."""
        self._packed: set[str] = set()
        self._copied: dict[str, Callable[[Weight], object]] = {}
        self._expected: dict[str, _Expected] = {}
        self._stacks: dict[str, _Stack] = {}
        self._finish: list[Callable[[], None]] = []

    def expect(
        self,
        name: str,
        shape: tuple[int, ...],
        take: Callable[[Any], object],
        dtype: torch.dtype | None = None,
        *,
        packed: bool = False,
    ) -> None:
        """Declare that the checkpoint holds ``name``. ``take`` gets the tensor in ``dtype``, by default the model's,
        and on the model's device. It copies what it keeps, because the tensor may be a view of a file that is replaced
        later. A tensor of two dimensions may come as a GroupedWeight. One that is ``packed`` goes to the kernels'
        ``pack`` methods alone, and may come without values, on the meta device."""
        assert name not in self._expected, name
        self._expected[name] = _Expected(shape, take, dtype or self.context.dtype)
        if packed:
            self._packed.add(name)

    def copy(self, name: str, take: Callable[[Weight], object]) -> None:
        """Have ``take`` called with the expected tensor ``name``, too, after the layer that declared it, under the same
        conditions."""
        assert name in self._expected, name
        assert name not in self._copied, name
        self._copied[name] = take

    def expect_stack(
        self, name: str, shape: tuple[int, ...], cut: Callable[[Tensor], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Declare that a checkpoint may hold the tensor ``name`` in place of several expected ones. ``cut`` yields
        these, by name, as views."""
        self._stacks[name] = _Stack(shape, cut)

    def when_loaded(self, finish: Callable[[], None]) -> None:
        """Have ``finish`` called once all tensors have been taken."""
        self._finish.append(finish)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all expected tensors, by name."""
        return {name: expected.shape for name, expected in self._expected.items()}

    def packed(self) -> set[str]:
        """The names of the tensors that are ``packed``, and of the stacks that hold only such."""
        stacks = (
            name
            for name, stack in self._stacks.items()
            if all(part in self._packed for part, _ in stack.cut(torch.empty(stack.shape, device="meta")))
        )
        return self._packed.union(stacks)

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The tensors, with the parts of each stack in its place. Raises CheckpointError if a stack has another shape
        than expected."""
        for name, tensor in tensors:
            stack = self._stacks.get(name)
            if stack is None:
                yield name, tensor
                continue
            _check_shape(name, tensor, stack.shape)
            assert isinstance(tensor, Tensor)
            yield from stack.cut(tensor)

    def load(self, tensors: Iterable[tuple[str, Weight]], optional: Sequence[str] = ()) -> None:
        """Give every tensor to its layer. Raises CheckpointError if one is missing, unexpected, of another shape, of an
        unsupported type, or not finite.

        Tensors with ``optional`` names are accepted but not used, and so are the rotary frequencies that some old
        checkpoints hold, since they follow from config.json, and biases of zeros, which AutoGPTQ gives to every layer.
        """
        missing = dict(self._expected)
        for name, tensor in self.unstack(tensors):
            expected = missing.pop(name, None)
            if expected is None:
                if name in optional or name.endswith(".rotary_emb.inv_freq") or self._adds_nothing(name, tensor):
                    continue
                again = " twice" if name in self._expected else ", which this model does not have"
                raise CheckpointError(f"The checkpoint holds the tensor {name!r}{again}.")
            _check_shape(name, tensor, expected.shape)
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
                raise CheckpointError(
                    f"The tensor {name!r} is of type {str(tensor.dtype).removeprefix('torch.')}; infer loads "
                    "float32, float16 and bfloat16 weights, and others only as config.json's quantization_config says."
                )
            values, dtype = tensor if isinstance(tensor, Tensor) else tensor.codes, expected.dtype
            tensor = tensor.to(device=values.device if values.is_meta else self.context.device, dtype=dtype)
            if not all(map(_finite, [tensor] if isinstance(tensor, Tensor) else tensor.floats)):
                raise CheckpointError(
                    f"The tensor {name!r} holds values that are not finite as {str(dtype).removeprefix('torch.')}."
                )
            expected.take(tensor)
            if name in self._copied:
                self._copied[name](tensor)
        if missing:
            names = sorted(missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"The checkpoint lacks {', '.join(map(repr, names[:3]))}{more}.")
        for finish in self._finish:
            finish()

    def _adds_nothing(self, name: str, weight: Weight) -> bool:
        """Whether a tensor that no layer takes is a bias of zeros."""
        layer, _, kind = name.rpartition(".")
        return (
            kind == "bias"
            and f"{layer}.weight" in self._expected
            and isinstance(weight, Tensor)
            and (weight.is_meta or not weight.count_nonzero())
        )


def _check_shape(name: str, tensor: Weight, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"The tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}."
        )


def _finite(x: Tensor) -> bool:
    if x.is_meta:  # it has no values
        return True
    lowest, highest = x.aminmax()  # both are NaN if any value is; many times faster than isfinite
    return math.isfinite(lowest) and math.isfinite(highest)
