"""Quantizing a plain checkpoint's weights while they are loaded."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from infer.errors import SettingsError
from infer.weight import GroupedWeight, Weight, form_of

Quantize = Callable[[Tensor, Literal[4, 8]], GroupedWeight]


@dataclass
class Quantizer:
    """Turns plain weights into grouped ones as ``model.quantization``, ``model.plain_layers`` and ``model.activations``
    say."""

    quantization: Literal["int8", "int4"] | None
    plain: Sequence[str]
    """Patterns of names (``*`` and ``?``) that stay plain."""
    activations: Literal["auto", "int8", "plain"]
    vocab_size: int
    """A weight with so many rows embeds tokens or yields logits: it gets 8 bits."""
    quantize: Quantize
    """The kernels' way to do it."""
    dtype: torch.dtype | None = None
    """The model's, in which it holds plain weights; None: the one they are stored in."""
    spared: Set[str] = frozenset()
    """Names that stay plain because the model says so."""
    before: int = field(default=0, init=False)
    """Bytes of the weights as they came."""
    nbytes: Counter[str] = field(default_factory=Counter, init=False)
    """Bytes of the weights as the model gets them, by their form: ``plain weights``, or a GroupedWeight's name."""

    def bits(self, name: str, shape: Sequence[int]) -> Literal[4, 8] | None:
        """How many bits the codes of a plain weight get; None if it stays plain."""
        if self.quantization is None or len(shape) != 2 or name in self.spared:
            return None
        if any(fnmatch.fnmatchcase(name, each) for each in self.plain):
            return None
        # A byte holds two codes of 4 bits, both of one row.
        whole = self.quantization == "int8" or shape[0] == self.vocab_size or shape[1] % 2
        return 8 if whole else 4

    def __call__(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        for name, weight in weights:
            self.before += weight.nbytes
            if self.quantization is not None:
                if isinstance(weight, GroupedWeight):
                    raise SettingsError(
                        f"model.quantization quantizes plain weights, but the checkpoint's {name!r} has {weight}; "
                        "leave it out."
                    )
                bits = self.bits(name, weight.shape)
                if bits is not None and weight.dtype.is_floating_point:
                    weight = self.quantize(weight, bits)
            if isinstance(weight, GroupedWeight) and self.activations != "auto":
                weight = replace(weight, int8_activations=self.activations == "int8")
            held = weight.nbytes
            if isinstance(weight, Tensor) and self.dtype is not None:
                held = weight.numel() * self.dtype.itemsize
            self.nbytes[form_of(weight)] += held
            yield name, weight

    def __str__(self) -> str:
        parts = ", ".join(f"{size / 2**20:.1f} MiB of {form}" for form, size in self.nbytes.most_common())
        return f"{parts} (unquantized: {self.before / 2**20:.1f} MiB)" if self.quantization else parts
