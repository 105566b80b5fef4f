"""Modules of infer's kernels that stand in for those of transformers, each after a proof that it computes the same.

A module that stands in yields a tensor of the right shape where it is given one on the meta device, so that a model's
forward pass can be tried before there are weights. Shapes: T tokens, K inputs, N outputs, D hidden size, E head size.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infer.contracts.kernels import Activation, Expert
from infer.contracts.model import ModelContext
from infer.weight import GroupedWeight, Weight
from infer_layers import Embedding, RMSNorm, Weights

TOLERANCE = 1e-5
"""How far two ways to compute the same in fp32 may be apart, of the largest value."""
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}
HALVES = "infer_halves"
"""The attribute of a cosine that has the cosines and sines of half a head, in fp32."""


class Team:
    """Entered where kernels compute: on a CPU they have a team of threads, and outside of it, torch gets one thread.
    Threads of torch's own would go on spinning for a while after each operation, beside those of the kernels."""

    def __init__(self, device: torch.device) -> None:
        self._changes = device.type == "cpu"
        self._size = torch.get_num_threads()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let torch compute with one thread until the context ends."""
        self._size = torch.get_num_threads()
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def __enter__(self) -> None:
        if self._changes:
            torch.set_num_threads(self._size)

    def __exit__(self, *_: object) -> None:
        if self._changes:
            torch.set_num_threads(1)


class Packed(nn.Module):
    """What infer's kernels compute."""

    team: Team


