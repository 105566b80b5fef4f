"""``check_weight_format``: ours pass, and it names the bugs that are planted in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.examples import seeded
from tests.formats.writers import awq, compressed, compressed_config, gptq, linear, scheme, write
from tests.testing.planted import Bug, Bugs, caught
from torch import Tensor

from infer.checkpoint import Folder
from infer.checkpoint.tensors import PlainFormat
from infer.contracts.weights import TensorFilesProtocol, WeightFormatProtocol
from infer.weight import GroupedWeight, Weight
from infer_formats import infer_weight_formats
from infer_testing import check_weight_format

Stored = tuple[Mapping[str, Any], TensorFilesProtocol, dict[str, Tensor]]
MakeFormat = Callable[[Mapping[str, Any], TensorFilesProtocol], WeightFormatProtocol]
INT4 = scheme(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
WRITERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "compressed-tensors": (linear(compressed(INT4)), compressed_config(INT4)),
    "gptq": (linear(gptq()), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    "awq": (linear(awq()), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stored]:
    @functools.cache
    def made(kind: str) -> Stored:
        pack, config = WRITERS[kind]
        folder = tmp_path_factory.mktemp(kind)
        quantized, plain = write(folder, pack, config, num_hidden_layers=1)
        read = Folder(quantized)
        return read.config(), read.tensors(), load_file(plain / "model.safetensors")

    return made


def ours(kind: str) -> MakeFormat:
    (format,) = [r for r in infer_weight_formats() if kind in r.methods]
    return lambda config, files: format.factory(config, files, format.settings())


@pytest.mark.parametrize(
    "kind", ["compressed-tensors", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gptq", "awq"))]
)
@pytest.mark.draws
@seeded()
def test_ours_pass(kind: str, seed: int, stored: Callable[[str], Stored]) -> None:
    config, files, plain = stored(kind)
    check_weight_format(ours(kind), config, files, plain=plain, seed=seed)


def test_a_tensor_that_says_nothing_new_may_be_missing(stored: Callable[[str], Stored]) -> None:
    """``g_idx`` of columns in order."""
    config, files, plain = stored("gptq")
    check_weight_format(ours("gptq"), config, files, plain=plain, only=["damage"], seed=1795836781000002)


def test_plain_tensors_pass(stored: Callable[[str], Stored]) -> None:
    _, files, _ = stored("compressed-tensors")
    check_weight_format(lambda config, files: PlainFormat(files), {}, files, only=["weights", "damage"])


class Wrapped:
    """Our format, changed by subclasses."""

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        self.files = files
        self.inner = ours("compressed-tensors")(config, files)

    def names(self) -> list[str]:
        return [*self.inner.names()]

    def weight(self, name: str) -> Weight:
        weight = self.inner.weight(name)
        return self.grouped(weight) if isinstance(weight, GroupedWeight) else weight

    def grouped(self, weight: GroupedWeight) -> Weight:
        return weight


planted: Bugs[type[Wrapped]] = Bugs([])


@planted.each
def test_a_planted_bug_is_named(bug: Bug[type[Wrapped]], stored: Callable[[str], Stored]) -> None:
    config, files, plain = stored("compressed-tensors")
    caught(bug, lambda **keys: check_weight_format(bug.make, config, files, plain=plain, **keys))


@planted("groups take their neighbors' scales", "near_plain", r"weight\('.*'\) is off by \d+% in row \d+, columns")
class OtherGroup(Wrapped):
    def grouped(self, weight: GroupedWeight) -> Weight:
        return replace(weight, scales_NG=weight.scales_NG.roll(1, 0))


@planted("scales are twice what they are", "near_plain", "all values are 2 times what they should be: another scale")
class Doubled(Wrapped):
    def grouped(self, weight: GroupedWeight) -> Weight:
        minimum = None if weight.minimum_NG is None else weight.minimum_NG * 2
        return replace(weight, scales_NG=weight.scales_NG * 2, minimum_NG=minimum)


@planted("zero points are one off", "near_plain", "all values are moved by .*: another zero point or minimum")
class ZeroOff(Wrapped):
    def grouped(self, weight: GroupedWeight) -> Weight:
        assert weight.minimum_NG is not None
        return replace(weight, minimum_NG=weight.minimum_NG + 4 * weight.scales_NG.float())


@planted("the halves of bytes are swapped", "near_plain", "the values stand in another order")
class Nibbles(Wrapped):
    def grouped(self, weight: GroupedWeight) -> Weight:
        return replace(weight, codes=weight.codes << 4 | weight.codes >> 4)


@planted("a weight is left out", "near_plain", "names does not list 'lm_head.weight'")
class NoHead(Wrapped):
    def names(self) -> list[str]:
        return [name for name in super().names() if not name.startswith("lm_head")]


@planted("what is damaged raises KeyError", "damage", r"is missing, a KeyError is raised")
class Careless(Wrapped):
    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        super().__init__(config, files)
        for name in files.names():
            if name.endswith("weight_packed"):
                files.tensor(name.replace("_packed", "_scale"))


@planted("names are listed twice", "weights", "twice")
class Twice(Wrapped):
    def names(self) -> list[str]:
        return super().names() * 2


@planted("a stored tensor is changed in place", "weights", "gives other values the second time|writes to the stored")
class InPlace(Wrapped):
    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        super().__init__(config, Kept(files))
        self.times = 0

    def grouped(self, weight: GroupedWeight) -> Weight:
        self.times += 1
        return replace(weight, scales_NG=weight.scales_NG * self.times)


class Kept:
    def __init__(self, files: TensorFilesProtocol) -> None:
        self.names, self.tensor = files.names, files.tensor
