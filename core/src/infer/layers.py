"""What models are composed of, and the table that fits a checkpoint's tensors to them.

A layer declares the checkpoint names it is made from when it is constructed, so that a model's file reads
top to bottom and every name in a checkpoint has exactly one owner. Shapes: see ``infer/protocols.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator
from torch import Tensor

from infer.device import zeros
from infer.errors import CheckpointError
from infer.protocols import Activation, AttentionSpec, HeadNorms, KVCacheView, ModelContext, Rotary

C = TypeVar("C", bound=BaseModel)
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class _Slot:
    shape: tuple[int, ...]
    take: Callable[[Tensor], None]


class Weights:
    """The tensors a model expects, by checkpoint name, and the layers that take them."""

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self._slots: dict[str, _Slot] = {}
        self._finish: list[Callable[[], None]] = []

    def expect(self, name: str, shape: tuple[int, ...], take: Callable[[Tensor], None]) -> None:
        """Declare that the checkpoint holds ``name``. ``take`` gets it in the model's dtype and on its device, and
        copies what it keeps: it may be a view of a file that is replaced tomorrow."""
        assert name not in self._slots, name
        self._slots[name] = _Slot(shape, take)

    def when_loaded(self, finish: Callable[[], None]) -> None:
        self._finish.append(finish)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, slot in self._slots.items()}

    def load(self, tensors: Iterable[tuple[str, Tensor]], optional: Sequence[str] = ()) -> None:
        """Give every tensor to its layer. Raises CheckpointError for a missing, unexpected, misshapen or
        unusable one.

        ``optional`` names may come or not; they are not used. Nor are the rotary frequencies that some old
        checkpoints hold, since they follow from config.json.
        """
        missing = dict(self._slots)
        dtype, device = self.context.dtype, self.context.device
        for name, tensor in tensors:
            slot = missing.pop(name, None)
            if slot is None:
                if name in optional or name.endswith(".rotary_emb.inv_freq"):
                    continue
                again = " twice" if name in self._slots else ", which this model does not have"
                raise CheckpointError(f"The checkpoint holds the tensor {name!r}{again}.")
            if tuple(tensor.shape) != slot.shape:
                raise CheckpointError(
                    f"The tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(slot.shape)}."
                )
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
                raise CheckpointError(
                    f"The tensor {name!r} is of type {str(tensor.dtype).removeprefix('torch.')}; infer loads "
                    "float32, float16 and bfloat16 weights, not quantised ones."
                )
            tensor = tensor.to(device=device, dtype=dtype)
            lowest, highest = tensor.aminmax()  # both are NaN if any value is; many times faster than isfinite
            if not (math.isfinite(lowest) and math.isfinite(highest)):
                raise CheckpointError(
                    f"The tensor {name!r} holds values that are not finite as {str(dtype).removeprefix('torch.')}."
                )
            slot.take(tensor)
        if missing:
            names = sorted(missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"The checkpoint lacks {', '.join(map(repr, names[:3]))}{more}.")
        for finish in self._finish:
            finish()


class Linear:
    """y = x W^T + b, where W may be several checkpoint tensors stacked by rows: one product for q, k, v.

    With an ``activation``, the first of two is the gate: activation(x G^T) * x U^T.
    """

    def __init__(
        self,
        weights: Weights,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        activation: Activation | None = None,
    ) -> None:
        names = [names] if isinstance(names, str) else list(names)
        self.sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        kernels = self._kernels = weights.context.kernels
        self._activation = activation
        pack = kernels.pack if activation is None else kernels.pack_gated
        self._packed: Any = None
        parts: dict[str, Tensor] = {}
        whole: dict[str, tuple[int, ...]] = {"weight": (sum(self.sizes), in_features)}
        if bias:
            whole["bias"] = (sum(self.sizes),)
        left = len(names) * len(whole)

        def take(kind: str, row: int, tensor: Tensor) -> None:
            nonlocal left
            if kind not in parts:
                parts[kind] = zeros(whole[kind], tensor.dtype, tensor.device)
            parts[kind][row : row + len(tensor)] = tensor
            left -= 1
            if left == 0:  # packed at once, so that no more than one layer is in memory twice
                self._packed = pack(parts.pop("weight"), parts.pop("bias", None))

        row = 0
        for name, size in zip(names, self.sizes, strict=True):
            for kind, shape in whole.items():
                weights.expect(f"{name}.{kind}", (size, *shape[1:]), functools.partial(take, kind, row))
            row += size

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._activation is not None:
            return self._kernels.gated_linear(x_TK, self._packed, self._activation)
        return self._kernels.linear(x_TK, self._packed)


class RMSNorm:
    """Root-mean-square norm (Zhang and Sennrich, 2019); ``unit_offset`` scales by 1 + weight."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, unit_offset: bool = False) -> None:
        self.eps, self.unit_offset = eps, unit_offset
        self._kernels = weights.context.kernels
        self.weight_D: Tensor
        weights.expect(f"{name}.weight", (size,), lambda t: setattr(self, "weight_D", t.clone()))

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


