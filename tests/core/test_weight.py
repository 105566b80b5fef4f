"""Grouped weights: their values against float64, and layers made from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.test_layers import context, random, refused, rope
from tests.models.checkpoints import write_checkpoint
from torch import Tensor

from infer import LLM, SamplingParams, hookimpl
from infer.contracts.attention import AttentionSpec
from infer.contracts.weights import TensorFilesProtocol, WeightFormatRegistration
from infer.errors import PluginError
from infer.kernels.reference import ReferenceKernels
from infer.weight import GroupedWeight, Weight
from infer_layers import Attention, Embedding, GatedMLP, Head, Linear, Weights
from infer_layers.rotary import rotary_order

FORMS = ("symmetric", "minimum", "table")


def grouped(n: int, k: int, bits: Any = 4, group: int = 8, form: str = "symmetric", seed: int = 0) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k * bits // 8), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, k // group, generator=generator) / 2**bits
    return GroupedWeight(
        codes,
        scales.half(),
        bits,
        minimum_NG=-scales.half() * 5 if form == "minimum" else None,
        table=torch.randn(16, generator=generator) if form == "table" else None,
    )


def meaning(weight: Weight) -> Tensor:
    """[N, K] in float64, value by value."""
    if isinstance(weight, Tensor):
        return weight.double()
    (N, K), values = weight.shape, torch.empty(weight.shape, dtype=torch.float64)
    for n in range(N):
        for k in range(K):
            byte = int(weight.codes[n, k * weight.bits // 8])
            code = byte if weight.bits == 8 else byte // 16 if k % 2 else byte % 16
            scale = float(weight.scales_NG[n, k // weight.group_size])
            if weight.minimum_NG is not None:
                values[n, k] = scale * code + float(weight.minimum_NG[n, k // weight.group_size])
            elif weight.table is not None:
                values[n, k] = scale * float(weight.table[code])
            else:
                values[n, k] = scale * (code - (8 if weight.bits == 4 else 128))
    return values


CASES = [(4, 8, "symmetric"), (4, 16, "minimum"), (4, 4, "table"), (8, 8, "symmetric"), (8, 32, "minimum")]


@pytest.mark.parametrize(("bits", "group", "form"), CASES)
def test_dequantized(bits: int, group: int, form: str) -> None:
    weight = grouped(5, 32, bits, group, form)
    torch.testing.assert_close(weight.dequantize().double(), meaning(weight), rtol=1e-6, atol=1e-7)
    assert weight.to(torch.device("cpu"), weight.dtype) is weight
    half = weight.to(torch.device("cpu"), torch.bfloat16).dequantize()
    assert torch.equal(half, weight.dequantize().bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_shares_nothing(form: str) -> None:
    weight = grouped(5, 32, form=form)
    copy, before = weight.clone(), weight.dequantize()
    for tensor in (weight.codes, *weight.floats):
        tensor.zero_()
    assert torch.equal(copy.dequantize(), before)
    assert (copy.bits, copy.int8_activations, copy.dtype) == (weight.bits, weight.int8_activations, weight.dtype)


@pytest.mark.parametrize(("bits", "group", "form"), CASES)
def test_the_reference_multiplies_by_grouped_weights(bits: int, group: int, form: str) -> None:
    kernels, weight, bias, x = ReferenceKernels(), grouped(12, 32, bits, group, form), random(12), random(3, 32, seed=1)
    product = x.double() @ meaning(weight).T + bias.double()
    torch.testing.assert_close(kernels.linear(x, kernels.pack(weight, bias)).double(), product, rtol=1e-5, atol=1e-5)
    gate, up = product.chunk(2, -1)
    gated = kernels.gated_linear(x, kernels.pack_gated(weight, bias), "silu")
    torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-5)
    rows = kernels.embedding(torch.tensor([3, 0]), kernels.pack(weight))
    torch.testing.assert_close(rows.double(), meaning(weight)[[3, 0]], rtol=1e-6, atol=1e-7)


MIXES: dict[str, list[Weight]] = {
    "alike": [grouped(4, 16, seed=1), grouped(2, 16, seed=2), grouped(2, 16, seed=3)],
    "other groups": [grouped(4, 16, seed=1), grouped(2, 16, group=4, seed=2), grouped(2, 16, seed=3)],
    "other bits": [grouped(4, 16, seed=1), grouped(2, 16, seed=2), grouped(2, 16, 8, seed=3)],
    "other forms": [grouped(2 + 2 * (i == 0), 16, form=form, seed=i) for i, form in enumerate(FORMS)],
    "other tables": [grouped(2 + 2 * (i == 0), 16, form="table", seed=i) for i in range(3)],
    "plain beside": [random(4, 16), grouped(2, 16, seed=2), random(2, 16, seed=5)],
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_layer_of_several_weights(mix: str) -> None:
    w = Weights(context())
    linear = Linear(w, ["q", "k", "v"], 16, [4, 2, 2], [True, False, True])
    given: dict[str, Weight] = {f"{name}.weight": weight for name, weight in zip("qkv", MIXES[mix], strict=True)}
    biases = {"q.bias": random(4, seed=7), "v.bias": random(2, seed=8)}
    w.load(reversed([*given.items(), *biases.items()]))
    x = random(3, 16, seed=9)
    parts = [x.double() @ meaning(weight).T for weight in given.values()]
    parts[0], parts[2] = parts[0] + biases["q.bias"], parts[2] + biases["v.bias"]
    torch.testing.assert_close(linear(x).double(), torch.cat(parts, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_other_layers_of_grouped_weights(stacked: bool) -> None:
    w = Weights(context())
    embedding = Embedding(w, "embed", 6, 16)
    head = Head(w, embedding, "head", 6, 16, tied=True)
    mlp = GatedMLP(w, "mlp", 16, 8, "silu", gate_up=["gate_up"] if stacked else ["gate", "up"])
    given = {name: grouped(shape[0], shape[1], seed=i) for i, (name, shape) in enumerate(w.shapes().items())}
    if not stacked:
        given["mlp.up.weight"] = grouped(8, 16, 8, seed=20)
    w.load(given.items())
    x = random(3, 16, seed=9)
    table = meaning(given["embed.weight"])
    torch.testing.assert_close(embedding(torch.tensor([4])).double(), table[4:5], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(head(x).double(), x.double() @ table.T, rtol=1e-5, atol=1e-5)
    names = ["gate_up"] if stacked else ["gate", "up"]
    gate, up = (x.double() @ torch.cat([meaning(given[f"mlp.{n}.weight"]) for n in names]).T).chunk(2, -1)
    expected = (gate * gate.sigmoid() * up) @ meaning(given["mlp.down_proj.weight"]).T
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_rows_of_partly_rotated_heads_are_put_in_order(stacked: bool) -> None:
    """Grouped or plain, stacked or not."""
    names = ["qkv"] if stacked else ["q", "k", "v"]
    spec, parameters, found = AttentionSpec(2, 1, 8, 1.0), rope({"partial_rotary_factor": 0.5}, partial=True), []
    order = rotary_order(4, 8)
    assert order is not None
    for plain in (True, False):
        w = Weights(context())
        attention = Attention(w, "a", 0, 16, spec, parameters, qkv=names)
        given = {name: grouped(shape[0], shape[1], seed=i) for i, (name, shape) in enumerate(w.shapes().items())}
        w.load((name, weight.dequantize() if plain else weight) for name, weight in given.items())
        found.append(attention._qkv(random(3, 16)))
        whole = torch.cat([meaning(given[f"a.{name}.weight"]) for name in names])
        rows = torch.cat((order, 8 + order, 16 + order, torch.arange(24, 32)))
        expected = random(3, 16).double() @ whole[rows].T
        torch.testing.assert_close(found[-1].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(*found)


def test_layers_keep_copies_of_grouped_weights() -> None:
    w = Weights(context())
    linear = Linear(w, "linear", 16, 4)
    weight = grouped(4, 16)
    w.load([("linear.weight", weight)])
    x = random(2, 16)
    before = linear(x)
    weight.codes.zero_()
    assert torch.equal(linear(x), before)


def test_grouped_weights_that_do_not_fit() -> None:
    codes, scales = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 2)
    assert "codes and [4, 3] scales, which do not fit 4 bits" in refused(lambda: GroupedWeight(codes, torch.ones(4, 3)))
    assert "[3, 2] scales" in refused(lambda: GroupedWeight(codes, torch.ones(3, 2)))
    assert "int8 codes" in refused(lambda: GroupedWeight(codes.to(torch.int8), scales))
    assert "not both" in refused(lambda: GroupedWeight(codes, scales, 4, scales, torch.ones(16)))
    assert "table of 16" in refused(lambda: GroupedWeight(codes, scales, 8, table=torch.ones(16)))
    w = Weights(context())
    Linear(w, "linear", 16, 4)
    assert "has shape [4, 32], but" in refused(lambda: w.load([("linear.weight", grouped(4, 32))]))
    scales[1, 1] = torch.nan
    assert "'linear.weight' holds values that are not finite" in refused(
        lambda: w.load([("linear.weight", GroupedWeight(codes, scales))])
    )


class Nibbles:
    """A WeightFormatProtocol: of a quantized weight, the codes have its name, and ``.scale`` follows for the scales."""

    def __init__(self, files: TensorFilesProtocol) -> None:
        self.files, self.all = files, set(files.names())

    def names(self) -> list[str]:
        return [name for name in self.files.names() if not name.endswith(".scale")]

    def weight(self, name: str) -> Weight:
        tensor = self.files.tensor(name)
        if f"{name}.scale" not in self.all:
            return tensor
        return GroupedWeight(tensor, self.files.tensor(f"{name}.scale"))


class Plugin:
    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_weight_formats(self) -> list[WeightFormatRegistration]:
        make = lambda config, files, settings: Nibbles(files)  # noqa: E731
        return [WeightFormatRegistration("nibbles", make, "four bits", methods=("nibbles",))]


def test_a_plugin_reads_quantized_weights(tmp_path: Path) -> None:
    """Answers are those of the same weights, plain."""
    plain = write_checkpoint(tmp_path / "plain", "phi3")
    quantized = tmp_path / "quantized"
    shutil.copytree(plain, quantized)
    tensors, packed = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        packed[name] = tensor
        if tensor.ndim == 2:
            weight = grouped(tensor.shape[0], tensor.shape[1], seed=len(packed))
            packed[name], packed[f"{name}.scale"] = weight.codes, weight.scales_NG
            tensors[name] = weight.dequantize()
    save_file(tensors, plain / "model.safetensors")
    save_file(packed, quantized / "model.safetensors")
    file = quantized / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "nibbles"}}))
    found = []
    for folder in (plain, quantized):
        with LLM(str(folder), plugins=[Plugin()], kernels={"backend": "reference", "threads": 1}) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
            found.append(llm.generate([[5, 6, 7, 8]], params)[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == found[1].logprobs
    with pytest.raises(PluginError, match="quant_method 'nibbles', which no installed plugin reads"):
        LLM(str(quantized), kernels={"backend": "reference", "threads": 1})
