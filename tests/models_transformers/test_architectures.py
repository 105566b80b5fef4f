"""Architectures that only transformers knows, on infer's cache and kernels, against transformers itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models_transformers.checkpoints import VOCAB, config, family_of, write
from torch import Tensor

from infer.checkpoint import Checkpoint
from infer.checkpoint.folder import Folder
from infer.contracts.model import ModelContext
from infer.contracts.sections import ModelSettings, Settings
from infer.errors import CheckpointError
from infer.plugins.discovery import Plugins
from infer_kernels_cpu.provider import CpuKernels
from infer_models_transformers import exact
from infer_models_transformers.attention import FAR, window_of
from infer_models_transformers.model import TransformersModel
from infer_models_transformers.preparing import plain
from infer_testing import check_model
from infer_testing.models import Models, Stage

ROOT = Path(__file__).parents[2]
KERNELS = CpuKernels()
SLOW = pytest.mark.slow
PROMPT, NEW = 40, 12
FAST = ("GPT2LMHeadModel", "DeepseekV3ForCausalLM")
RUN = (
    *("GPTNeoXForCausalLM", "Cohere2ForCausalLM"),
    *("StableLmForCausalLM", "FalconForCausalLM", "Starcoder2ForCausalLM", "CohereForCausalLM", "OlmoForCausalLM"),
    *("Olmo3ForCausalLM", "PhiForCausalLM", "NemotronForCausalLM", "GlmForCausalLM", "GPTBigCodeForCausalLM"),
    *("GPTJForCausalLM", "CodeGenForCausalLM", "GPTNeoForCausalLM", "OPTForCausalLM", "PersimmonForCausalLM"),
    *("HeliumForCausalLM", "ArceeForCausalLM", "Ernie4_5ForCausalLM", "HunYuanDenseV1ForCausalLM"),
    *("ApertusForCausalLM", "GemmaForCausalLM", "VaultGemmaForCausalLM", "CwmForCausalLM", "NanoChatForCausalLM"),
    *("BitNetForCausalLM", "BioGptForCausalLM", "Jais2ForCausalLM", "HyperCLOVAXForCausalLM"),
    *("Ministral3ForCausalLM", "MiniCPM3ForCausalLM", "GraniteMoeSharedForCausalLM", "DeepseekV2ForCausalLM"),
    "Glm4MoeLiteForCausalLM",
    *("PhimoeForCausalLM", "Ernie4_5_MoeForCausalLM", "HunYuanMoEV1ForCausalLM", "FlexOlmoForCausalLM"),
)
REFUSED = {
    "MambaForCausalLM": "keeps a state besides K and V",
    "BambaForCausalLM": "keeps a state besides K and V",
    "RecurrentGemmaForCausalLM": "keeps a state besides K and V",
    "Lfm2ForCausalLM": "has layers of type 'conv'",
    "BloomForCausalLM": "does not go through transformers' attention interface",
    "MptForCausalLM": "does not go through transformers' attention interface",
    "XGLMForCausalLM": "does not go through transformers' attention interface",
    "DogeForCausalLM": "changes its mask",
    "DiffLlamaForCausalLM": "is computed twice in a pass by one module",
    "JetMoeForCausalLM": "lets values of tensors decide",
    "BartForCausalLM": "has an encoder",
    "RobertaForCausalLM": "counts positions from its padding token",
}


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in RUN)])
@torch.inference_mode()
def test_greedy_tokens_and_exactness(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name)
    models = Models.of(folder, family_of(name), kernels=KERNELS)
    assert models.offer.name == "transformers"
    model = models.model(torch.float32)
    prompt = torch.randint(2, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.eval().generate(torch.tensor([prompt]), **given)[0].tolist()
    assert len(set(expected[PROMPT:])) > 2, "a constant answer shows little"
    stage, text = Stage(models, torch.float32, 1), list(prompt)
    hidden = stage.run([(0, text, 0, PROMPT)])
    while len(text) < len(expected):
        text.append(int(model.logits(hidden[-1:]).argmax()))
        hidden = stage.run([(0, text, len(text) - 1, 1)])
    assert text == expected
    checks = ["transformers", "shapes", "chunks", "company", "recorded"]
    check_model(folder, family=family_of(name), kernels=KERNELS, only=checks)


def test_the_readme_names_what_runs_and_what_is_refused() -> None:
    text = (ROOT / "plugins/models_transformers/README.md").read_text()
    runs, refused = text.split("| refused |")
    assert {*re.findall(r"\w+(?:ForCausalLM|LMHeadModel)", runs)} == {*FAST, *RUN}
    assert {*re.findall(r"\w+ForCausalLM", refused)} == {*REFUSED}


def made(name: str, dtype: Any = torch.float32, **more: Any) -> TransformersModel:
    return TransformersModel(config(name, **more), context(dtype))


def context(dtype: torch.dtype = torch.float32) -> ModelContext:
    return ModelContext(KERNELS, dtype, torch.device("cpu"), 64)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_before_weights_are_read(name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        made(name)
    text = str(error.value)
    assert REFUSED[name] in text
    assert f"config.json names {name}" in text
    assert text.count("\n") == 0
    assert len(text) < 300
    assert text.endswith(f"(transformers {transformers.__version__}).")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "names no architecture"),
        ({"architectures": ["NoSuchForCausalLM"]}, "nor does transformers"),
        (
            {"architectures": ["NoSuchForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.NoSuch"}},
            r"the code that the checkpoint brings \(auto_map\) is never run",
        ),
        ({"architectures": ["BertModel"]}, "not as a decoder-only language model"),
        ({"architectures": ["A" * 10_000] * 1000}, r"^.{1,500}$"),
    ],
)
def test_architectures_that_transformers_cannot_help_with(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        TransformersModel(fields, context())


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('this must not run')")
    fields = config("GPTNeoXForCausalLM") | {
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        "_name_or_path": str(tmp_path),
    }
    assert TransformersModel(fields, context()).vocab_size == VOCAB


def test_no_part_of_a_config_names_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks"))
    part = {"model_type": "trocr", "name_or_path": str(tmp_path), "auto_map": {"AutoModel": "own.Model"}}
    fields = {"architectures": ["FuyuForCausalLM"], "num_hidden_layers": 2, "text_config": part}
    with pytest.raises(CheckpointError, match="may name any other architecture"):
        TransformersModel(fields, context())
    assert plain(fields)["text_config"] == {"model_type": "trocr", "name_or_path": str(tmp_path)}


@pytest.mark.parametrize("fields", [["num_experts", "num_local_experts"], ["num_hidden_layers"]])
def test_what_takes_memory_before_weights_is_bounded(fields: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"it has 100000 (experts|layers), and infer runs"):
        made("FlexOlmoForCausalLM", **dict.fromkeys(fields, 100_000))


def test_masks_in_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    tensors = load_file(write(tmp_path, "GPT2LMHeadModel") / "model.safetensors")
    masks = {f"h.0.attn.{own}": torch.ones(1, 1, 4, 4) for own in ("bias", "masked_bias")}
    found = []
    for extra in ({}, masks):
        model = made("GPT2LMHeadModel")
        model.load(model.unstack((name.removeprefix("transformer."), x) for name, x in (tensors | extra).items()))
        found.append(logits(model))
    assert torch.equal(*found)
    with pytest.raises(CheckpointError, match="which this model does not have"):
        made("GPT2LMHeadModel").load((tensors | {"h.0.attn.other": torch.ones(4)}).items())


def test_a_family_of_infers_own_comes_first() -> None:
    plugins = Plugins.discover()
    for name, family in (("Qwen3ForCausalLM", "qwen3"), ("GPTNeoXForCausalLM", "transformers")):
        assert plugins.choose("model", Settings(), [name]).name == family
    asked = Settings(model=ModelSettings(family="transformers"))
    assert plugins.choose("model", asked, ["Qwen3ForCausalLM"]).name == "transformers"


@pytest.mark.parametrize(
    ("mix", "stage"),
    [
        pytest.param(lambda x: x + x.mean(1, keepdim=True), "calls mean", id="an operation over tokens"),
        pytest.param(lambda x: x + x @ x.mT @ x, "calls bmm", id="a product of activations"),
        pytest.param(lambda x: x + x.flip(1), "other bits", id="what is exact, but of other rows"),
        pytest.param(lambda x: x * x.shape[1], "other bits", id="the number of rows"),
    ],
)
def test_modules_that_mix_tokens_are_refused(mix: Any, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP
    theirs = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: mix(theirs(self, x)))
    with pytest.raises(CheckpointError, match=stage):
        loaded(made("GPTNeoXForCausalLM"))


def loaded(model: TransformersModel) -> TransformersModel:
    generator = torch.Generator().manual_seed(0)
    model.load((name, torch.randn(shape, generator=generator) * 0.1) for name, shape in model.expected().items())
    return model


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param("GemmaForCausalLM", "lm_head", id="a scaled embedding"),
        pytest.param("BioGptForCausalLM", "output_projection", id="a scaled embedding of another kind", marks=SLOW),
        pytest.param("MiniCPM3ForCausalLM", "lm_head", marks=SLOW),
        pytest.param("VaultGemmaForCausalLM", "lm_head", marks=SLOW),
        pytest.param("PhiForCausalLM", "lm_head", id="a bias of the head"),
    ],
)
def test_a_tied_head_and_the_embedding_share_one_weight(name: str, head: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name, tie_word_embeddings=True, scale_embedding=True)
    assert f"{head}.weight" not in load_file(folder / "model.safetensors")
    check_model(folder, kernels=KERNELS, only=["transformers", "loading", "chunks"])


def test_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    """As in GPT-2's own checkpoint."""
    tensors = load_file(write(tmp_path, "GPT2LMHeadModel") / "model.safetensors")
    found = []
    for prefix in ("", "transformer."):
        model = made("GPT2LMHeadModel")
        model.load(model.unstack((name.removeprefix(prefix), x) for name, x in tensors.items()))
        found.append(logits(model))
    assert torch.equal(*found)


