"""transformers' attention interface: where its modules hand q, K and V over, and where infer's cache answers.

Two implementations are registered there. ``infer_try`` notes, on the meta device, what each attention module asks for:
shapes, scale, window (which transformers writes into a mask), soft cap and sinks. ``infer`` attends. Shapes: T tokens,
H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer_models_transformers.modules import HALVES, Team, rotates_halves

TRY, RUN = "infer_try", "infer"
POINT = "infer_point"
"""The attribute of an attention module that has its ``Point``."""
WINDOW = "infer_window"
"""The attribute of a mask that tells the window which it stands for, as ``window_of`` reads it."""
FAR = 1 << 18
"""Over how many positions a mask is read, at least."""
ROTATE = "apply_rotary_pos_emb"
HARMLESS = frozenset(
    [
        *("dropout", "position_ids", "cache_position", "output_attentions", "output_hidden_states", "use_cache"),
        *("return_dict", "attention_mask", "position_embeddings", "deterministic"),
    ]
)
"""What modules hand over besides, which changes nothing here."""


class UnfitError(Exception):
    """Why a model's attention cannot be computed by infer's cache: "its attention ..."."""


@dataclass
class AttentionCall:
    """What an attention module asks for."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    rotates: bool
    """Whether q and K have just been rotated, halves against each other, over whole heads, and nothing else has been
    done to them since."""

    def spec(self, sinks_H: Tensor | None) -> AttentionSpec:
        size = max(self.key_size, self.value_size)
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, size, self.scale, self.window, self.soft_cap, sinks_H=sinks_H
        )


class Rotations:
    """The rotation that a module has asked for and that the cache is to do, together with storing K."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, Tensor, tuple[int, ...], Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *given: Any, **others: Any) -> Any:
        """Stands in for ``apply_rotary_pos_emb``."""
        if given or others:
            raise UnfitError("rotates q and K in a way of its own")
        self._pending = q, k, _versions(q, k), cos
        return q, k

    def take(self, query: Tensor, key: Tensor) -> Rotary | None:
        """What is to be done to exactly these two."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        q, k, versions, cos = pending
        halves = getattr(cos, HALVES, None)
        if q is not query or k is not key or versions != _versions(q, k) or halves is None:
            raise UnfitError("does something else to q and K after rotating them")
        if 2 * halves[0].shape[-1] != query.shape[-1]:
            raise UnfitError("rotates a part of each head")
        return Rotary(*halves)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if x.is_inference() else x._version for x in tensors)


class Trial:
    """Stands at every module while the forward pass is tried, and notes what those that attend ask for."""

    def __init__(self, module: nn.Module, calls: list[AttentionCall], rotations: Rotations, positions: int) -> None:
        self._module, self._calls, self._rotations = module, calls, rotations
        self._positions = positions
        """Of the longest sequence."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Tensor:
        if any(each.module is self._module for each in self._calls):
            raise UnfitError("is computed twice in a pass by one module")
        scale, soft_cap = given.pop("scaling", None), given.pop("softcap", None)
        window, sinks = given.pop("sliding_window", None), given.pop("s_aux", None)
        if given.pop("is_causal", None) is False or getattr(self._module, "is_causal", True) is False:
            raise UnfitError("is not causal")
        odd = [name for name, x in given.items() if name not in HARMLESS and not (x is None or x is False)]
        if odd:
            raise UnfitError(f"depends on {odd[0]}, which infer's kernels do not know")
        if query.shape[0] != 1 or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            raise UnfitError(f"has q, K and V of shapes {[list(x.shape) for x in (query, key, value)]}")
        if query.shape[2] != key.shape[2]:
            raise UnfitError(f"compares {query.shape[2]} queries with {key.shape[2]} keys of its own")
        if mask is not None:
            if not hasattr(mask, WINDOW):
                raise UnfitError("changes its mask in a way of its own, as for positions by ALiBi")
            window = getattr(mask, WINDOW)(max(FAR, self._positions))
            if isinstance(window, str):
                raise UnfitError(window)
        if window is not None and window < 1:
            raise UnfitError(f"has a sliding window of {window} positions")
        rotates = self._rotations.take(query, key) is not None
        call = AttentionCall(
            self._module,
            query.shape[1],
            key.shape[1],
            key.shape[3],
            value.shape[3],
            float(query.shape[3] ** -0.5 if scale is None else scale),
            None if window is None else int(window),
            None if not soft_cap else float(soft_cap),
            sinks,
            rotates,
        )
        self._calls.append(call)
        return value.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


class Point:
    """Where one attention module meets the cache."""

    def __init__(self, layer: int, call: AttentionCall, rotations: Rotations, dtype: torch.dtype, team: Team) -> None:
        self.cache: KVCacheView | None = None
        self._dtype, self._team = dtype, team
        self._layer, self._rotations = layer, rotations
        self._size, self._value_size = max(call.key_size, call.value_size), call.value_size

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Tensor:
        rotary = self._rotations.take(query, key)
        if query.is_meta:
            return value.new_empty((1, query.shape[2], query.shape[1], self._value_size))
        assert self.cache is not None
        q_THE, k_TKE, v_TKE = (self._laid_out(x) for x in (query, key, value))
        with self._team:
            out_THE = self.cache.attend(self._layer, q_THE, k_TKE, v_TKE, rotary)
        return out_THE[None, ..., : self._value_size]

    def _laid_out(self, x: Tensor) -> Tensor:
        """[1, heads, T, e] -> [T, heads, E] in the cache's dtype, with zeros behind heads that are shorter than those
        of K or V."""
        x = x[0].transpose(0, 1).to(self._dtype)
        if x.shape[-1] < self._size:
            return nn.functional.pad(x, (0, self._size - x.shape[-1]))
        return x if x.stride(-1) == 1 else x.contiguous()


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any
) -> tuple[Tensor, None]:
    """What transformers' modules call."""
    point: Callable[..., Tensor] = getattr(module, POINT)
    return point(query, key, value, attention_mask, **given), None


