"""Products with weights, norms, and the two ends of a decoder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.device import zeros
from infer.layers.table import Weights
from infer.protocols import Activation


class Linear:
    """y = x W^T + b, where W may be several checkpoint tensors stacked by rows: one product for q, k, v.

    ``names`` are those of the parts, or the one of all where the checkpoint has them stacked. ``bias`` may say for each
    part whether it has one. With an ``activation``, the first of two parts is the gate: activation(x G^T) * x U^T.
    Row i of W is row ``order[i]`` of the checkpoint's, which has to be of the same part.
    """

    def __init__(
        self,
        weights: Weights,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool | Sequence[bool] = False,
        activation: Activation | None = None,
        order: Tensor | None = None,
    ) -> None:
        names = [names] if isinstance(names, str) else list(names)
        self.sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        biases = [bias] * len(self.sizes) if isinstance(bias, bool) else list(bias)
        kernels = self._kernels = weights.context.kernels
        self._activation = activation
        pack = kernels.pack if activation is None else kernels.pack_gated
        self._packed: Any = None
        rows, left = sum(self.sizes), 0
        parts: dict[str, Tensor] = {}

        def take(kind: str, row: int, tensor: Tensor) -> None:
            nonlocal left
            if kind not in parts:
                parts[kind] = zeros((rows, *tensor.shape[1:]), tensor.dtype, tensor.device)
            parts[kind][row : row + len(tensor)] = tensor
            left -= 1
            if left == 0:  # packed at once, so that no more than one layer is in memory twice
                if order is not None:
                    parts.update({kind: tensor[order.to(tensor.device)] for kind, tensor in parts.items()})
                self._packed = pack(parts.pop("weight"), parts.pop("bias", None))

        stacked = len(names) == 1
        row = 0
        for name, size, biased in zip(
            names, [rows] if stacked else self.sizes, [any(biases)] if stacked else biases, strict=True
        ):
            shapes = {"weight": (size, in_features)} | ({"bias": (size,)} if biased else {})
            for kind, shape in shapes.items():
                weights.expect(f"{name}.{kind}", shape, functools.partial(take, kind, row))
            left += len(shapes)
            row += size

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._activation is not None:
            return self._kernels.gated_linear(x_TK, self._packed, self._activation)
        return self._kernels.linear(x_TK, self._packed)


class RMSNorm:
    """Root-mean-square norm (Zhang and Sennrich, 2019); ``unit_offset`` scales by 1 + weight, and value i's weight is
    the checkpoint's ``order[i]``."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        size: int,
        eps: float,
        unit_offset: bool = False,
        order: Tensor | None = None,
    ) -> None:
        self.eps, self.unit_offset = eps, unit_offset
        self._kernels = weights.context.kernels
        self.weight_D: Tensor
        self._order = None if order is None else order[:size]
        weights.expect(f"{name}.weight", (size,), self._take)

    def _take(self, weight_D: Tensor) -> None:
        self.weight_D = weight_D.clone() if self._order is None else weight_D[self._order.to(weight_D.device)]

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight_D, self.eps, self.unit_offset)

    def add(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); no residual yet counts as zero."""
        if residual_TD is None:
            return self(x_TD), x_TD
        return self._kernels.add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps, self.unit_offset)


class Embedding:
    """Token id -> row, times ``scale`` rounded to the weight's type."""

    def __init__(self, weights: Weights, name: str, num: int, size: int, scale: float | None = None) -> None:
        self._kernels = weights.context.kernels
        self.scale = None if scale is None else torch.tensor(scale, dtype=weights.context.dtype).item()
        self.packed: Any = None
        weights.expect(f"{name}.weight", (num, size), lambda t: setattr(self, "packed", self._kernels.pack(t)))

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        x_TD = self._kernels.embedding(token_ids_T, self.packed)
        return x_TD if self.scale is None else x_TD * self.scale


class Head:
    """Hidden states -> logits: its own weight, or the embedding's when ``tied``."""

    def __init__(self, weights: Weights, embedding: Embedding, name: str, num: int, size: int, tied: bool) -> None:
        self.name, self.tied = f"{name}.weight", tied
        self._kernels = weights.context.kernels
        self._packed: Any = None
        if tied:
            weights.when_loaded(lambda: self._take(embedding.packed))
        else:
            weights.expect(self.name, (num, size), lambda t: self._take(self._kernels.pack(t)))

    def _take(self, packed: Any) -> None:
        self._packed = packed

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        return self._kernels.linear(hidden_ND, self._packed)
