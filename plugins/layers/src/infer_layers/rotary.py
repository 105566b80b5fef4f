"""Rotary embeddings (Su et al., 2021) and the ways to stretch them, each as transformers defines it, but for one thing.

A rope's frequencies are fixed when the model is made. In transformers, two kinds choose them by the length of a
sequence, so that an answer would depend on how its prompt is cut into chunks; here they depend on the longest sequence
that is served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, Field, PositiveInt, model_validator
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.model import ModelContext
from infer.errors import CheckpointError
from infer_layers.config import PositiveNumber, config_table, read_config

Length = Annotated[int, Field(gt=1)]
MAX_HEAD = 1 << 16
"""The most values of a head that are rotated; published models have 256."""


class RopeParameters(BaseModel, extra="ignore", frozen=True):
    """Rotary frequencies as config.json gives them. This class is the kind ``default``."""

    rope_theta: PositiveNumber
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """The leading fraction of every head that is rotated; None for the whole head."""
    max_position_embeddings: PositiveInt | None = None

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        layer_type: str | None = None,
        *,
        theta_key: str = "rope_theta",
        default_theta: float = 10_000.0,
        partial: bool = False,
        kinds: Mapping[str, type[RopeParameters]] | None = None,
    ) -> RopeParameters:
        """Read ``rope_parameters`` (transformers 5, a table per layer type in models with several) or ``theta_key`` and
        ``rope_scaling`` (transformers 4, which never scales the base of local layers).

        ``partial`` allows a ``partial_rotary_factor`` below 1. ``kinds`` are the supported rope types; None for all of
        ``ROPE_KINDS``. Raises CheckpointError for anything else.
        """
        kinds = ROPE_KINDS if kinds is None else kinds
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
        values["max_position_embeddings"] = config.get("max_position_embeddings")
        if layer_type is None and (original := config.get("original_max_position_embeddings")) is not None:
            values["original_max_position_embeddings"] = original
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str) or kind not in kinds:
            raise CheckpointError(
                f"config.json asks for rope_type {kind!r}; infer knows {', '.join(map(repr, kinds))}."
            )
        rope = read_config(kinds[kind], values)
        if not partial and rope.partial_rotary_factor not in (None, 1):
            raise CheckpointError(
                f"config.json: partial_rotary_factor is {rope.partial_rotary_factor}, but models of this architecture "
                "rotate whole heads; it has to be 1."
            )
        return rope

    def rotated(self, head_size: int) -> int:
        """How many of a head's leading values are rotated, an even number."""
        return len(self._exponents(head_size)) * 2

    def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
        """[rotated / 2], fp32. ``max_seq_len`` is the longest sequence that is served."""
        return 1.0 / (self.rope_theta ** self._exponents(head_size))

    def magnitude(self) -> float:
        """The factor that cos and sin are multiplied by."""
        return 1.0

    def query_scales(self, positions_P: Tensor) -> Tensor | None:
        """What queries at these positions are multiplied by, fp32 [P]; None for 1."""
        return None

    def _size(self, head_size: int) -> int:
        return int(head_size * (self.partial_rotary_factor or 1))

    def _exponents(self, head_size: int) -> Tensor:
        size = self._size(head_size)
        if size < 1:
            raise CheckpointError(
                f"config.json: partial_rotary_factor is {self.partial_rotary_factor}, which leaves nothing to rotate "
                f"of a head_dim of {head_size}."
            )
        if size > MAX_HEAD:
            raise CheckpointError(
                f"config.json asks for a head of {head_size} values; infer rotates {MAX_HEAD} at most."
            )
        return torch.arange(0, size, 2, dtype=torch.int64).float() / size

    def _made_for(self) -> int:
        if self.max_position_embeddings is None:
            raise CheckpointError("config.json: this rope_type needs max_position_embeddings.")
        return self.max_position_embeddings


class LinearRope(RopeParameters, frozen=True):
    """Every wavelength is stretched by ``factor`` (Chen et al., 2023)."""

    factor: PositiveNumber

    def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
        return super().inverse_frequencies(head_size) / self.factor


