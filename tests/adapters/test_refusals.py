"""What is refused, and in which words."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.checkpoints import write_adapter
from tests.models.checkpoints import write_checkpoint

from infer import LLM
from infer.errors import CheckpointError, SettingsError
from infer_formats.peft import CONFIG, PICKLE, WEIGHTS, PeftAdapter

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "base", "qwen3")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    write_adapter(base, tmp_path / "one")
    return tmp_path / "one"


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        edit(held)
        save_file(held, folder / WEIGHTS)

    return change


def renamed(old: str, new: str) -> Change:
    return tensors(lambda held: held.update({n.replace(old, new): held.pop(n) for n in [*held] if old in n}))


def as_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / PICKLE).write_bytes(pickle.dumps({}))


def damaged(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
READ: dict[str, tuple[Change, str]] = {
    "DoRA": (config(use_dora=True), "use_dora asks for DoRA, which scales the base's weights, which infer does not"),
    "aLoRA": (config(alora_invocation_tokens=[5]), "alora_invocation_tokens asks for an activated LoRA"),
    "modules": (config(modules_to_save=["lm_head"]), "modules_to_save asks for whole modules"),
    "biases": (config(bias="lora_only"), "bias is 'lora_only'; infer computes adapters without biases"),
    "kind": (config(peft_type="IA3"), "peft_type is 'IA3'; infer applies LoRA's adapters only."),
    "start": (config(init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes the base's weights"),
    "unknown": (config(use_nora=True), "infer does not know the field use_nora = True."),
    "rank": (config(r=8), r"factors of \[4, 72\] and \[48, 4\], but adapter_config.json says that their rank is 8."),
    "no rank": (config(r="4"), "r is '4', not a whole number above 0."),
    "alpha": (config(lora_alpha=float("inf")), "lora_alpha is inf, not a number from 0 on."),
    "pattern": (config(rank_pattern={"(": 3}), r"rank_pattern has the pattern '\(': "),
    "targets": (config(target_modules=["q_proj"]), "factors, but target_modules in adapter_config.json leaves that"),
    "no targets": (config(target_modules=None), "target_modules is None, neither a list of names nor a pattern."),
    "pickle": (as_pickle, "adapter_model.bin is a pickle, which may run any code while it is read; save"),
    "damage": (damaged, "adapter_model.safetensors is damaged: "),
    "no file": (lambda folder: (folder / WEIGHTS).unlink(), "one has no adapter_model.safetensors."),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json, which PEFT's adapters have."),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json is no JSON: "),
    "no object": (lambda folder: (folder / CONFIG).write_text("[]"), "is no JSON object."),
    "embedding": (renamed(f"{Q0}.lora_A.weight", f"{Q0}.lora_embedding_A"), "adapters of embeddings are not computed"),
    "magnitude": (
        tensors(lambda held: held.update({f"{Q0}.lora_magnitude_vector": torch.ones(4)})),
        "lora_magnitude_vector'; DoRA is not computed here.",
    ),
    "bias tensor": (
        tensors(lambda held: held.update({f"{Q0}.lora_B.bias": torch.ones(4)})),
        "biases beside factors are not computed here.",
    ),
    "whole": (
        tensors(lambda held: held.update({"base_model.model.lm_head.weight": torch.ones(4)})),
        "holds 'base_model.model.lm_head.weight'; adapters that have anything but lora_A.weight and lora_B.weight",
    ),
    "half": (tensors(lambda held: held.pop(f"{Q0}.lora_B.weight")), "'model.layers.0.self_attn.q_proj' no lora_B."),
    "integers": (
        tensors(lambda held: held.update({n: x.int() for n, x in held.items()})),
        "factors that are no matrices of float32, float16 or bfloat16.",
    ),
}
ALL = {"target_modules": "all-linear"}


@pytest.mark.parametrize("name", READ)
def test_readers_sentences(name: str, folder: Path) -> None:
    change, said = READ[name]
    change(folder)
    with pytest.raises(CheckpointError, match=said):
        PeftAdapter(folder).changes()


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def moved(to: str) -> Change:
    return both(config(**ALL), renamed("model.layers.0.self_attn.q_proj", to))


FITTED: dict[str, tuple[Change, str]] = {
    "layer": (moved("model.layers.9.self_attn.q_proj"), "'model.layers.9.self_attn.q_proj', which this model does not"),
    "shape": (
        tensors(lambda held: held.update({f"{Q0}.lora_B.weight": torch.ones(32, 4)})),
        r"q_proj' has shape \[32, 48\], but this model's layer has \[64, 48\]: it was made for another base.",
    ),
    "draft head": (
        moved("mtp.layers.0.self_attn.q_proj"),
        "'mtp.layers.0.self_attn.q_proj', a layer of the draft head",
    ),
    "head": (moved("lm_head"), "'lm_head', but the output head cannot be changed by adapters here"),
    "embedding": (moved("model.embed_tokens"), "but the embedding cannot be changed by adapters here"),
    "latents": (moved("model.layers.0.self_attn.kv_b_proj"), "but the projection that makes K and V of latent vectors"),
    "experts": (moved("model.layers.0.mlp.experts.3.up_proj"), "but experts of a mixture cannot be changed"),
    "infinite": (
        tensors(lambda held: held[f"{Q0}.lora_A.weight"].fill_(torch.inf)),
        "'model.layers.0.self_attn.q_proj' holds values that are not finite.",
    ),
    "nothing": (tensors(lambda held: held.clear()), "one changes nothing."),
}


@pytest.mark.parametrize("name", FITTED)
def test_models_sentences(name: str, base: Path, folder: Path) -> None:
    change, said = FITTED[name]
    change(folder)
    with pytest.raises(SettingsError, match=f"^adapters.load has 'one=.*{said}"):
        LLM(str(base), adapters={"load": [f"one={folder}"]})


def test_settings(base: Path, folder: Path, tmp_path: Path) -> None:
    def refused(said: str, /, path: Path = base, family: str = "auto", **adapters: Any) -> None:
        with pytest.raises(SettingsError, match=said):
            LLM(str(path), model={"family": family}, adapters=adapters)

    refused("adapters.load.*'one' is not NAME=PATH", load=["one"])
    refused("adapters.load names 2 adapters, more than adapters.max_loaded = 1", load=["a=x", "b=y"], max_loaded=1)
    refused("There is no adapter at nowhere", load=["one=nowhere"])
    refused("has rank 4, but adapters.max_rank is 3; raise it.", load=[f"one={folder}"], max_rank=3)
    refused("'one' is the name of two adapters; choose another", load=[f"one={folder}", f"one={folder}"])
    refused("is the name of the model itself", load=[f"{base}={folder}"])
    refused("TransformersModel applies no adapters; leave out", family="transformers", load=[f"one={folder}"])
    (tmp_path / "one.bin").write_bytes(b"")
    refused("leads to .bin, which no installed plugin reads", load=[f"one={tmp_path / 'one.bin'}"])