class GatedMLP:
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        size: int,
        intermediate: int,
        activation: Activation,
        bias: bool = False,
    ) -> None:
        gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = Linear(weights, gate_up, size, [intermediate] * 2, bias, activation)
        self._down = Linear(weights, f"{name}.down_proj", intermediate, size, bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._down(self._gate_up(x_TD))


class Attention:
    """Projections, optional norms on q and k, rotary embedding, attention over the cache, projection."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        spec: AttentionSpec,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm_unit_offset: bool = False,
    ) -> None:
        H, K, E = spec.num_heads, spec.num_kv_heads, spec.head_size
        if H % K:
            raise CheckpointError(
                f"config.json: num_attention_heads, {H}, is not a multiple of num_key_value_heads, {K}."
            )
        if E % 2:
            raise CheckpointError(f"config.json: head_dim is {E}; rotary embeddings need an even one.")
        self.layer, self.spec = layer, spec
        self._kernels = weights.context.kernels
        self._qkv = Linear(weights, [f"{name}.{part}_proj" for part in "qkv"], size, [H * E, K * E, K * E], bias)
        self._out = Linear(weights, f"{name}.o_proj", H * E, size, bias)
        self._norms: HeadNorms | None = None
        if qk_norm_eps is not None:
            q, k = (RMSNorm(weights, f"{name}.{x}_norm", E, qk_norm_eps, qk_norm_unit_offset) for x in "qk")
            weights.when_loaded(lambda: self._take(HeadNorms(q.weight_D, k.weight_D, q.eps, q.unit_offset)))

    def _take(self, norms: HeadNorms) -> None:
        self._norms = norms

    def __call__(self, x_TD: Tensor, rotary: Rotary, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] for ``rows_N``."""
        T, E = len(x_TD), self.spec.head_size
        q, k, v = torch.split_with_sizes(self._qkv(x_TD), self._qkv.sizes, dim=-1)
        q_THE, k_TKE, v_TKE = q.view(T, -1, E), k.view(T, -1, E), v.view(T, -1, E)
        if self._norms is not None:
            rotary = rotary._replace(norms=self._norms)
        out_THE = cache.attend(self.layer, q_THE, k_TKE, v_TKE, rotary)
        return self._out(select(out_THE, rows_N).flatten(1))


def select(x: Tensor, rows_N: Tensor | None) -> Tensor:
    """These rows; all for None."""
    return x if rows_N is None else x.index_select(0, rows_N)


class RopeParameters(BaseModel, extra="ignore"):
    """Rotary frequencies as config.json gives them."""

    rope_theta: PositiveNumber
    partial_rotary_factor: Literal[1] | None = None

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        layer_type: str | None = None,
        *,
        theta_key: str = "rope_theta",
        default_theta: float = 10_000.0,
    ) -> RopeParameters:
        """From ``rope_parameters`` (transformers 5; nested by layer type in models with several) or from
        ``theta_key`` and ``rope_scaling`` (transformers 4, where a model's local base is never scaled)."""
        given = config_table(config, "rope_parameters")
        if layer_type is not None:
            if given and not any(isinstance(value, dict) for value in given.values()):
                raise CheckpointError("config.json: rope_parameters has to hold a table per layer type.")
            given = config_table(given, layer_type)
        scaling = config_table(config, "rope_scaling") if theta_key == "rope_theta" else {}
        values = {
            "rope_theta": config.get(theta_key, default_theta),
            "partial_rotary_factor": config.get("partial_rotary_factor"),
            "original_max_position_embeddings": config.get("max_position_embeddings"),
        }
        values |= given | scaling
        kind = values.get("rope_type", values.get("type", "default"))
        kinds: dict[str, type[RopeParameters]] = {"default": cls, "linear": LinearRope, "llama3": Llama3Rope}
        if not isinstance(kind, str) or kind not in kinds:
            raise CheckpointError(
                f"config.json asks for rope_type {kind!r}; infer knows {', '.join(map(repr, kinds))}."
            )
        return read_config(kinds[kind], values)

    def inverse_frequencies(self, head_size: int) -> Tensor:
        """[E/2], fp32."""
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        return 1.0 / (self.rope_theta**exponents)


