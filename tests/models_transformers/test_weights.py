"""In what form the family by transformers' modules holds weights: those that stay wide, and quantized ones."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.formats import writers
from tests.formats.writers import awq, compressed, compressed_config, gptq, scheme
from tests.models.checkpoints import edit_tensors
from tests.models_transformers.checkpoints import VOCAB, family_of, write
from tests.models_transformers.test_architectures import logits, made
from torch import Tensor

from infer.assemble.weights import Weights
from infer.checkpoint.quantize import Quantizer
from infer.contracts.model import SparingModel
from infer.contracts.sections import ModelSettings
from infer.weight import GroupedWeight, Weight
from infer_kernels_cpu.provider import CpuKernels
from infer_models_transformers.model import TransformersModel
from infer_testing.models import Models, Stage

KERNELS = CpuKernels()
SLOW = pytest.mark.slow
TEXT = [random.Random(3).randrange(VOCAB) for _ in range(40)]


@torch.inference_mode()
def ours(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Log-probabilities of each next token, [T, V]."""
    stage = Stage(Models.of(folder, family_of(name), kernels=KERNELS), dtype, 1)
    return stage.model.logits(stage.run([(0, TEXT, 0, len(TEXT))])).float().log_softmax(-1)


@torch.inference_mode()
def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    logits: Tensor = model.eval()(torch.tensor([TEXT])).logits
    return logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", pytest.param("Ernie4_5_MoeForCausalLM", marks=SLOW)])
def test_what_transformers_holds_in_float32(name: str, tmp_path: Path) -> None:
    """In bfloat16, biases by which a router chooses the experts 0 and 2 would all be equal."""
    folder, offsets = write(tmp_path, name), torch.tensor([3.9, 0.0, 2.4, 0.8, 0.0])

    def bias(tensors: dict[str, Tensor], spread: float) -> None:
        for key in tensors:
            if key.endswith("e_score_correction_bias"):
                tensors[key] = (1024 + spread * offsets).view(tensors[key].shape)

    edit_tensors(folder, lambda tensors: bias(tensors, 1.0))
    found = ours(folder, name, torch.bfloat16)
    assert (found - theirs(folder, torch.bfloat16)).abs().mean() < 0.03
    edit_tensors(folder, lambda tensors: bias(tensors, 0.0))
    assert (found - theirs(folder, torch.bfloat16)).abs().mean() > 0.3, "the biases change nothing"


W4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
W8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FORMATS: dict[str, tuple[writers.Pack, dict[str, Any]]] = {
    "awq": (awq(8), {"quant_method": "awq", "bits": 4, "group_size": 8}),
    "gptq": (gptq(group_size=8, symmetric=False), {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}),
    "int4": (compressed(scheme(**W4)), compressed_config(scheme(**W4))),
    "int8": (compressed(scheme("int-quantized", **W8)), compressed_config(scheme("int-quantized", **W8))),
}
PLAIN = re.compile(r"embed|wte|wpe|lm_head|mlp\.gate$|router")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("DeepseekV3ForCausalLM", "int4"),
        ("GPT2LMHeadModel", "gptq"),
        pytest.param("DeepseekV3ForCausalLM", "awq", marks=SLOW),
        pytest.param("DeepseekV3ForCausalLM", "int8", marks=SLOW),
        *(
            pytest.param(name, format, marks=SLOW)
            for name in ("FlexOlmoForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM")
            for format in FORMATS
        ),
    ],
)
def test_quantized_checkpoints(name: str, format: str, tmp_path: Path) -> None:
    """They compute what transformers computes with the weights dequantized, from codes that the kernels keep."""
    pack, table = FORMATS[format]
    columns = re.compile(r"\.c_(attn|fc|proj)$" if name == "GPT2LMHeadModel" else "$^")

    def packed(module: str, weight: Tensor) -> writers.Packed | None:
        """GPTQ makes linear modules of those that have their outputs as columns."""
        if PLAIN.search(module):
            return None
        if not columns.search(module):
            return pack(module, weight)
        kinds, dequantized = pack(module, weight.T) or pytest.fail("it is packed")
        return kinds, dequantized.T.contiguous()

    less: dict[str, Any] = {"num_hidden_layers": 1, "n_layer": 1} if "GPT" in name else {}
    plain = write(tmp_path / "plain", name, **less)
    quantized = writers.quantize(plain, tmp_path / "quantized", packed, table)
    assert (ours(quantized, name) - theirs(plain)).abs().max() < 1e-4
    models = Models.of(quantized, family_of(name), kernels=KERNELS)
    assert models.offer.name == "transformers"
    chosen = models.plugins.choose("weights", models.settings, [models.checkpoint.quant_method])
    stored = Weights(models.settings, models.offer, chosen, models.checkpoint)
    held = stored.sketch(models.context(torch.float32)).quantizer
    bits, size = ("8", r"\d+") if format == "int8" else ("4", "8")
    assert all(re.fullmatch(rf"plain weights|{bits}-bit weights in groups of {size}", form) for form in held.nbytes)
    assert len(held.nbytes) > 1


def weights(model: TransformersModel, quantization: Any, tensors: dict[str, Tensor]) -> dict[str, Weight]:
    sparing: SparingModel = model
    plain, spared = ModelSettings().plain_layers, frozenset(sparing.spared)
    quantizer = Quantizer(quantization, plain, "plain", VOCAB, KERNELS.quantize, spared=spared)
    return dict(quantizer(model.unstack(tensors.items())))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Ernie4_5_MoeForCausalLM"])
@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=SLOW)])
def test_weights_that_are_quantized_while_loading(name: str, quantization: str, tmp_path: Path) -> None:
    """A model computes with them what it computes with the values that the codes stand for."""
    tensors, found = load_file(write(tmp_path, name) / "model.safetensors"), []
    for plain in (False, True):
        model = made(name)
        held = weights(model, quantization, tensors)
        assert any(isinstance(weight, GroupedWeight) for weight in held.values())
        values = {key: w.dequantize() if isinstance(w, GroupedWeight) else w for key, w in held.items()}
        model.load((values if plain else held).items())
        found.append(logits(model))
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()
    model = made(name)
    model.load(tensors.items())
    assert (logits(model) - found[1]).abs().max() > 1e-4 * found[1].abs().max(), "nothing was quantized"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("GPT2LMHeadModel", r"transformer\.wpe\.weight"),
        ("Ernie4_5_MoeForCausalLM", r"\.e_score_correction_bias|\.gate\.weight"),
        ("HunYuanMoEV1ForCausalLM", r"\.gate\.wg\.weight"),
    ],
)
def test_positions_and_routers_stay_plain(name: str, plain: str, tmp_path: Path) -> None:
    tensors = load_file(write(tmp_path, name) / "model.safetensors")
    held = weights(made(name, dtype=torch.bfloat16), "int4", tensors)
    for key, weight in held.items():
        if len(weight.shape) == 2:
            assert isinstance(weight, Tensor) == (re.search(plain, key) is not None), key
