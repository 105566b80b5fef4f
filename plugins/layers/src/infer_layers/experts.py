"""A mixture of experts: a router chooses a few MLPs for each token."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.contracts.kernels import Expert, ExpertActivation, Routing
from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight, joined
from infer_layers.linear import Linear
from infer_layers.table import Weights


class Experts:
    """The results of each token's experts, summed with the shares that the router gives them (Shazeer et al., 2017).

    A checkpoint stores the experts apart, as ``experts.7.gate_proj.weight``, or stacked in one tensor. Each model
    expects them apart, and declares which stacks may stand in their place:

    - ``names`` are the names that the layer has in checkpoints, and ``router`` those of the router within it; the first
      of each are those of the expected weights.
    - ``gate_up`` are the names of an expert's gate and up projections, or the single name of the tensor that holds
      both, or of up, if the ``activation`` is that of experts without a gate; ``down`` is that of its down projection.
    - ``stacks`` are the names of tensors of all experts: gate and up, [X, 2 I, D], or up, [X, I, D], and down,
      [X, D, I]. If ``transposed``, their last two dimensions are in the other order.
    - If ``interleaved``, gate and up alternate in the rows of the single tensor that holds both.
    - With ``biases``, router and experts have biases. In stacks, their names end in "_bias".

    ``share_scales`` is the name of a tensor [X] that the experts' shares are multiplied by.

    The router sees vectors of ``routed_size``, by default ``size``. ``router_dtype`` is the dtype in which its logits
    are computed, by default the model's; ``selection_bias`` the name of the bias that the choice, but no share, depends
    on. ``shared`` is an MLP for all tokens, whose result is added, multiplied by the sigmoid of the product that
    ``shared_gate`` names if there is one.

    Raises CheckpointError if a token is to have more experts than there are.
    """

    def __init__(
        self,
        weights: Weights,
        names: str | Sequence[str],
        size: int,
        intermediate: int,
        count: int,
        routing: Routing,
        activation: ExpertActivation = "silu",
        *,
        router: str | Sequence[str] = "gate",
        gate_up: Sequence[str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        stacks: Sequence[tuple[str, str]] = (("experts.gate_up_proj", "experts.down_proj"),),
        transposed: bool = False,
        interleaved: bool = False,
        biases: bool = False,
        routed_size: int | None = None,
        router_dtype: torch.dtype | None = None,
        selection_bias: str | None = None,
        share_scales: str | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        shared_gate: str | None = None,
    ) -> None:
        if routing.top > count:
            raise CheckpointError(f"config.json: a token has {routing.top} experts, but there are {count}.")
        name, *others = [names] if isinstance(names, str) else names
        router, *routers = [router] if isinstance(router, str) else router
        kernels = self._kernels = weights.context.kernels
        self._routing, self._activation, self._router_dtype = routing, activation, router_dtype
        routed_size = routed_size or size
        self._router = Linear(weights, f"{name}.{router}", routed_size, count, biases, dtype=router_dtype)
        kinds = ("weight", "bias") if biases else ("weight",)
        for kind, place in itertools.product(kinds, (f"{n}.{r}" for n in (name, *others) for r in (router, *routers))):
            if place != f"{name}.{router}":
                shape = (count, routed_size) if kind == "weight" else (count,)
                renamed = functools.partial(_named, f"{name}.{router}.{kind}")
                weights.expect_stack(f"{place}.{kind}", shape, renamed)
        self._selection_bias: Tensor | None = None
        if selection_bias is not None:
            weights.expect(f"{name}.{selection_bias}", (count,), self._take_bias, torch.float32)
        self._share_scales_X: Tensor | None = None
        if share_scales is not None:
            weights.expect(f"{name}.{share_scales}", (count,), self._take_scales, torch.float32)
        self._shared = shared
        self._shared_gate: Any = None
        if shared_gate is not None:
            weights.expect(f"{name}.{shared_gate}.weight", (1, size), self._take_gate, packed=True)
        self._packed: Any = None
        rows = intermediate if activation == "relu2" else 2 * intermediate
        order_N = torch.arange(rows).view(-1, 2).t().flatten() if interleaved else None
        width = rows // len(gate_up)
        shapes = dict.fromkeys(gate_up, (width, size)) | {down: (size, intermediate)}
        held: list[dict[str, Weight]] = [{} for _ in range(count)]
        left = count * len(shapes) * (1 + biases)

        def take(index: int, key: str, weight: Weight) -> None:
            nonlocal left
            held[index][key] = weight.clone()
            left -= 1
            if left == 0:  # Pack as soon as the layer is complete, so that only one expert is in memory twice.
                self._packed = kernels.pack_experts(map(expert, range(count)), count)

        def expert(index: int) -> Expert:
            own, held[index] = held[index], {}
            made: list[Any] = []
            for kind in kinds:
                made += [_stacked([own.pop(f"{part}.{kind}") for part in gate_up], order_N)]
                made += [own.pop(f"{down}.{kind}")]
            return Expert(*made)

        for index, (part, (N, K)), kind in itertools.product(range(count), shapes.items(), kinds):
            key, shape = f"{part}.{kind}", (N, K) if kind == "weight" else (N,)
            weights.expect(
                f"{name}.experts.{index}.{key}", shape, functools.partial(take, index, key), packed=kind == "weight"
            )

        def cut(parts: Sequence[str], kind: str, stack: Tensor) -> Iterable[tuple[str, Tensor]]:
            for index, own in enumerate(stack.mT if transposed and kind == "weight" else stack):
                for part, rows in zip(parts, own.chunk(len(parts)), strict=True):
                    yield f"{name}.experts.{index}.{part}.{kind}", rows

        for place, pair in itertools.product((name, *others), stacks):
            for parts, stack, (N, K) in zip((gate_up, [down]), pair, ((rows, size), (size, intermediate)), strict=True):
                whole = (count, K, N) if transposed else (count, N, K)
                weights.expect_stack(f"{place}.{stack}", whole, functools.partial(cut, parts, "weight"))
                if biases:
                    weights.expect_stack(f"{place}.{stack}_bias", (count, N), functools.partial(cut, parts, "bias"))

    def _take_bias(self, bias_X: Tensor) -> None:
        self._selection_bias = bias_X.clone()

    def _take_scales(self, scales_X: Tensor) -> None:
        self._share_scales_X = scales_X.clone()

    def _take_gate(self, weight_1D: Weight) -> None:
        # Twice the same row, because libraries' products with a single one depend on the number of rows of x.
        self._shared_gate = self._kernels.pack(_stacked([weight_1D, weight_1D], None))

    def __call__(self, x_TD: Tensor, routed_TD: Tensor | None = None) -> Tensor:
        """[T, D]. The router sees ``routed_TD`` if it is given, and x otherwise."""
        routed_TD = x_TD if routed_TD is None else routed_TD
        logits_TX = self._router(routed_TD if self._router_dtype is None else routed_TD.to(self._router_dtype))
        experts_TJ, shares_TJ = self._kernels.route(logits_TX, self._routing, self._selection_bias)
        if self._share_scales_X is not None:
            shares_TJ = shares_TJ * self._share_scales_X.index_select(0, experts_TJ.flatten()).view(shares_TJ.shape)
        out_TD = self._kernels.gated_experts(x_TD, experts_TJ, shares_TJ, self._packed, self._activation)
        if self._shared is None:
            return out_TD
        shared_TD = self._shared(x_TD)
        if self._shared_gate is not None:
            # Not torch.sigmoid, whose vector and scalar forms differ in the last bit.
            open_T1 = 1.0 / (1.0 + torch.exp(-self._kernels.linear(x_TD, self._shared_gate)[:, :1].float()))
            shared_TD = (open_T1 * shared_TD.float()).to(x_TD.dtype)
        return out_TD + shared_TD


def _named(name: str, x: Tensor) -> Iterable[tuple[str, Tensor]]:
    return [(name, x)]


def _stacked(parts: Sequence[Weight], order_N: Tensor | None) -> Weight:
    """One weight of the parts' rows, in the order ``order_N`` if it is given. Parts that are stored in ways that do not
    stack become a plain weight."""
    whole = parts[0]
    if len(parts) > 1:
        grouped = [part for part in parts if isinstance(part, GroupedWeight)]
        if len(grouped) == len(parts) and all(map(grouped[0].stacks_with, grouped)):
            whole = GroupedWeight.stack(grouped)
        else:
            whole = joined([part if isinstance(part, Tensor) else part.dequantize() for part in parts])
    if order_N is None:
        return whole
    return whole[order_N.to(whole.device)] if isinstance(whole, Tensor) else whole.rows(order_N.to(whole.codes.device))
