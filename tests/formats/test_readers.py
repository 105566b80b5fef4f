"""Quantized checkpoints of each format: their weights bit by bit, and their answers against ``transformers`` with the
same weights dequantized."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.examples import slowly
from tests.formats import writers
from tests.formats.writers import awq, compressed, compressed_config, fp8, gptq, linear, scheme
from tests.models.checkpoints import Family, edit_tensors
from tests.models.test_against_transformers import CASES as MODELS
from torch import Tensor

from infer import LLM, SamplingParams
from infer.checkpoint import Checkpoint, Folder
from infer.contracts.weights import WeightFormatProtocol
from infer.errors import CheckpointError
from infer.weight import GroupedWeight
from infer_formats import infer_weight_formats

PROMPT = [5, 6, 7, 8, 200, 201, 3, 17, 96, 31, 8, 8]
REFERENCE = {"backend": "reference", "threads": 1}


def reader(folder: Path) -> WeightFormatProtocol:
    checkpoint = Checkpoint(Folder(folder))
    (format,) = [r for r in infer_weight_formats() if checkpoint.quant_method in r.methods]
    return format.factory(checkpoint.config, checkpoint.container.tensors(), format.settings())


def check_weights(quantized: Path, plain: Path) -> dict[str, Any]:
    """All weights are there, in the order of their file, and equal the dequantized ones bit for bit."""
    read, expected, found = reader(quantized), load_file(plain / "model.safetensors"), {}
    names = list(read.names())
    assert names == sorted(expected)
    for name in names:
        found[name] = weight = read.weight(name)
        values = weight.dequantize() if isinstance(weight, GroupedWeight) else weight
        assert torch.equal(values, expected[name]), name
        if isinstance(weight, GroupedWeight):
            assert all(tensor.is_contiguous() for tensor in (weight.codes, *weight.floats))
    return found


@torch.inference_mode()
def logprobs(folder: Path, tokens: list[int]) -> Tensor:
    """What ``transformers`` says of each next token."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: Tensor = model.eval()(torch.tensor([tokens])).logits
    return logits[0].log_softmax(-1)


