"""Linear layers, RMS norms, the token embedding and the output head."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from infer.contracts.kernels import Activation
from infer.device import zeros
from infer.errors import SettingsError
from infer.weight import GroupedWeight, Weight, unfilled
from infer_layers.adapters import AdaptedLinear
from infer_layers.table import Weights

log = logging.getLogger(__name__)

DEQUANTIZED = 1 << 20
"""How many values of a weight are dequantized at a time to be quantized anew."""
LEAST_GROUP = 16
"""The fewest neighbors that share a scale in a coarse head: with fewer, it would hardly be smaller."""


class Linear:
    """y = x W^T + b, where W may consist of several parts stacked by rows, so that q, k and v take one product.

    ``names`` are the checkpoint's names of the parts, without ``.weight`` and ``.bias``, or the single name of the
    tensor that stacks them; ``out_features`` says how many rows each part has. ``bias`` says
    whether there is a bias, or says it for each part. With an ``activation`` there are two parts, and the first is the
    gate: y = activation(x G^T) * x U^T. With an ``order``, row i of W is the checkpoint's row ``order[i]``, which has
    to belong to the same part. ``dtype`` is that of x, W and y, by default the model's."""

    def __init__(
        self,
        weights: Weights,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool | Sequence[bool] = False,
        activation: Activation | None = None,
        order: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        names = [names] if isinstance(names, str) else list(names)
        self.sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        biases = [bias] * len(self.sizes) if isinstance(bias, bool) else list(bias)
        kernels, context = weights.context.kernels, weights.context
        self._kernels, self._activation = kernels, activation
        self._packed: list[Any] = []
        rows, left = sum(self.sizes), 0
        parts: dict[str, Tensor] = {}
        grouped: dict[int, GroupedWeight] = {}

        def take(kind: str, row: int, weight: Weight) -> None:
            nonlocal left
            if isinstance(weight, GroupedWeight):
                if order is not None:
                    weight = weight.rows((order[row : row + weight.shape[0]] - row).to(weight.codes.device))
                grouped[row] = weight
            else:
                if kind not in parts:
                    parts[kind] = zeros((rows, *weight.shape[1:]), weight.dtype, weight.device)
                parts[kind][row : row + len(weight)] = weight
            left -= 1
            if left == 0:  # Pack as soon as the layer is complete, so that only one layer is in memory twice.
                if order is not None:
                    parts.update({kind: tensor[order.to(tensor.device)] for kind, tensor in parts.items()})
                pack_all(parts.pop("weight", None), parts.pop("bias", None))

        def pack_all(plain: Tensor | None, bias_N: Tensor | None) -> None:
            """Pack the parts for one product, or each by itself if they are stored in ways that do not stack."""
            pieces: list[Weight] = []
            for row, size in spans:
                piece: Weight | None = grouped.pop(row, None)
                if piece is None:
                    assert plain is not None
                    piece = plain if len(spans) == 1 else plain[row : row + size]
                pieces.append(piece)
            quantized = [piece for piece in pieces if isinstance(piece, GroupedWeight)]
            if not quantized and plain is not None:
                pieces = [plain]
            elif len(quantized) == len(pieces) > 1 and all(map(quantized[0].stacks_with, quantized)):
                pieces = [GroupedWeight.stack(quantized)]
            del quantized
            apart = activation is None or len(pieces) > 1 or self._adapted is not None
            pack = kernels.pack if apart else kernels.pack_gated
            self._fused = not apart
            begin = 0
            while pieces:
                piece = pieces.pop(0)
                end = begin + piece.shape[0]
                self._packed.append(pack(piece, None if bias_N is None else bias_N[begin:end]))
                begin = end

        stacked = len(names) == 1
        self._fused = False
        """Whether the activation is computed with the product, which adapters would have to come between."""
        self._adapted: AdaptedLinear | None = None
        if weights.adapters is not None:
            parts_of = [rows] if stacked else self.sizes
            place = names, parts_of, in_features, order, dtype or context.dtype, context.device
            self._adapted = weights.adapters.linear(*place)
        spans: list[tuple[int, int]] = []
        row = 0
        for name, size, biased in zip(
            names, [rows] if stacked else self.sizes, [any(biases)] if stacked else biases, strict=True
        ):
            shapes = {"weight": (size, in_features)} | ({"bias": (size,)} if biased else {})
            for kind, shape in shapes.items():
                weights.expect(
                    f"{name}.{kind}", shape, functools.partial(take, kind, row), dtype, packed=kind == "weight"
                )
            left += len(shapes)
            spans.append((row, size))
            row += size

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._fused and self._activation is not None:
            return self._kernels.gated_linear(x_TK, self._packed[0], self._activation)
        products = [self._kernels.linear(x_TK, packed) for packed in self._packed]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        if self._adapted is not None:
            self._adapted.add(x_TK, product)
        if self._activation is None:
            return product
        gate, up = product.chunk(2, dim=-1)
        return self._kernels.gated(gate, up, self._activation)


class Norm(Protocol):
    """A norm of hidden states, or whatever stands in its place."""

    def __call__(self, x: Tensor) -> Tensor:
        """norm(x), [..., D], over the last dimension."""

    def add(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); a residual of None counts as zero."""


class RMSNorm:
    """Root-mean-square norm (Zhang and Sennrich, 2019). With ``unit_offset`` the scale is 1 + weight; with an
    ``order``, weight i is the checkpoint's weight ``order[i]``."""

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
        """(norm(x + residual), x + residual); a residual of None counts as zero."""
        if residual_TD is None:
            return self(x_TD), x_TD
        return self._kernels.add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps, self.unit_offset)