def mask(batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    """An empty mask of the shape that is asked for, which remembers its window."""
    empty = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(empty, WINDOW, functools.cache(functools.partial(window_of, mask_function)))
    return empty


def window_of(mask_function: Callable[..., Any], far: int = FAR) -> int | str | None:
    """The sliding window of a mask over ``far`` positions; None if it is causal without one; what is wrong if it is
    something else."""
    odd = "has a mask that is neither causal nor a sliding window"
    with torch.device("cpu"), torch.utils._python_dispatch._disable_current_modes():
        zero, keys = torch.tensor(0), torch.arange(far)

        def seen(query: int) -> Tensor:
            row: Tensor = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys))
            return row.expand(far)

        try:
            width = int(seen(far - 1).sum())
            for query in (0, 1, 2, width - 1, width, width + 1, 2 * width + 3, 1000, far // 3, far - 1):
                expected = (keys <= query) & (keys > query - width)
                if 0 <= query < far and not torch.equal(seen(query), expected):
                    return odd
        except (IndexError, RuntimeError):  # one that looks something up, such as which tokens are an image's
            return odd
        return None if width == far else width


def rotate_in_cache(module: nn.Module, rotations: Rotations) -> bool:
    """Leave the rotation to the cache, if the module's ``forward`` calls ``apply_rotary_pos_emb``. The function itself
    stays as it is, because all models of that family share it: the module gets a ``forward`` of its own."""
    forward = inspect.unwrap(type(module).forward)
    if "forward" in vars(module):  # it has one of its own already
        return False
    if not isinstance(forward, types.FunctionType) or ROTATE not in forward.__code__.co_names:
        return False
    theirs = forward.__globals__.get(ROTATE)
    if not callable(theirs) or not rotates_halves(theirs):
        return False
    names = {**forward.__globals__, ROTATE: rotations}
    module.forward = types.MethodType(_with_globals(forward, names), module)
    return True


def _direct(module: Any, window: int | None = None, scale: float | None = None) -> None:
    """Lead a module's own ``_attn(q, k, v, mask)`` to the cache."""

    def own(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        given: dict[str, Any] = {"scaling": scale, "sliding_window": window}
        out, _ = attend(module, query, key, value, attention_mask if window is None else None, **given)
        return out.transpose(1, 2), None

    module._attn = own


def _direct_gpt_neo(module: Any) -> None:
    module.bias = None  # its own mask, for all positions by all positions
    _direct(module, module.config.window_size if module.attention_type == "local" else None, 1.0)


def _direct_sdpa(module: Any) -> None:
    """Lead the call of torch's attention in a module's ``forward`` to the cache, by a ``forward`` of its own."""

    def own(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return attend(module, query, key, value)[0].transpose(1, 2)

    functional = types.SimpleNamespace(scaled_dot_product_attention=own)
    theirs: Any = type(module).forward
    names = {**theirs.__globals__, "torch": types.SimpleNamespace(nn=types.SimpleNamespace(functional=functional))}
    module.forward = types.MethodType(_with_globals(theirs, names), module)
    module.config = copy.copy(module.config)  # no other module's
    module.config._attn_implementation_internal = "sdpa"


def _with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    own = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


ADAPTED: Mapping[str, Callable[[Any], None]] = {
    "GPTJAttention": _direct,
    "CodeGenAttention": _direct,
    "GPTNeoSelfAttention": _direct_gpt_neo,
    "FalconAttention": _direct_sdpa,
}
"""Attention modules that do not call transformers' interface, and what makes them, by their classes' names."""


def adaptable(kind: type) -> bool:
    """Whether a model's attention modules are among ``ADAPTED``."""
    return any(name in ADAPTED for name in vars(sys.modules[kind.__module__]))


for name in (TRY, RUN):
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRY, mask)