def check_answers(quantized: Path, *references: Path, backend: str = "reference", **sections: Any) -> None:
    """Log-probabilities within 1e-4, and greedy tokens."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    with LLM(str(quantized), kernels=REFERENCE | {"backend": backend}, **sections) as llm:
        (answer,) = llm.generate([PROMPT], params)
    tokens = PROMPT + answer.token_ids
    for reference in references:
        expected = logprobs(reference, tokens)
        assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == answer.token_ids
        assert answer.prompt_logprobs is not None
        assert answer.logprobs is not None
        for position, said in enumerate([*answer.prompt_logprobs[1:], *answer.logprobs]):
            assert said is not None
            for token, value in said.top:
                assert value == pytest.approx(expected[position, token].item(), abs=1e-4)


W4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
W8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
DYNAMIC8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
HALF = torch.bfloat16

DENSE: dict[str, Family] = {"compressed-tensors": "qwen3", "gptq": "qwen2", "awq": "phi3", "fp8": "qwen3"}
"""The family whose answers are compared with weights of several schemes of a method."""
COMPRESSED: dict[str, tuple[writers.Scheme, torch.dtype]] = {
    "int4-group": (scheme(**W4), HALF),
    "int4-group-asymmetric": (scheme(**W4 | {"symmetric": False}), HALF),
    "int4-channel": (scheme(num_bits=4, strategy="channel"), torch.float32),
    "int4-channel-asymmetric": (scheme(num_bits=4, strategy="channel", symmetric=False), torch.float16),
    "int4-tensor": (scheme(num_bits=4, strategy="tensor"), torch.float32),
    "int8-group": (scheme(**W4 | {"num_bits": 8}), torch.float32),
    "int8-group-asymmetric": (scheme(**W4 | {"num_bits": 8, "symmetric": False}), HALF),
    "int8-channel-asymmetric": (scheme(num_bits=8, strategy="channel", symmetric=False), HALF),
    "w8a16": (scheme("int-quantized", **W8), torch.float32),
    "w8-tensor": (scheme("naive-quantized", num_bits=8, strategy="tensor"), torch.float32),
    "w8-asymmetric": (scheme("int-quantized", **W8 | {"symmetric": False}), HALF),
    "w4-in-bytes": (scheme("naive-quantized", num_bits=4, strategy="channel", symmetric=False), HALF),
    "fp8-tensor": (scheme("float-quantized", **FP8, strategy="tensor"), torch.float32),
    "fp8-channel": (scheme("float-quantized", **FP8, strategy="channel"), HALF),
    "fp8-block": (scheme("float-quantized", **FP8, strategy="block", block_structure=[16, 32]), torch.float32),
    "fp8-block-uneven": (scheme("float-quantized", **FP8, strategy="block", block_structure=[40, 40]), torch.float32),
}
"""Schemes and the type of their scales."""


@pytest.mark.parametrize("case", COMPRESSED)
def test_weights_that_compressed_tensors_writes(case: str, tmp_path: Path) -> None:
    """In a checkpoint of each; its head is not quantized."""
    chosen, dtype = COMPRESSED[case]
    quantized, plain = writers.write(tmp_path, linear(compressed(chosen, dtype)), compressed_config(chosen))
    found = check_weights(quantized, plain)
    query = found["model.layers.0.self_attn.q_proj.weight"]
    if case.startswith("fp8"):
        assert query.dtype == torch.float32
    else:
        assert (query.bits, query.int8_activations) == (4 if case.startswith("int4") else 8, False)
        assert query.scales_NG.dtype == dtype
        assert (query.minimum_NG is None) == (chosen.weights.symmetric is True)


@pytest.mark.parametrize("case", ["int4-group-asymmetric", "w8a16", *slowly("int4-group", "fp8-block")])
def test_answers_of_compressed_tensors(case: str, tmp_path: Path) -> None:
    """``transformers`` reads the quantized checkpoint, too, unless it has packed zero points."""
    chosen, dtype = COMPRESSED[case]
    made = writers.write(
        tmp_path, linear(compressed(chosen, dtype)), compressed_config(chosen), family=DENSE["compressed-tensors"]
    )
    check_answers(*made, *([] if "asymmetric" in case else made[:1]))


def test_groups_of_modules(tmp_path: Path) -> None:
    """A whole name comes before a pattern, a pattern before the class; each group has a format of its own."""
    whole = scheme(targets=["model.layers.1.mlp.up_proj"], **W4 | {"group_size": 16})
    patterns = scheme("int-quantized", ["re:.*mlp.up", r"re:model\.layers\.0\.mlp"], **W8)
    classes = scheme("float-quantized", ["Embedding", "Linear"], **FP8, strategy="tensor")

    def pack(module: str, weight: Tensor) -> writers.Packed | None:
        if module.endswith(("embed_tokens", "lm_head", "layers.1.self_attn.o_proj")):
            return None
        patterned = "mlp.up" in module or "layers.0.mlp" in module
        return compressed(whole if module in whole.targets else patterns if patterned else classes)(module, weight)

    config = compressed_config(classes, patterns, whole, ignore=["lm_head", r"re:.*1\.self_attn\.o_proj$"])
    assert config["format"] == "mixed-precision"
    quantized, plain = writers.write(tmp_path, pack, config)
    check_weights(quantized, plain)
    check_answers(quantized, plain)


@pytest.mark.parametrize("case", ["w8a8", "w4a8"])
def test_rounded_activations(case: str, tmp_path: Path) -> None:
    """Dynamic int8 activations are what a weight says of its product. ``model.activations`` may say otherwise."""
    format, args = {"w8a8": ("int-quantized", W8), "w4a8": ("pack-quantized", W4)}[case]
    chosen = scheme(format, activations=DYNAMIC8, **args)
    made = writers.write(tmp_path, linear(compressed(chosen)), compressed_config(chosen))
    for name, weight in check_weights(*made).items():
        assert ("_proj" in name) == (isinstance(weight, GroupedWeight) and weight.int8_activations)
    check_answers(*made, model={"activations": "plain"})
    with pytest.raises(AssertionError):
        check_answers(*made)  # rounding can be seen


def one_sided(pack: Any) -> Any:
    """Packs weights with rows of positive or of negative values, whose zero points are the least and the greatest."""
    return lambda module, weight: pack(module, weight.abs() * (torch.arange(len(weight)) % 2 * 2 - 1)[:, None])


GPTQ: dict[str, tuple[Any, dict[str, Any]]] = {
    "int4": (gptq(), {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "int4-asymmetric": (gptq(symmetric=False), {"bits": 4, "group_size": 32, "sym": False}),
    "int4-v2": (
        gptq(symmetric=False, v1=False),
        {"bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "int4-one-sided": (one_sided(gptq(symmetric=False)), {"bits": 4, "group_size": 32, "sym": False}),
    "int8-one-sided": (one_sided(gptq(8, symmetric=False)), {"bits": 8, "group_size": 32, "sym": False}),
    "int8-rows": (gptq(8, -1), {"bits": 8, "group_size": -1, "sym": True}),
    "int8-asymmetric": (gptq(8, 16, symmetric=False, dtype=HALF), {"bits": 8, "group_size": 16, "sym": False}),
    "shuffled": (gptq(shuffled=True, symmetric=False), {"bits": 4, "group_size": 32, "sym": False, "desc_act": True}),
    "last-group-smaller": (gptq(group_size=40), {"bits": 4, "group_size": 40, "sym": True}),
}


@pytest.mark.parametrize("case", [*list(GPTQ)[::3], *slowly(*(case for i, case in enumerate(GPTQ) if i % 3))])
def test_weights_that_gptq_writes(case: str, tmp_path: Path) -> None:
    """With a quantized head."""
    pack, config = GPTQ[case]
    everything = lambda module, weight: None if module.endswith("embed_tokens") else pack(module, weight)  # noqa: E731
    config = {"quant_method": "gptq", "lm_head": True} | config
    quantized, plain = writers.write(tmp_path, everything, config, num_hidden_layers=1)
    found = check_weights(quantized, plain)
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight"):
        grouped = isinstance(found[name], GroupedWeight)
        assert grouped == (case not in ("shuffled", "last-group-smaller"))
        assert not grouped or (found[name].minimum_NG is None) == config["sym"]


@pytest.mark.parametrize("case", ["shuffled", *slowly("int4-asymmetric", "int8-rows")])
def test_answers_of_gptq(case: str, tmp_path: Path) -> None:
    pack, config = GPTQ[case]
    check_answers(*writers.write(tmp_path, linear(pack), {"quant_method": "gptq"} | config, family=DENSE["gptq"]))


def test_biases_of_zeros(tmp_path: Path) -> None:
    """AutoGPTQ writes one for every layer; other biases that the model does not have are refused."""
    pack, config = GPTQ["int4"]

    def biased(module: str, weight: Tensor) -> writers.Packed:
        kinds, dequantized = pack(module, weight)
        return kinds | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, dequantized

    quantized, plain = writers.write(tmp_path, linear(biased), {"quant_method": "gptq"} | config, num_hidden_layers=1)
    check_answers(quantized, plain)
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(quantized, lambda tensors: tensors[name].__setitem__(3, 0.5))
    with pytest.raises(CheckpointError, match=f"holds the tensor '{name}', which this model does not have"):
        LLM(str(quantized), kernels=REFERENCE)


def test_modules_that_gptq_stores_in_other_ways(tmp_path: Path) -> None:
    """``dynamic`` names them by patterns; the first that matches counts."""
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "dynamic": {
            r"-:.*\.o_proj": {},
            r"+:.*\.1\..*(up|gate)_proj$": {"bits": 8, "group_size": 16, "sym": False},
            r".*_proj": {"group_size": 16},
            r".*\.1\.": {"bits": 2 * 4},
        },
    }

    def pack(module: str, weight: Tensor) -> writers.Packed | None:
        if module.endswith(("embed_tokens", "lm_head", "o_proj")):
            return None
        special = ".1." in module and module.endswith(("up_proj", "gate_proj"))
        return (gptq(8, 16, symmetric=False) if special else gptq(group_size=16))(module, weight)

    check_weights(*writers.write(tmp_path, pack, config))


@pytest.mark.parametrize(("group_size", "dtype"), [(32, torch.float16), (-1, HALF), (20, torch.float16)])
def test_weights_that_awq_writes(group_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "GEMM"}
    made = writers.write(tmp_path, linear(awq(group_size, dtype)), config, num_hidden_layers=1)
    for name, weight in check_weights(*made).items():
        if "_proj" in name:
            assert isinstance(weight, GroupedWeight) == (group_size != 20)


@pytest.mark.parametrize("backend", ["cpu", *slowly("reference")])
def test_answers_of_awq(backend: str, tmp_path: Path) -> None:
    """Of a family that stacks the parts of a layer."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    check_answers(*writers.write(tmp_path, linear(awq()), config, family=DENSE["awq"]), backend=backend)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), HALF])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_plain_tensors_of_16_bits(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Beside scales of 16 bits of either type."""
    pack = awq(dtype=torch.float16) if method == "awq" else gptq(dtype=HALF)
    config = {"quant_method": method, "bits": 4, "group_size": 32} | ({} if method == "awq" else {"sym": True})
    quantized, plain = writers.write(tmp_path, linear(pack), config, num_hidden_layers=1, dtype=dtype)
    assert load_file(quantized / "model.safetensors")["model.norm.weight"].dtype == dtype
    check_answers(quantized, plain, model={"dtype": "float32"})