class DynamicRope(RopeParameters, frozen=True):
    """The base grows with the sequence's length once that exceeds ``max_position_embeddings``. Here the longest
    sequence that is served counts, in transformers the current one. The two agree up to ``max_position_embeddings``,
    and the engine admits no longer sequences."""

    factor: PositiveNumber

    def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
        made_for, size = self._made_for(), self._size(head_size)
        if max_seq_len <= made_for:
            return super().inverse_frequencies(head_size)
        if size < 3:
            raise CheckpointError(f"config.json: rope_type 'dynamic' needs more than {size} rotated values per head.")
        growth = self.factor * max_seq_len / made_for - (self.factor - 1)
        base: float = self.rope_theta * growth ** (size / (size - 2))
        return 1.0 / (base ** self._exponents(head_size))


class Llama3Rope(RopeParameters, frozen=True):
    """Long wavelengths are stretched by ``factor``, short ones are kept, and those between are blended (Llama 3.1)."""

    factor: PositiveNumber
    low_freq_factor: PositiveNumber
    high_freq_factor: PositiveNumber
    original_max_position_embeddings: PositiveInt

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor has to be below high_freq_factor")
        return self

    def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
        inverse = super().inverse_frequencies(head_size)
        length, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelength = 2 * math.pi / inverse
        smooth = (length / wavelength - low) / (high - low)
        blended = (1 - smooth) * inverse / self.factor + smooth * inverse
        stretched = torch.where(wavelength > length / low, inverse / self.factor, blended)
        return torch.where(wavelength < length / high, inverse, stretched)


class YarnRope(RopeParameters, frozen=True):
    """Long wavelengths are stretched by ``factor``, short ones are kept, with a ramp between them; cos and sin are
    scaled up to sharpen attention (Peng et al., 2023)."""

    factor: PositiveNumber | None = None
    """None: ``max_position_embeddings`` / ``original_max_position_embeddings``."""
    original_max_position_embeddings: Length
    attention_factor: PositiveNumber | None = None
    beta_fast: PositiveNumber | None = None
    beta_slow: PositiveNumber | None = None
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    truncate: bool = True

    def _factor(self) -> float:
        return self.factor or self._made_for() / self.original_max_position_embeddings

    def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
        inverse, size = super().inverse_frequencies(head_size), self._size(head_size)
        if self.rope_theta == 1:
            raise CheckpointError("config.json: rope_type 'yarn' needs a rope_theta other than 1.")

        def place(rotations: float) -> float:
            """The index in a head of the wavelength that makes ``rotations`` turns within the original length."""
            length = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return size * math.log(length) / (2 * math.log(self.rope_theta))

        low, high = place(self.beta_fast or 32), place(self.beta_slow or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(len(inverse)).float() - low) / (0.001 if low == high else high - low)
        stretch = ramp.clamp(0, 1)
        return inverse / self._factor() * stretch + inverse * (1 - stretch)

    def magnitude(self) -> float:
        def scale(weight: float) -> float:
            return max(1.0, 0.1 * weight * math.log(self._factor()) + 1.0)

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


class TemperedYarnRope(YarnRope, frozen=True):
    """Queries grow with the logarithm of their position, in steps of the length that the model was trained with first,
    so that attention to many positions stays sharp (Llama 4's temperature, Ministral 3)."""

    llama_4_scaling_beta: Annotated[float, Field(ge=0)] = 0.0

    def query_scales(self, positions_P: Tensor) -> Tensor | None:
        steps_P = (positions_P / self.original_max_position_embeddings).floor()
        return 1 + self.llama_4_scaling_beta * torch.log(1 + steps_P)


class LongRope(RopeParameters, frozen=True):
    """Every wavelength has two factors of its own, one for short sequences and one for long ones (Ding et al., 2024).

    transformers switches to the long factors once a sequence exceeds ``original_max_position_embeddings``; its earlier
    tokens' keys, computed with the short factors, are then wrong. Here, as in vLLM, ``engine.max_seq_len`` decides for
    all sequences: if it is above that length, all use the long factors.
    """

    short_factor: tuple[PositiveNumber, ...]
    long_factor: tuple[PositiveNumber, ...]
    factor: PositiveNumber | None = None
    original_max_position_embeddings: Length
    attention_factor: PositiveNumber | None = None

    def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
        exponents = self._exponents(head_size)
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != len(exponents):
                raise CheckpointError(
                    f"config.json: {name} has {len(factors)} values, but {len(exponents)} are rotated pairs of a head."
                )
        long = max_seq_len > self.original_max_position_embeddings
        factors_R = torch.tensor(self.long_factor if long else self.short_factor, dtype=torch.float32)
        return 1.0 / (factors_R * self.rope_theta**exponents)

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or self._made_for() / self.original_max_position_embeddings
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position_embeddings))


