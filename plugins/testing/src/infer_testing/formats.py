"""What ``WeightFormatProtocol`` promises, tried on one checkpoint that is stored in a format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infer.contracts.weights import TensorFilesProtocol, WeightFormatProtocol
from infer.errors import CheckpointError, SettingsError
from infer.kernels.reference import ReferenceKernels
from infer.weight import GroupedWeight, Weight
from infer_testing.suite import Skipped, Suite, Violation

MakeFormat = Callable[[Mapping[str, Any], TensorFilesProtocol], WeightFormatProtocol]
NEAR = 0.25
"""How far a quantized weight may be from the plain one: the error of RUN neighbors in a row, as a part of their
magnitude. With 4 bits it is about 0.1; with the scales of other values it is above 1."""
RUN = 32


@dataclass
class Formats:
    """A format, and a checkpoint that is stored in it."""

    make: MakeFormat
    config: Mapping[str, Any]
    files: TensorFilesProtocol
    plain: Mapping[str, Tensor] | None = None
    """The weights that the checkpoint was quantized from, by name."""

    def read(self, files: TensorFilesProtocol | None = None) -> WeightFormatProtocol:
        return self.make(self.config, files or self.files)


@dataclass
class Damaged:
    """Files of which one tensor is another, or missing."""

    files: TensorFilesProtocol
    name: str
    other: Tensor | None

    def names(self) -> Iterable[str]:
        return [name for name in self.files.names() if self.other is not None or name != self.name]

    def tensor(self, name: str) -> Tensor:
        if name != self.name:
            return self.files.tensor(name)
        if self.other is None:
            raise KeyError(name)
        return self.other


SUITE: Suite[Formats] = Suite("check_weight_format")
check = SUITE.check


def check_weight_format(
    make: MakeFormat,
    config: Mapping[str, Any],
    files: TensorFilesProtocol,
    *,
    plain: Mapping[str, Tensor] | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that ``WeightFormatProtocol`` promises on a checkpoint: its config.json and its tensors. ``plain``
    has the weights that it was quantized from; without it, nobody can say whether the values are right. ``only`` names
    checks, ``case`` one case of each. Raises ConformanceError."""
    SUITE.enforce(Formats(make, config, files, plain), only=only, seed=seed, case=case)


def values(weight: Weight) -> Tensor:
    """In fp32."""
    if isinstance(weight, GroupedWeight):
        return replace(weight, dtype=torch.float32).dequantize()
    return weight.float()


@check("names lists each weight once, and weight gives each of them, the same each time, without writing to the files")
def weights(f: Formats, draw: random.Random) -> None:
    before = {name: f.files.tensor(name).clone() for name in f.files.names()}
    format = f.read()
    names = list(format.names())
    if len(set(names)) < len(names):
        raise Violation(f"names lists {next(name for name in names if names.count(name) > 1)} twice")
    for name in names:
        first, again = (format.weight(name) for _ in range(2))
        if not isinstance(first, (Tensor, GroupedWeight)):
            raise Violation(f"weight({name!r}) is a {type(first).__name__}, neither a Tensor nor a GroupedWeight")
        if not torch.equal(values(first), values(again)):
            raise Violation(f"weight({name!r}) gives other values the second time")
        if not values(first).isfinite().all():
            raise Violation(f"weight({name!r}) has values that are not finite")
    for name, old in before.items():
        if not torch.equal(f.files.tensor(name).view(torch.uint8), old.view(torch.uint8)):
            raise Violation(f"reading the weights writes to the stored tensor {name!r}")


@check("Each weight is the one that it was quantized from, but for the rounding to its codes")
def near_plain(f: Formats, draw: random.Random) -> None:
    if f.plain is None:
        raise Skipped("there are no plain weights to compare with")
    format = f.read()
    names = set(format.names())
    for missing in sorted(set(f.plain) - names):
        raise Violation(f"names does not list {missing!r}, which the plain checkpoint has")
    for extra in sorted(names - set(f.plain)):
        raise Violation(f"names lists {extra!r}, which the plain checkpoint does not have")
    for name in sorted(names):
        found, plain = values(format.weight(name)), f.plain[name].float()
        if found.shape != plain.shape:
            raise Violation(f"weight({name!r}) has the shape {list(found.shape)}, not {list(plain.shape)}")
        width = RUN if plain.ndim == 2 and plain.shape[1] % RUN == 0 else plain.shape[-1]
        parts, exact = found.reshape(-1, width), plain.reshape(-1, width)
        error = (parts - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-6)
        if (worst := error.max()) > NEAR:
            row, run = divmod(int(error.argmax()), plain.shape[-1] // width)
            place = f"row {row}, columns {run * width} to {run * width + width - 1}"
            raise Violation(f"weight({name!r}) is off by {worst:.0%} in {place}{_like(parts, exact, error)}")


def _like(parts: Tensor, exact: Tensor, error: Tensor) -> str:
    """What a wrong run of values looks like."""
    index = int(error.argmax())
    found, plain = parts[index], exact[index]
    cosine = float(torch.nn.functional.cosine_similarity(found, plain, dim=0))
    if cosine > 0.95:
        return f": all values are {float(found.norm() / plain.norm()):.3g} times what they should be: another scale"
    if cosine < -0.95:
        return ": the values have the other sign"
    if float((found - found.mean() - plain + plain.mean()).norm() / plain.norm()) < NEAR:
        return f": all values are moved by {float((found - plain).mean()):.3g}: another zero point or minimum"
    if torch.allclose(found.sort().values, plain.sort().values, atol=float(NEAR * plain.abs().max())):
        return ": the values stand in another order"
    return ""


@check("A tensor that is missing, cut or flattened raises a CheckpointError: a checkpoint may be damaged", 12)
def damage(f: Formats, draw: random.Random) -> None:
    name = draw.choice([name for name in sorted(f.files.names()) if f.files.tensor(name).ndim])
    tensor = f.files.tensor(name)
    how = draw.choice(["missing", "cut", "flat"])
    other = {"missing": None, "cut": tensor[:-1].clone(), "flat": tensor.flatten()[:-1].clone()}[how]
    known = f.read()
    weights = {each: known.weight(each) for each in known.names()}
    shapes = {each: weight.shape for each, weight in weights.items()}
    try:
        format = f.read(Damaged(f.files, name, other))
        for each in format.names():
            # Whoever loads a weight compares its shape.
            if each in shapes and format.weight(each).shape != shapes[each]:
                return
        if set(format.names()) != set(shapes):
            return
        if other is None and all(torch.equal(values(format.weight(each)), values(weights[each])) for each in weights):
            return  # what it says is known without it
    except (CheckpointError, SettingsError):
        return
    except Exception as error:
        raise Violation(
            f"where {name!r} is {how}, a {type(error).__name__} is raised ({error}); a CheckpointError says it to users"
        ) from None
    raise Violation(f"where {name!r} is {how}, weights of the same names and shapes are read")


@check("Kernels can multiply by each weight: a product is that of its values", 4)
def products(f: Formats, draw: random.Random) -> None:
    format, kernels = f.read(), ReferenceKernels()
    for name in draw.sample(sorted(format.names()), min(4, len(list(format.names())))):
        weight = format.weight(name)
        if len(weight.shape) != 2:
            continue
        weight = weight.to(torch.device("cpu"), torch.float32)
        x = torch.eye(weight.shape[1])
        found, exact = kernels.linear(x, kernels.pack(weight)), values(weight).T
        if not torch.allclose(found, exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max())):
            raise Violation(f"the product with {name!r} is not that of its values")
