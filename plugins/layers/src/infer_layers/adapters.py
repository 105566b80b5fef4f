"""How linear layers apply adapters to rows of a pass. An adapter is never merged into weights: what it adds is computed
beside the product, for its own rows only, so that all other rows keep their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.contracts.adapters import AdapterPart, AdapterRows, LowRank
from infer.contracts.kernels import KernelsProtocol
from infer.errors import CheckpointError

DRAFT_HEAD = "mtp."
"""What the names of a draft head's layers begin with. Drafts come from the base: whatever they are, answers are the
same."""
NOT_LINEAR = {
    "embed_tokens": "the embedding",
    "lm_head": "the output head",
    "experts": "experts of a mixture",
    "kv_b_proj": "the projection that makes K and V of latent vectors",
}
"""Parts of models, by what their paths have in them, that adapters cannot change here."""


MODULES = (
    ("model.", "model.language_model."),
    (".self_attn.g_proj", ".self_attn.gate_proj"),
    (".shared_experts.", ".shared_expert."),
)
"""Parts of the names that transformers' modules have, and so adapters, and what they are in checkpoints."""


class _Place(NamedTuple):
    """Where a path's layer is: the columns [begin, begin + N) of a linear layer's product."""

    linear: AdaptedLinear
    begin: int
    N: int
    order_N: Tensor | None


class AdaptedLinear:
    """A linear layer's share of all adapters."""

    def __init__(self, adapters: Adapters, in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self.in_features, self.dtype, self.device = in_features, dtype, device
        self._adapters = adapters
        self._kernels = adapters.kernels
        self.table = adapters.kernels.adapter_table(adapters.slots)

    def add(self, x_TK: Tensor, product_TN: Tensor) -> None:
        """Add what adapters make of x to their rows of the product, in place. The kernels are called in each pass with
        adapters, so that whichever rows have one, a recorded pass does the same."""
        rows = self._adapters.rows
        if rows is not None:
            assert len(x_TK) == len(rows.slots_T), "a pass with adapters has all rows in all layers"
            self._kernels.add_adapters(product_TN, x_TK, rows, self.table)


class Adapters:
    """An AdaptersProtocol, and what linear layers know of the pass that is computed."""

    def __init__(self, kernels: KernelsProtocol, slots: int) -> None:
        self.kernels, self.slots = kernels, slots
        self.rows: AdapterRows | None = None
        """Those of the pass that is computed now; None if it has no adapters."""
        self.draft_head = DRAFT_HEAD
        """How the paths of the draft head's layers begin."""
        self._places: dict[str, _Place] = {}

    def linear(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        in_features: int,
        order_N: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdaptedLinear:
        """The share of a linear layer, whose parts have these names and sizes. Row i of a part is the checkpoint's row
        ``order_N[i]``, counted from the first part's first row."""
        own, begin = AdaptedLinear(self, in_features, dtype, device), 0
        for name, size in zip(names, sizes, strict=True):
            order = None if order_N is None else order_N[begin : begin + size] - begin
            self._places[name] = _Place(own, begin, size, order)
            begin += size
        return own

    def prepare(self, changes: Mapping[str, LowRank]) -> Mapping[AdaptedLinear, Any]:
        parts: dict[AdaptedLinear, list[AdapterPart]] = {}
        for path, change in changes.items():
            place = self._place(path)
            parts.setdefault(place.linear, []).append(AdapterPart(place.begin, _fitted(path, change, place)))
        return {linear: self.kernels.pack_adapter(sorted(own, key=_begin)) for linear, own in parts.items()}

    def put(self, slot: int, prepared: Mapping[AdaptedLinear, Any] | None) -> None:
        for linear in {place.linear for place in self._places.values()}:
            self.kernels.set_adapter(linear.table, slot, None if prepared is None else prepared.get(linear))

    @contextmanager
    def applied(self, rows: AdapterRows) -> Iterator[None]:
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def _place(self, path: str) -> _Place:
        """Raises CheckpointError if no layer of that path can be changed."""
        if path.startswith(self.draft_head):
            raise CheckpointError(
                f"The adapter changes {path!r}, a layer of the draft head, which always drafts as the base does; train "
                "it without these layers."
            )
        names = [path]
        for module, file in MODULES:
            names += [name.replace(module, file, 1) for name in names]
        if place := next(filter(None, map(self._places.get, names)), None):
            return place
        steps = path.split(".")
        if what := next((what for step, what in NOT_LINEAR.items() if step in steps), None):
            raise CheckpointError(
                f"The adapter changes {path!r}, but {what} cannot be changed by adapters here; train it on linear "
                "layers alone, such as q_proj and v_proj."
            )
        raise CheckpointError(
            f"The adapter changes {path!r}, which this model does not have: it was made for another base."
        )


def _begin(part: AdapterPart) -> int:
    return part.begin


def _fitted(path: str, change: LowRank, place: _Place) -> LowRank:
    """The change as the layer computes it. Raises CheckpointError if it has another shape than the layer."""
    a_RK, b_NR, scale = change
    linear = place.linear
    found, needed = (b_NR.shape[0], a_RK.shape[1]), (place.N, linear.in_features)
    if found != needed:
        raise CheckpointError(
            f"The adapter's change of {path!r} has shape {list(found)}, but this model's layer has {list(needed)}: it "
            "was made for another base."
        )
    if place.order_N is not None:
        b_NR = b_NR[place.order_N]
    factors = [x.to(linear.dtype) for x in (a_RK, b_NR)]
    if not all(bool(x.isfinite().all()) for x in factors):
        raise CheckpointError(f"The adapter's change of {path!r} holds values that are not finite.")
    a_RK, b_NR = (x.to(linear.device).contiguous() for x in factors)
    return LowRank(a_RK, b_NR, scale)