class Embedding:
    """Token ids -> rows of the weight, multiplied by ``scale`` rounded to the model's dtype."""

    def __init__(self, weights: Weights, name: str, num: int, size: int, scale: float | None = None) -> None:
        self.name = f"{name}.weight"
        self._kernels = weights.context.kernels
        self.scale = None if scale is None else torch.tensor(scale, dtype=weights.context.dtype).item()
        self.packed: Any = None
        weights.expect(self.name, (num, size), lambda t: setattr(self, "packed", self._kernels.pack(t)), packed=True)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        x_TD = self.rows(token_ids_T)
        return x_TD if self.scale is None else x_TD * self.scale

    def rows(self, token_ids_T: Tensor) -> Tensor:
        """The weight's rows themselves."""
        x_TD: Tensor = self._kernels.embedding(token_ids_T, self.packed)
        return x_TD


class Head:
    """Hidden states -> logits, with a weight of its own or, if ``tied``, the embedding's."""

    def __init__(self, weights: Weights, embedding: Embedding, name: str, num: int, size: int, tied: bool) -> None:
        self.name, self.tied = f"{name}.weight", tied
        self.source = embedding.name if tied else self.name
        """The tensor that it multiplies by."""
        self._kernels = weights.context.kernels
        self._packed: Any = None
        if tied:
            weights.when_loaded(lambda: self._take(embedding.packed))
        else:
            weights.expect(self.name, (num, size), lambda t: self._take(self._kernels.pack(t)), packed=True)

    def _take(self, packed: Any) -> None:
        self._packed = packed

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]."""
        return self._kernels.linear(hidden_ND, self._packed)


class CoarseHead:
    """A copy of a ``Head`` in 4 bits, for drafts: a draft reads the whole head for one token, and an error costs the
    draft, but changes no answer. A head that has 4 bits, whose rows make no whole groups of ``LEAST_GROUP``, or whose
    kernels do not multiply by such weights, is used itself."""

    def __init__(self, weights: Weights, head: Head) -> None:
        self._kernels, self._head = weights.context.kernels, head
        self._packed: Any = None
        weights.copy(head.source, self._take)

    def _take(self, weight_NK: Weight) -> None:
        fine = isinstance(weight_NK, Tensor) or weight_NK.bits > 4
        if not fine or weight_NK.shape[1] % LEAST_GROUP:
            return
        try:
            self._packed = self._kernels.pack(self._coarse(weight_NK))
        except SettingsError as error:
            log.info("drafts read the output head itself: %s", error)

    def _coarse(self, weight_NK: Weight) -> GroupedWeight:
        if isinstance(weight_NK, Tensor):
            return unfilled(weight_NK, 4) if weight_NK.is_meta else self._kernels.quantize(weight_NK, 4)
        made, (N, K) = unfilled(weight_NK, 4), weight_NK.shape
        rows = max(1, DEQUANTIZED // K)
        for n in range(0, 0 if made.codes.is_meta else N, rows):
            some = torch.arange(n, min(N, n + rows), device=made.codes.device)
            part = self._kernels.quantize(weight_NK.rows(some).dequantize(), 4)
            made.codes[n : n + rows], made.scales_NG[n : n + rows] = part.codes, part.scales_NG
        return made

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]."""
        if self._packed is None:
            return self._head(hidden_ND)
        return self._kernels.linear(hidden_ND, self._packed)