def test_no_more_positions_than_the_model_has(tmp_path: Path) -> None:
    fields = config("GPT2LMHeadModel")
    assert "max_position_embeddings" not in fields
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert Checkpoint(Folder(tmp_path)).max_positions == fields["n_positions"] == 256
    with pytest.raises(CheckpointError, match=r"made for 40 positions, but 64 are to be served"):
        made("GPT2LMHeadModel", max_position_embeddings=40)


@torch.inference_mode()
def logits(model: TransformersModel) -> Tensor:
    from infer.cache import KVStorage
    from infer.contracts.cache import CacheContext
    from infer.contracts.model import Pass

    storage = KVStorage(CacheContext(model.attention, 1, 64, torch.float32, torch.device("cpu"), KERNELS), 4, 16)
    view = storage.view(torch.arange(4, dtype=torch.int32).numpy()[None], [0], [20])
    return model.logits(model.forward(Pass(torch.arange(20), torch.arange(20), view)))


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "softplus"])
def test_stand_ins_compute_each_value_by_itself(name: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 8
    for dtype in (torch.float32, torch.bfloat16):
        stand_in, given = getattr(exact, name), x.to(dtype)
        whole = stand_in(given)
        for size in (1, 7, 33):
            assert torch.equal(torch.cat([stand_in(part) for part in torch.split(given, size)]), whole)
        theirs = getattr(torch.nn.functional, name)(given.double())
        assert torch.allclose(whole.double(), theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("seen", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), "has a mask"),
        (lambda b, h, q, k: k >= 0, "has a mask"),
        (lambda b, h, q, k: (k <= q) | (k < 4), "has a mask"),
        (lambda b, h, q, k: torch.zeros(6)[k] > 0, "has a mask"),
    ],
)
def test_windows_are_read_from_masks(seen: Any, window: int | str | None) -> None:
    found = window_of(seen)
    assert str(found).startswith(str(window))


@pytest.mark.parametrize(("window", "found"), [(None, None), (FAR - 1, FAR - 1), (FAR, FAR), (FAR + 9, None)])
def test_windows_reach_as_far_as_sequences(window: int | None, found: int | None) -> None:
    """One that no sequence outgrows is none."""
    fields = config("Starcoder2ForCausalLM", sliding_window=window, max_position_embeddings=1 << 20)
    model = TransformersModel(fields, replace(context(), max_seq_len=FAR + 9))
    assert {spec.window for spec in model.attention} == {found}


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="its attention has a sliding window of 0 positions"):
        made("Starcoder2ForCausalLM", sliding_window=0)