class ProportionalRope(LinearRope, frozen=True):
    """The shortest wavelengths of a whole head rotate, as many as ``partial_rotary_factor`` says, and the rest of the
    head's pairs stay as they are (Gemma 4)."""

    factor: PositiveNumber = 1.0

    def rotated(self, head_size: int) -> int:
        return head_size

    def _exponents(self, head_size: int) -> Tensor:
        pairs = int((self.partial_rotary_factor or 1) * head_size // 2)
        return torch.arange(0, 2 * pairs, 2, dtype=torch.int64).float() / head_size


ROPE_KINDS: dict[str, type[RopeParameters]] = {
    "default": RopeParameters,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "llama3": Llama3Rope,
    "proportional": ProportionalRope,
}
"""Classes by config.json's ``rope_type``. A plugin may add its own."""


class ScaledRotary(Rotary):
    """A rotation, and what queries are multiplied by before it. Views and kernels see the rotation only."""

    scale_T11: Tensor
    """[T, 1, 1], in the model's dtype."""


class RotaryEmbedding:
    """A table of cos and sin for every position that a sequence may reach.

    Kernels rotate the two halves of a head against each other. If only a head's leading part is rotated, ``Attention``
    reorders the head so that each half begins with half of the rotated part; the remaining pairs have cos = 1 and
    sin = 0.
    """

    def __init__(self, context: ModelContext, rope: RopeParameters, head_size: int) -> None:
        inverse = rope.inverse_frequencies(head_size, context.max_seq_len)
        self._scales_P11: Tensor | None = None
        if context.device.type == "meta":
            self._cos, self._sin = torch.empty(2, context.max_seq_len, head_size // 2, device="meta")
            return
        positions = torch.arange(context.max_seq_len, dtype=torch.float32)
        # Angles are fp32, as in training. Their cos and sin are computed in float64, so that the table's last bits do
        # not depend on its length.
        angles = torch.outer(positions, inverse).double()
        unrotated = (0, head_size // 2 - len(inverse))
        cos, sin = (angles.cos() * rope.magnitude()).float(), (angles.sin() * rope.magnitude()).float()
        self._cos = torch.nn.functional.pad(cos, unrotated, value=1.0).to(context.device)
        self._sin = torch.nn.functional.pad(sin, unrotated).to(context.device)
        scales_P = rope.query_scales(positions)
        if scales_P is not None and (scales_P != 1).any():
            self._scales_P11 = scales_P.to(context.device, context.dtype)[:, None, None]

    def __call__(self, positions_T: Tensor) -> Rotary:
        # Indexing by brackets would wake a second OpenMP thread even for a few rows, and that thread would then spin
        # beside the kernels' own.
        rotation = self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)
        if self._scales_P11 is None:
            return Rotary(*rotation)
        scaled = ScaledRotary(*rotation)
        scaled.scale_T11 = self._scales_P11.index_select(0, positions_T)
        return scaled


def rotary_order(rotated: int, head_size: int, interleaved: bool = False) -> Tensor | None:
    """The order of a head's values in which each half of the head begins with half of the rotated part; None if they
    are in that order. The rotated part's halves are rotated against each other or, if ``interleaved``, its neighbors.

    An attention score is a sum over the values of a head, so reordering q and K alike does not change it.
    """
    if rotated == head_size and not interleaved:
        return None
    part, rest = torch.arange(rotated), torch.arange(rotated, head_size)
    left, right = part.view(-1, 2).T if interleaved else part.chunk(2)
    half = len(rest) // 2
    return torch.cat((left, rest[:half], right, rest[half:]))