MIXTURE: Family = "qwen3_moe"
MIXTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["gate"]}),
    "gptq": (gptq(group_size=16), {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}),
    "compressed-tensors": (
        compressed(scheme(**W4 | {"group_size": 16}), HALF),
        compressed_config(scheme(**W4 | {"group_size": 16}), ignore=["lm_head", "re:.*mlp.gate$"]),
    ),
}


@pytest.mark.parametrize("case", [*list(MIXTURES)[2:], *slowly(*list(MIXTURES)[:2])])
def test_answers_of_mixtures_of_experts(case: str, tmp_path: Path) -> None:
    """As the hub has them: each expert's projections are modules of their own, and the router is plain."""
    pack, config = MIXTURES[case]
    experts = lambda module, weight: None if module.endswith("mlp.gate") else pack(module, weight)  # noqa: E731
    size = {"num_hidden_layers": 1, "moe_intermediate_size": 32}
    made = writers.write(tmp_path, linear(experts), config, family=MIXTURE, **size)
    found = check_weights(*made)
    grouped = {name for name, weight in found.items() if isinstance(weight, GroupedWeight)}
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in grouped
    assert "model.layers.0.mlp.gate.weight" not in grouped
    for backend in ("reference", "cpu"):
        check_answers(*made, backend=backend)


