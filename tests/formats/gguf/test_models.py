"""Models read from GGUF files are those of the hub's files: bit for bit where nothing is quantized, and otherwise those
of the dequantized weights in ``transformers``."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from tests.examples import slowly
from tests.formats.gguf.files import gemma_pattern, quantized, write_gguf
from tests.formats.gguf.test_blocks import NUMBERS, random_blocks
from tests.formats.gguf.test_header import edited
from tests.models.checkpoints import HEADS, ROPES, Family, Rope, write_checkpoint
from tests.models.test_against_transformers import CASES as MODELS
from tests.models.test_against_transformers import NEW, PROMPT, TOLERANCE, Driver, expected_logits, prompt
from torch import Tensor

from infer import LLM, SamplingParams
from infer.errors import CheckpointError
from infer.weight import GroupedWeight
from infer_formats.gguf import GGUF, GGUFFormat
from infer_formats.gguf.header import TYPES
from infer_formats.gguf.metadata import Metadata
from infer_formats.gguf.names import DeltaHeads
from infer_formats.gguf.rope import ministral

GEMMA: dict[str, Any] = {"family": "gemma3", "query_pre_attn_scalar": 16, "window": 9}
GEMMA |= {"layer_types": gemma_pattern(6), "num_hidden_layers": 6}
YARN: dict[str, Any] = {**ROPES["yarn"], "mscale": 0.707, "mscale_all_dim": 0.707}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tied": False, "head_dim": 20},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-llama3-rope": {"family": "llama", "rope": "llama3"},
    "llama-linear-rope": {"family": "llama", "rope": "linear"},
    "llama-yarn-rope": {"family": "llama", "rope": "yarn"},
    "mistral": {"family": "mistral", "window": 9, "rms_norm_eps": 0.1},
    "ministral3": {"family": "ministral3", "tied": False},
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen2-yarn-rope": {"family": "qwen2", "rope": "yarn"},
    "qwen3": {"family": "qwen3", "kv_heads": 1},
    "gemma3": GEMMA | {"final_logit_softcapping": 3.0},
    "gemma3-pattern": GEMMA | {"layer_types": ["sliding_attention", "full_attention"] * 3, "tied": False},
    "gemma3-linear-rope": GEMMA | {"rope": "linear"},
    "gemma4-shared": MODELS["gemma4-shared"],
    "gemma4-k-is-v": MODELS["gemma4-k-is-v"],
    "gemma4-inputs": MODELS["gemma4-inputs"] | {"tied": True},
    "gemma4-experts": MODELS["gemma4-experts"],
    "phi3": {"family": "phi3", "tied": False, "window": 40, "partial_rotary_factor": 0.5},
    "phi3-longrope": {
        "family": "phi3",
        "num_attention_heads": 3,
        "kv_heads": 1,
        "rope": "longrope",
        "partial_rotary_factor": 0.75,
    },
    "olmo2": {"family": "olmo2", "rms_norm_eps": 0.01, "tied": False},
    "olmo3": {"family": "olmo3", "rms_norm_eps": 0.01, "tied": False},
    "olmo3-plain": {"family": "olmo3", "rope_parameters": None, "tied": False},
    "gemma2": {"family": "gemma2", "query_pre_attn_scalar": 16, "window": 9},
    "granite": {
        "family": "granite",
        "residual_multiplier": 1.5,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 0.5,
    },
    "granite-biases": {"family": "granite", "attention_bias": True, "mlp_bias": True, "tied": False},
    "smollm3": {"family": "smollm3"},
    "qwen3_moe": {"family": "qwen3_moe", "norm_topk_prob": True, "tied": False},
    "mixtral": {"family": "mixtral"},
    "olmoe": {"family": "olmoe"},
    "granite_moe": {"family": "granite_moe"},
    "gpt_oss": {"family": "gpt_oss", "window": 9},
    "lfm2": {"family": "lfm2"},
    "lfm2_moe": {"family": "lfm2_moe", "routed_scaling_factor": 1.0},
    "granite_hybrid": {"family": "granite_hybrid", "tied": False, "mamba_conv_bias": False},
    "granite_hybrid-dense": {
        "family": "granite_hybrid",
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
    },
    "granite_hybrid-attention": {
        "family": "granite_hybrid",
        "num_local_experts": 0,
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
        "intermediate_size": 40,
    },
    "qwen3_5": {"family": "qwen3_5", "tied": False},
    "qwen3_5-alike": {"family": "qwen3_5", "linear_num_value_heads": 2},
    "qwen3_5_moe": {"family": "qwen3_5_moe"},
    "qwen3_next": {"family": "qwen3_next", "seed": 1},
    "nemotron_h": {"family": "nemotron_h"},
    "nemotron_h-experts": MODELS["nemotron_h-experts"],
    "nemotron_h-latent": MODELS["nemotron_h-latent"] | {"mlp_bias": False},
    "falcon_h1": {"family": "falcon_h1", "tied": False},
    "falcon_h1-norm": {
        "family": "falcon_h1",
        "tied": False,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": True,
        "ssm_out_multiplier": 1.0,
    },
    "deepseek_v2": {"family": "deepseek_v2", "tied": False},
    "deepseek_v2-lite": {
        "family": "deepseek_v2",
        "q_lora_rank": None,
        "rope_parameters": YARN,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {"family": "deepseek_v3", "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3-yarn": {"family": "deepseek_v3", "rope_parameters": YARN, "norm_topk_prob": False},
    "glm4_moe_lite": {"family": "glm4_moe_lite", "tied": False, "mlp_layer_types": None},
    "youtu": {"family": "youtu"},
    "youtu-yarn": {"family": "youtu", "rope": "yarn", "q_lora_rank": None, "tied": False},
    "kimi_linear": {"family": "kimi_linear", "linear_num_heads": HEADS, "tied": False},
}
DELTA = ("qwen3_5", "qwen3_next")
MAMBA = ("granite_hybrid", "nemotron_h", "falcon_h1")
ROUNDED = {
    "llama-llama3-rope",
    "granite-biases",
    *(name for name in CASES if name.startswith((*MAMBA, *DELTA, "kimi_linear"))),
}
"""Where the file holds factors rounded to fp32, or rates of decays, not what they were computed from."""


def against_transformers(file: Path, folder: Path) -> set[int]:
    """Logits, and greedy tokens, of a file and of a folder as transformers computes it. Returns the tokens."""
    driver = Driver(file, torch.float32)
    before = driver.prefill(prompt(), [PROMPT])
    tokens, after = driver.greedy(before[-1], NEW)
    expected = expected_logits(folder, prompt() + tokens)
    assert (torch.cat((before, after)) - expected).abs().max() < TOLERANCE
    assert expected[PROMPT - 1 : -1].argmax(-1).tolist() == tokens
    return set(tokens)


@pytest.mark.parametrize(
    ("case", "type"),
    [
        *(pytest.param(case, "F32", marks=pytest.mark.slow if "-" in case else ()) for case in CASES),
        *slowly(*((case, ("F16", "BF16")[i % 2]) for i, case in enumerate(CASES))),  # of either half the families
    ],
)
def test_plain_weights_are_those_of_the_folder(case: str, type: str, tmp_path: Path) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
    folder = write_checkpoint(tmp_path / "hub", dtype=dtype, **CASES[case])
    file = tmp_path / "model.gguf"
    write_gguf(folder, file, type)
    logits = [Driver(path, torch.float32).prefill(prompt(), [PROMPT]) for path in (folder, file)]
    if case.startswith("falcon_h1") and type != "F32":  # factors are rounded with the weights
        assert (logits[0] - logits[1]).square().mean().sqrt() < 0.05
    elif case in ROUNDED:
        assert (logits[0] - logits[1]).abs().max() < TOLERANCE
    else:
        assert torch.equal(*logits)
    if type == "F32":
        assert len(against_transformers(file, folder)) > 3, "a constant answer shows little"


@pytest.mark.parametrize("rope", ["default", "linear"])
def test_a_ministral_whose_queries_do_not_grow_is_a_mistral(rope: Rope, tmp_path: Path) -> None:
    """As newer files of Mistral Small 3 are."""
    folder = write_checkpoint(tmp_path / "hub", "mistral", rope=rope)
    expected = Driver(folder, torch.float32).prefill(prompt(), [PROMPT])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Ministral3ForCausalLM"]}))
    write_gguf(folder, tmp_path / "model.gguf")
    assert torch.equal(Driver(tmp_path / "model.gguf", torch.float32).prefill(prompt(), [PROMPT]), expected)


def test_magnitudes_of_a_ministral_are_multiplied() -> None:
    meta = Metadata(Path("model.gguf"), {"mistral3.rope.scaling.yarn_log_multiplier": 0.7})
    whole = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5 * (1 + 0.1 * math.log(8))}
    made = ministral(meta, "mistral3", whole)["rope_scaling"]
    assert made["attention_factor"] == pytest.approx(1.5 * (1 + 0.1 * math.log(8)) / (1 + 0.07 * math.log(8)))
    assert made["llama_4_scaling_beta"] == 0


def test_windows_of_olmo_3_may_be_a_period(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = write_checkpoint(tmp_path / "hub", "olmo3", layer_types=kinds, window=9, tied=False)
    expected = Driver(folder, torch.float32).prefill(prompt(), [PROMPT])
    for period in (2, 4):
        write_gguf(folder, tmp_path / "model.gguf", edit=edited("olmo2.attention.sliding_window_pattern", period))
        found = Driver(tmp_path / "model.gguf", torch.float32).prefill(prompt(), [PROMPT])
        assert torch.equal(found, expected) == (period == 2)


@pytest.mark.parametrize("case", ["qwen3_moe", *slowly("gpt_oss", "granite_moe", "lfm2_moe")])
def test_gates_and_ups_of_experts_may_be_one_tensor(case: str, tmp_path: Path) -> None:
    folder, files = write_checkpoint(tmp_path / "hub", **CASES[case]), [tmp_path / "apart.gguf", tmp_path / "one.gguf"]
    for fused, file in enumerate(files):
        write_gguf(folder, file, fused=bool(fused))
    apart, one = (set(GGUF(file).tensors().names()) for file in files)
    assert {re.sub(r"blk\.\d+\.", "", name) for name in one - apart} >= {"ffn_gate_up_exps.weight"}
    logits = [Driver(file, torch.float32).prefill(prompt(), [PROMPT]) for file in files]
    assert torch.equal(*logits)


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["deepseek_v3", *slowly("deepseek_v2", "youtu")])
def test_keys_and_values_of_latents_may_be_one_tensor(family: Family, type: str, tmp_path: Path) -> None:
    """As they are in files that older converters wrote."""
    fields = WIDE | WIDE_LATENT if type == "Q8_0" else {}
    folder, file = write_checkpoint(tmp_path / "hub", family, **fields), tmp_path / "model.gguf"
    held = write_gguf(folder, file, type, whole=True)
    assert {"blk.0.attn_kv_b.weight"} == {
        name for name in GGUF(file).tensors().names() if re.match(r"blk.0.*v_b", name)
    }
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    logits = [Driver(path, torch.float32).prefill(prompt(), [PROMPT]) for path in (folder, file)]
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE


@pytest.mark.slow
def test_latents_without_values(tmp_path: Path) -> None:
    """A tensor that is put together has its shape on the meta device, too, without torch's compiler."""
    folder, file = write_checkpoint(tmp_path / "hub", "deepseek_v3", **WIDE | WIDE_LATENT), tmp_path / "model.gguf"
    write_gguf(folder, file, "Q8_0")
    script = f"""
import sys
from pathlib import Path
from infer.checkpoint.tensors import Outlines
from infer_formats.gguf import GGUF, GGUFFormat

container = GGUF(Path({str(file)!r}))
outlines = Outlines(container.tensors())
weight = GGUFFormat(container.config(), outlines).weight("model.layers.0.self_attn.kv_b_proj.weight")
assert (weight.shape, weight.device.type) == ((4 * 64, 32), "meta")
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_groups_of_experts_are_served_by_transformers(tmp_path: Path) -> None:
    """The family of infer's own knows none, and says so."""
    folder, file = write_checkpoint(tmp_path / "hub", "deepseek_v3", n_group=2, topk_group=1), tmp_path / "model.gguf"
    write_gguf(folder, file)
    said = r'n_group: this family has no groups of experts; set model\.family = "transformers" \(it is 2\)'
    with pytest.raises(CheckpointError, match=said):
        Driver(file, torch.float32)
    found = []
    for path in (folder, file):
        with LLM(str(path), model={"family": "transformers"}, kernels={"backend": "reference"}) as llm:
            found.append(llm.generate([prompt()], SamplingParams(temperature=0, max_tokens=8))[0].token_ids)
    assert found[0] == found[1]
    assert len(set(found[0])) > 3, "a constant answer shows little"


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
WIDE_GEMMA4: dict[str, Any] = {"window": 9, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 64}
WIDE_GEMMA4 |= {"global_head_dim": 128, "kv_heads": 1, "hidden_size_per_layer_input": 256}
MIXED_GEMMA4: dict[str, Any] = WIDE_GEMMA4 | {"hidden_size_per_layer_input": 0, "moe_intermediate_size": 256}
MIXED_GEMMA4 |= {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "attention_k_eq_v": True}
WIDE_NEMOTRON = {"hybrid_override_pattern": "ME*", "moe_intermediate_size": 64, "mamba_head_dim": 16}
WIDE_NEMOTRON |= {"moe_shared_expert_intermediate_size": 96, "mamba_num_heads": 8, "tied": False}
WIDE_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
WIDE_LATENT |= {"tied": False, "moe_intermediate_size": 64}
QUANTIZED: dict[str, tuple[Family, dict[str, Any]]] = {
    **{type: ("llama", {"kv_heads": 2}) for type in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    "Q4_1": ("qwen3_moe", {"moe_intermediate_size": 64, "norm_topk_prob": True}),
    "Q5_1": ("lfm2", {"intermediate_size": 384, "layer_types": ["conv", "full_attention"]}),
    "Q5_0": ("qwen3_5", {"linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}),
    "Q4_K": ("llama", {"tied": False}),
    "Q5_K": ("qwen2", {}),
    "Q6_K": ("phi3", {"tied": False}),
    "IQ4_NL": ("olmo2", {}),
    "MXFP4": ("qwen3", {"head_dim": 64}),
    "F16 gemma4": ("gemma4", WIDE_GEMMA4),
    "Q8_0 gemma4": ("gemma4", WIDE_GEMMA4),
    "Q4_K gemma4": ("gemma4", WIDE_GEMMA4),
    "Q8_0 gemma4-experts": ("gemma4", MIXED_GEMMA4),
    "Q8_0 nemotron_h": ("nemotron_h", WIDE_NEMOTRON),
    "Q6_K gemma4-experts": ("gemma4", MIXED_GEMMA4),
    "Q8_0 deepseek_v2": ("deepseek_v2", WIDE_LATENT | {"q_lora_rank": None, "rope_parameters": YARN}),
    "Q5_1 deepseek_v3": ("deepseek_v3", WIDE_LATENT),
    "IQ4_NL glm4_moe_lite": ("glm4_moe_lite", WIDE_LATENT),
    "Q4_0 youtu": ("youtu", WIDE_LATENT),
}
"""By type, and what tells two cases of one type apart."""


BY_BLOCKS = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")


def random_type(values: Tensor, type: str) -> Any:
    """Blocks of random bits, whose values are about as large as those of the checkpoint. The package quantizes a few
    types only."""
    if type == "F32":
        return quantized(values, type)
    kind = TYPES[NUMBERS[type]]
    *rows, width = values.shape
    made = random_blocks(type, math.prod(rows), width // kind.values, 0.02 / kind.values)
    return made.reshape(*rows, -1)


def apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A stack of Gemma 4's experts as its parts; others as they are."""
    place, _, part = name.partition(".experts.")
    if part not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    for index, own in enumerate(tensor):
        for each, rows in zip(names, own.chunk(len(names)), strict=True):
            yield f"{place}.experts.{index}.{each}.weight", rows


@pytest.mark.parametrize("case", [*list(QUANTIZED)[::4], *slowly(*(case for i, case in enumerate(QUANTIZED) if i % 4))])
def test_quantized_weights_are_those_that_the_package_dequantizes(case: str, tmp_path: Path) -> None:
    type, (family, fields) = case.partition(" ")[0], QUANTIZED[case]
    folder = write_checkpoint(tmp_path / "hub", family, **WIDE | fields)
    file = tmp_path / "model.gguf"
    held = write_gguf(folder, file, type, quantize=random_type if type in BY_BLOCKS else quantized)
    if fields.get("tied", True):
        held.pop("lm_head.weight", None)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    container = GGUF(file)
    weights = GGUFFormat(container.config(), container.tensors())
    for name, tensor in (each for pair in held.items() for each in apart(*pair)):
        weight = weights.weight(name)
        split = name.endswith("kv_b_proj.weight")
        assert isinstance(weight, GroupedWeight) == (tensor.ndim == 2 and type != "F16" and not split)
        assert torch.equal(weight.dequantize() if isinstance(weight, GroupedWeight) else weight, tensor)
    logits = [Driver(path, torch.float32).prefill(prompt(), [PROMPT]) for path in (folder, file)]
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE
    against_transformers(file, folder)


@pytest.mark.parametrize(
    ("case", "arch"),
    [("qwen3_5", "qwen35"), ("deepseek_v3", "deepseek2"), *slowly(("nemotron_h-experts", "nemotron_h_moe"))],
)
def test_drafting_layers_are_left_out(case: str, arch: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "hub", **CASES[case])
    files = [tmp_path / "model.gguf", tmp_path / "drafts.gguf"]

    def edit(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        held = writer.kv_data[0]
        held.pop(f"{arch}.block_count")
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)
        for key, value in ((f"{arch}.attention.head_count_kv", 2), (f"{arch}.feed_forward_length", 24)):
            if isinstance(each := held[key].value, list):
                held[key].value = [*each, value]
        writer.add_tensor("blk.4.nextn.eh_proj.weight", torch.ones(48, 96).numpy())
        writer.add_tensor("blk.4.attn_q.weight", torch.ones(128, 48).numpy())
        if arch == "deepseek2":
            writer.add_tensor("blk.4.attn_k_b.weight", torch.ones(4, 20, 12).numpy())
        if "moe" in arch:
            writer.add_tensor("blk.4.ffn_up_exps.weight", torch.ones(6, 24, 48).numpy())

    write_gguf(folder, files[0])
    write_gguf(folder, files[1], edit=edit)
    logits = [Driver(file, torch.float32).prefill(prompt(), [PROMPT]) for file in files]
    assert torch.equal(*logits)


def test_value_heads_that_share_a_group_of_codes() -> None:
    """The columns of out_proj are in groups of 32, and each head has 16 of them."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (3, 96), dtype=torch.uint8, generator=generator)
    weight = GroupedWeight(codes, torch.rand(3, 3, generator=generator), 8)
    made = DeltaHeads(2, 6, 4, 16).grouped("blk.0.ssm_out.weight", weight)
    assert isinstance(made, Tensor)
    heads = weight.dequantize().view(3, 6, 16)[:, [0, 2, 4, 1, 3, 5]]
    assert torch.equal(made, heads.flatten(1))