class LinearRope(RopeParameters):
    """Every wavelength is stretched by ``factor`` (Chen et al., 2023)."""

    factor: PositiveNumber

    def inverse_frequencies(self, head_size: int) -> Tensor:
        return super().inverse_frequencies(head_size) / self.factor


class Llama3Rope(RopeParameters):
    """Long wavelengths are stretched by ``factor``, short ones kept, the band between blended (Llama 3.1)."""

    factor: PositiveNumber
    low_freq_factor: PositiveNumber
    high_freq_factor: PositiveNumber
    original_max_position_embeddings: PositiveInt

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor has to be below high_freq_factor")
        return self

    def inverse_frequencies(self, head_size: int) -> Tensor:
        inverse = super().inverse_frequencies(head_size)
        length, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelength = 2 * math.pi / inverse
        smooth = (length / wavelength - low) / (high - low)
        blended = (1 - smooth) * inverse / self.factor + smooth * inverse
        stretched = torch.where(wavelength > length / low, inverse / self.factor, blended)
        return torch.where(wavelength < length / high, inverse, stretched)


class RotaryEmbedding:
    """A table of cos and sin for every position a sequence may reach (Su et al., 2021)."""

    def __init__(self, context: ModelContext, rope: RopeParameters, head_size: int) -> None:
        positions = torch.arange(context.max_seq_len, dtype=torch.float32)
        # Angles in fp32, as models are trained; their cos and sin in float64, so that the table's last bits
        # do not depend on its length.
        angles = torch.outer(positions, rope.inverse_frequencies(head_size)).double()
        self._cos = angles.cos().float().to(context.device)
        self._sin = angles.sin().float().to(context.device)

    def __call__(self, positions_T: Tensor) -> Rotary:
        # Not by brackets: these wake a second thread for a few rows, which then spins beside those of the kernels.
        return Rotary(self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T))


def layer_windows(layer_types: Sequence[LayerType], window: int | None, num_layers: int) -> list[int | None]:
    """Each layer's sliding window, None for full attention. Raises CheckpointError where they disagree."""
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(layer_types)} entries, but num_hidden_layers is {num_layers}."
        )
    if window is None and "sliding_attention" in layer_types:
        raise CheckpointError("config.json: layer_types has 'sliding_attention', but there is no sliding_window.")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def read_config(cls: type[C], values: Mapping[str, Any]) -> C:
    """Validate config.json's fields. Raises CheckpointError naming the first bad one."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{key}: " for key in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "missing" or not place else f" (it is {first['input']!r})"
        raise CheckpointError(f"config.json: {place}{message}{got}.") from None


def config_table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A table within a table; empty where it is absent or null."""
    table = values.get(key)
    if table is not None and not isinstance(table, dict):
        raise CheckpointError(f"config.json: {key} is {table!r}, which is not a table.")
    return table or {}