FP8_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "block": (fp8((16, 32)), {"weight_block_size": [16, 32]}),
    "block-uneven": (fp8((128, 40)), {"weight_block_size": [128, 40], "modules_to_not_convert": ["lm_head"]}),
    "powers-of-two": (fp8((16, 32), dtype=torch.float8_e8m0fnu), {"weight_block_size": [16, 32], "scale_fmt": "ue8m0"}),
    "tensor": (fp8(None, "weight_scale"), {"activation_scheme": "dynamic"}),
    "tensor-inverse": (fp8(None), {"fmt": "e4m3"}),
}


@pytest.mark.parametrize("case", FP8_CASES)
def test_weights_of_fp8(case: str, tmp_path: Path) -> None:
    pack, config = FP8_CASES[case]
    check_weights(*writers.write(tmp_path, linear(pack), {"quant_method": "fp8"} | config))


def test_a_text_model_inside_another(tmp_path: Path) -> None:
    """config.json has the quantization_config in its text_config."""
    pack, config = FP8_CASES["block"]
    text = lambda module, weight: pack(module, weight) if "language_model.model.layers" in module else None  # noqa: E731
    quantized, plain = writers.write(tmp_path, text, {}, family="gemma3_vision", num_hidden_layers=4)
    file = quantized / "config.json"
    whole = json.loads(file.read_text())
    whole["text_config"]["quantization_config"] = {"quant_method": "fp8"} | config
    del whole["quantization_config"]
    file.write_text(json.dumps(whole))
    names = [name for name, weight in check_weights(quantized, plain).items() if "language_model.model.layers" in name]
    assert names
    check_answers(quantized, plain)