class PackedLinear(Packed):
    """An ``nn.Linear``, or another module that computes the same. ``product`` is [T, K] -> [T, N]."""

    weight: Tensor

    def __init__(self, product: Callable[[Tensor], Tensor], theirs: Any, in_features: int, out_features: int):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._product = product
        _keep(self, weight=theirs.weight, bias=getattr(theirs, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.out_features)
        if x.is_meta:
            _check_dtype(x, self.weight)
            return x.new_empty(shape)
        with self.team:
            return self._product(x.reshape(-1, x.shape[-1])).view(shape)


def _keep(module: nn.Module, **empty: Tensor | None) -> None:
    """Give a module the empty parameters of that which it stands for, whose types and shapes some models ask for, but
    not as its own."""
    for name, x in empty.items():
        object.__setattr__(module, name, x)


class PackedGatedMLP(Packed):
    """down(activation(gate(x)) * up(x)), whose first product computes the activation, too."""

    def __init__(self, mlp: Callable[[Tensor], Tensor], theirs: Any) -> None:
        super().__init__()
        self._mlp = mlp
        self._weight = [theirs.gate_proj.weight]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            _check_dtype(x, self._weight[0])
            return torch.empty_like(x)
        with self.team:
            return self._mlp(x.reshape(-1, x.shape[-1])).view(x.shape)


class PackedEmbedding(Packed):
    weight: Tensor

    def __init__(self, embedding: Embedding, theirs: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = theirs.num_embeddings, theirs.embedding_dim
        self.padding_idx = theirs.padding_idx
        self._embedding = embedding
        _keep(self, weight=theirs.weight)

    def forward(self, ids: Tensor) -> Tensor:
        shape = (*ids.shape, self.embedding_dim)
        if ids.is_meta:
            return torch.empty(shape, dtype=self.weight.dtype, device="meta")
        with self.team:
            return self._embedding(ids.flatten()).view(shape)


class PackedRMSNorm(Packed):
    weight: Tensor

    def __init__(self, norm: RMSNorm, theirs: Any) -> None:
        super().__init__()
        self._norm = norm
        _keep(self, weight=theirs.weight)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            _check_dtype(x, self.weight)
            return torch.empty_like(x)
        with self.team:
            if x.dim() == 4 and len(x) == 1:  # heads, in any order: the kernel takes any strides but the last
                return self._norm(x[0])[None]
            return self._norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class RotaryTable(nn.Module):
    """A rotary embedding as a table of what the module yields for each position that a sequence may reach.

    Kinds whose frequencies follow from a sequence's length see the longest sequence that is served, as in
    ``infer_layers.rotary``."""

    def __init__(self, theirs: nn.Module, context: ModelContext) -> None:
        super().__init__()
        self._theirs = [theirs]  # not a child: it has no weights
        self.config = getattr(theirs, "config", None)
        self._context = context
        self._tables: dict[Any, tuple[Tensor, ...]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        if (tables := self._tables.get(layer_type)) is None:
            tables = self._tables[layer_type] = self._made(layer_type)
        if position_ids.is_meta:
            rows = [table.new_empty((position_ids.shape[-1], table.shape[1]), device="meta") for table in tables]
        else:
            rows_T = position_ids.flatten()
            rows = [table.index_select(0, rows_T) for table in tables]
        if len(rows) == 1:
            return rows[0][None]
        cos, sin, *halves = rows
        cos = cos[None]
        if halves:
            setattr(cos, HALVES, tuple(halves))
        return cos, sin[None]

    def _made(self, layer_type: str | None) -> tuple[Tensor, ...]:
        """What the module yields, for every position: cos and sin in the model's dtype, or one tensor. If the halves of
        a head have equal ones, cos and sin of half a head in fp32 follow."""
        c = self._context
        with torch.inference_mode(False), torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            positions = torch.arange(c.max_seq_len)[None]
            arguments = () if layer_type is None else (layer_type,)
            made = self._theirs[0](torch.zeros(1, 1, 1), positions, *arguments)
        if isinstance(made, Tensor):
            return (made[0].to(device=c.device),)
        cos, sin = (x[0] for x in made)
        tables = [x.to(device=c.device, dtype=c.dtype) for x in (cos, sin)]
        half = cos.shape[1] // 2
        if cos.shape[1] % 2 == 0 and all(torch.equal(x[:, :half], x[:, half:]) for x in (cos, sin)):
            tables += [x[:, :half].to(device=c.device, dtype=torch.float32).contiguous() for x in (cos, sin)]
        return tuple(tables)


class PackedExperts(Packed):
    """The chosen experts of a mixture, on the kernels' own grid. It is called as transformers' experts are: with the
    tokens, the indices of each token's experts, and their shares."""

    def __init__(self, weights: Weights, name: str, theirs: Any, activation: Activation) -> None:
        super().__init__()
        count, double, size = theirs.gate_up_proj.shape
        self._kernels, self._activation = weights.context.kernels, activation
        self._packed: Any = None
        shapes = {"gate_proj": (double // 2, size), "up_proj": (double // 2, size), "down_proj": (size, double // 2)}
        held: list[dict[str, Weight]] = [{} for _ in range(count)]
        left = count * len(shapes)

        def take(index: int, part: str, weight: Weight) -> None:
            nonlocal left
            held[index][part] = weight.clone()
            left -= 1
            if left == 0:
                self._packed = self._kernels.pack_experts(map(expert, range(count)), count)

        def expert(index: int) -> Expert:
            own, held[index] = held[index], {}
            return Expert(stacked([own["gate_proj"], own["up_proj"]]), own["down_proj"])

        for index, (part, shape) in itertools.product(range(count), shapes.items()):
            weights.expect(f"{name}.{index}.{part}.weight", shape, functools.partial(take, index, part))

        def cut(parts: Sequence[str], stack: Tensor) -> Iterable[tuple[str, Tensor]]:
            for index, own in enumerate(stack):
                for part, rows in zip(parts, own.chunk(len(parts)), strict=True):
                    yield f"{name}.{index}.{part}.weight", rows

        for parts, stack in ((("gate_proj", "up_proj"), "gate_up_proj"), (("down_proj",), "down_proj")):
            shape = tuple(getattr(theirs, stack).shape)
            weights.expect_stack(f"{name}.{stack}", shape, functools.partial(cut, parts))

    def forward(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        if x.is_meta:
            return torch.empty_like(x)
        with self.team:
            return self._kernels.gated_experts(x, experts.int(), shares.float(), self._packed, self._activation)


def stacked(parts: Sequence[Weight]) -> Weight:
    """One weight of the parts' rows. Parts that are stored in ways that do not stack become a plain one."""
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts) and all(map(grouped[0].stacks_with, grouped)):
        return GroupedWeight.stack(grouped)
    return torch.cat([part if isinstance(part, Tensor) else part.dequantize() for part in parts])


def experts_activation(module: Any) -> Activation | None:
    """The activation of transformers' stacked experts, if these are gated MLPs without biases; None if a module has no
    such experts, or others."""
    form = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    if not all(getattr(module, key, None) is value for key, value in (form | {"has_post_expert_norm": False}).items()):
        return None
    if set(module._parameters) != {"gate_up_proj", "down_proj"}:
        return None
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, dim=-1)
    try:
        found = module._apply_gate(x)
    except Exception:  # of another kind, whatever it raises
        return None
    return next((name for name, act in ACTIVATIONS.items() if _near(found, act(gate) * up)), None)


def is_linear(module: nn.Module) -> bool:
    """Whether a module with a weight [N, K] computes x W^T + b."""
    if type(module) is nn.Linear:
        return True
    if not isinstance(module, nn.Linear):
        return False
    return _same(module, {"weight": (3, 4), "bias": (3,)}, (2, 4), lambda x, p: nn.functional.linear(x, *p.values()))


def embedding_scale(module: nn.Module) -> float | None:
    """What a module multiplies the rows of its weight by; None if it is no embedding, or one that does something
    else."""
    if type(module) is nn.Embedding:
        return 1.0
    if not isinstance(module, nn.Embedding):
        return None
    ids = torch.tensor([2, 0, 1])
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(torch.eye(3), requires_grad=False)}
    tried.padding_idx = None
    try:
        found = tried(ids)
        scale = float(found.max())
    except Exception:  # of another kind, whatever it raises
        return None
    return scale if _near(found, scale * torch.eye(3)[ids]) else None


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module with a weight [K, N] computes x W + b."""
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["weight", "bias"] or own["weight"].dim() != 2 or type(module).__name__ != "Conv1D":
        return False
    tried = copy.copy(module)
    tried.nf = 3  # type: ignore[assignment]
    return _same(tried, {"weight": (4, 3), "bias": (3,)}, (2, 4), lambda x, p: x @ p["weight"] + p["bias"])


def rms_norm_of(module: nn.Module) -> tuple[float, bool] | None:
    """The epsilon of an RMS norm, and whether it scales by 1 + weight; None if a module is no RMS norm."""
    own = dict(module.named_parameters(recurse=False))
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if list(own) != ["weight"] or own["weight"].dim() != 1 or not isinstance(eps, float) or _odd(module):
        return None
    size = len(own["weight"])

    def formula(offset: float) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
        return lambda x, p: x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (p["weight"] + offset)

    for unit_offset in (False, True):
        if _same(module, {"weight": (size,)}, (3, size), formula(float(unit_offset))):
            return eps, unit_offset
    return None


def is_rotary(module: nn.Module) -> bool:
    """Whether a module yields cosines and sines of positions, and nothing else goes into them."""
    if any(True for _ in module.parameters()) or not any(True for _ in module.buffers()):
        return False
    names = list(inspect.signature(module.forward).parameters)
    return names in (["x", "position_ids"], ["x", "position_ids", "layer_type"])


def gated_activation(module: nn.Module, parts: list[str], act: str) -> Activation | None:
    """The activation of an MLP that is down(activation(gate(x)) * up(x)), ``parts`` being the names of gate, up and
    down and ``act`` that of the activation; None if it is something else, or one that kernels do not know."""
    if set(dict(module.named_children())) != {*parts, act} or list(module.parameters(recurse=False)):
        return None
    linears = [getattr(module, part) for part in parts]
    if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        return None
    tried = copy.copy(module)
    tried._modules = dict(module._modules)
    generator = torch.Generator().manual_seed(0)
    small = [torch.randn(n, k, generator=generator) for n, k in ((6, 4), (6, 4), (4, 6))]
    for part, weight in zip(parts, small, strict=True):
        N, K = weight.shape
        linear = nn.Linear(K, N, bias=False, dtype=torch.float32, device="cpu")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        tried._modules[part] = linear
    x = torch.randn(5, 4, generator=generator)
    try:
        found = tried(x)
    except Exception:  # a forward pass of another kind: whatever it raises, it is not this one
        return None
    gate, up, down = small
    for name, activation in ACTIVATIONS.items():
        if _near(found, (activation(x @ gate.T) * (x @ up.T)) @ down.T):
            return name
    return None


def rotates_halves(function: Callable[..., Any]) -> bool:
    """Whether ``function(q, k, cos, sin)`` rotates the halves of q's and k's heads against each other."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 4, generator=generator).repeat(1, 1, 2) for _ in range(2))
    try:
        found = function(q, k, cos, sin)
    except Exception:  # of another kind, whatever it raises
        return False

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]

    return isinstance(found, tuple) and len(found) == 2 and _near(found[0], rotated(q)) and _near(found[1], rotated(k))


def _check_dtype(x: Tensor, weight: Tensor) -> None:
    """Raises TypeError if kernels would take x for what it is not."""
    if x.dtype != weight.dtype:
        raise TypeError(f"it multiplies {x.dtype} by {weight.dtype}")


def _odd(module: nn.Module) -> bool:
    """Whether a module has parts of its own or buffers."""
    return any(True for _ in module.children()) or any(True for _ in module.buffers())


def _same(
    module: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    given: tuple[int, ...],
    formula: Callable[[Tensor, dict[str, Tensor]], Tensor],
) -> bool:
    """Whether a module computes a formula, tried in fp32 with random parameters of the given shapes."""
    generator, tried = torch.Generator().manual_seed(0), copy.copy(module)
    tried._parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)
        for name, shape in shapes.items()
        if module._parameters.get(name) is not None
    }
    tried._parameters |= {name: None for name in module._parameters if name not in tried._parameters}
    x = torch.randn(given, generator=generator)
    try:
        with torch.no_grad():
            found = tried(x)
    except Exception:  # of another kind, whatever it raises
        return False
    return _near(found, formula(x, {name: p for name, p in tried._parameters.items() if p is not None}))


def _near(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