def test_answers_of_fp8(tmp_path: Path) -> None:
    pack, config = FP8_CASES["block"]
    check_answers(*writers.write(tmp_path, linear(pack), {"quant_method": "fp8"} | config, family=DENSE["fp8"]))


W4_SMALL = scheme(**W4 | {"group_size": 16})
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq(group_size=16), {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}),
    "fp8": (fp8((16, 16)), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "compressed-tensors": (compressed(W4_SMALL, HALF), compressed_config(W4_SMALL)),
}
RECURRENT: tuple[Family, ...] = (
    *("qwen3_5", "lfm2", "nemotron_h", "falcon_h1", "bamba", "granite_hybrid", "lfm2_moe", "qwen3_5_moe", "qwen3_next"),
    *("lfm3", "olmo_hybrid", "kimi_linear"),
)


OTHERS = [method for method in METHODS if method != "awq"]
TOGETHER = [
    *(("awq", family) for family in RECURRENT),
    *((method, "qwen3_5") for method in OTHERS),
    *((OTHERS[i % 3], family) for i, family in enumerate(RECURRENT) if family != "qwen3_5"),
]
"""Every family with weights of an asymmetric format and with those of another, and one with all."""


def check_family(method: str, family: Family, backends: Iterable[str], folder: Path, **config: Any) -> None:
    """What has sizes that fit is quantized, but for routers and tables."""
    pack, table = METHODS[method]
    packed = []

    def fits(module: str, weight: Tensor) -> writers.Packed | None:
        if (
            weight.shape[0] % 8
            or weight.shape[1] % 16
            or module.endswith(("mlp.gate", "feed_forward.gate", "router", "per_layer"))
        ):
            return None
        packed.append(module)
        stored: writers.Packed | None = pack(module, weight)
        return stored

    size = {"hidden_size": 96, "num_hidden_layers": 4}
    made = writers.write(folder, linear(fits), table, family=family, **size | config)
    assert any("proj" in name for name in packed)
    check_weights(*made)
    for backend in backends:
        check_answers(*made, backend=backend)


@pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, family, marks=() if (method, family) == ("fp8", "qwen3_5") else pytest.mark.slow)
        for method, family in TOGETHER
    ],
)
def test_answers_of_recurrent_layers(method: str, family: Family, tmp_path: Path) -> None:
    """The reference kernels see one family of each method: they multiply what the format has read, which is the same
    for all."""
    check_family(method, family, ("reference", "cpu") if family == "qwen3_5" else ("cpu",), tmp_path)


LATENT = [
    *(("awq", "glm4_moe_lite"), ("gptq", "deepseek_v3"), ("fp8", "deepseek_v2"), ("compressed-tensors", "youtu")),
    ("fp8", "glm4_moe_lite"),
]


@pytest.mark.parametrize(("method", "family"), [pytest.param(*pair, marks=pytest.mark.slow) for pair in LATENT])
def test_answers_of_latent_attention(method: str, family: Family, tmp_path: Path) -> None:
    """The projection that is multiplied head by head is dequantized."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    check_family(method, family, ("cpu",), tmp_path, **sizes)


VARIANTS = [
    *((method, "gemma4-dense") for method in METHODS),
    *(("awq", "gemma4-shared"), ("gptq", "gemma4-inputs"), ("fp8", "gemma4-k-is-v")),
]
"""A dense model of every format, and each of what others have besides once."""


COMPARED: set[tuple[str, str]] = {
    *LATENT,
    *DENSE.items(),
    *((method, "llama") for method in ("awq", "gptq", "compressed-tensors")),  # what is written unless a test asks
    ("fp8", "gemma3"),  # inside another model
    *((method, MIXTURE) for method in MIXTURES),
    *TOGETHER,
    *((method, str(MODELS[case]["family"])) for method, case in VARIANTS),
}
"""Methods and families of which answers are compared with those of ``transformers``."""


@pytest.mark.parametrize(("method", "case"), [VARIANTS[0], *slowly(*VARIANTS[1:])])
def test_answers_of_gemma_4(method: str, case: str, tmp_path: Path) -> None:
    wide = {"hidden_size_per_layer_input": 16} if case in ("gemma4-shared", "gemma4-inputs") else {}
    check_family(method, **MODELS[case] | wide, backends=("cpu",), folder=tmp_path)
