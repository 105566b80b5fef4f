"""What names the bits of K and V: the same at every start, and another for whatever changes a bit."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import CPU, KERNELS

import infer_demo
from infer.assemble import identity as module
from infer.assemble.assembly import Assembly
from infer.assemble.identity import content, identity, rope_kinds
from infer.contracts.model import ModelContext
from infer.plugins.discovery import Plugins
from infer.settings import load_settings

DEMO = Path(infer_demo.__file__).parent / "checkpoint"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.discover()


@pytest.fixture
def named(plugins: Plugins) -> Callable[..., dict[str, str]]:
    def name(
        path: Path = DEMO, max_seq_len: int = 64, dtype: torch.dtype = torch.float32, **sections: Any
    ) -> dict[str, str]:
        model = {"path": str(path), **sections.pop("model", {})}
        settings = load_settings(plugins, env={}, overrides={"model": model, **sections}, read_file=False).settings
        assembly = Assembly(settings, plugins)
        chosen = [assembly.chosen(point) for point in ("model", "weights", "kernels")]
        return dict(identity(settings, assembly.checkpoint, ModelContext(KERNELS, dtype, CPU, max_seq_len), chosen))

    return name


def test_nothing_that_differs_from_start_to_start_is_in_it(
    named: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    shutil.copytree(DEMO, tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "model.safetensors", (1, 1))
    here = named()
    assert here == named(
        tmp_path / "elsewhere",
        128,
        engine={"max_batch_size": 3, "max_waiting_requests": 5, "prefill_chunk_size": 32},
        kernels={"threads": 1},
        server={"port": 1234, "served_model_name": "mine"},
        cache={"paged": {"num_blocks": 99, "disk": str(tmp_path), "disk_gib": 3}},
    )
    assert all(isinstance(value, str) for value in here.values())


def test_whatever_changes_a_bit_is_in_it(
    named: Callable[..., dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    here = named()
    seen = [
        named(model={"quantization": "int8"}),
        named(model={"quantization": "int4"}),
        named(model={"quantization": "int8", "activations": "plain"}),
        named(model={"quantization": "int8", "plain_layers": ["*.0.*"]}),
        named(model={"load_format": "dummy"}),
        named(dtype=torch.bfloat16),
    ]
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    assert config.read_text() != text
    seen.append(named(tmp_path / "other"))
    config.write_text(text)
    weights = tmp_path / "other" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    seen.append(named(tmp_path / "other"))
    monkeypatch.setattr(module, "version", lambda name: "9.9")
    seen.append(named())
    every = [here, *seen]
    assert len({repr(sorted(each.items())) for each in every}) == len(every)


def test_the_variant_of_kernels_counts_and_not_why_it_runs(plugins: Plugins) -> None:
    settings = load_settings(plugins, env={}, overrides={"model": {"path": str(DEMO)}}, read_file=False).settings
    assembly = Assembly(settings, plugins)
    offer = assembly.chosen("kernels")

    def of(about: str) -> str:
        registration: Any = offer.registration
        given = replace(offer, registration=replace(registration, about=about))
        return identity(settings, assembly.checkpoint, ModelContext(KERNELS, torch.float32, CPU, 64), [given])[
            "kernels"
        ]

    assert of("level avx2, the best there is") == of("level avx2: the processor lacks more")
    assert of("level avx2, the best there is") != of("level amx, the best there is")


def test_a_length_counts_only_where_the_rotation_depends_on_it(
    named: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "max_seq_len" not in named()
    monkeypatch.setattr(module, "rope_kinds", lambda config: {"longrope"})
    assert named(max_seq_len=64) != named(max_seq_len=65)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"rope_theta": 1e4, "type": "text"}, set()),
        ({"rope_scaling": {"type": "yarn"}}, {"yarn"}),
        ({"rope_scaling": None}, set()),
        ({"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}, {"dynamic"}),
        (
            {"rope_parameters": {"full": {"rope_type": "longrope"}, "sliding": {"rope_type": "default"}}},
            {"longrope", "default"},
        ),
        ({"layers": [{"rope": {"rope_type": "su"}}]}, {"su"}),
    ],
)
def test_kinds_of_rope_are_found_wherever_they_are(config: Any, kinds: set[str]) -> None:
    assert rope_kinds(config) == kinds


def test_every_byte_of_every_file_of_weights_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    draw = random.Random(0)
    for name, size in (("a.safetensors", 250), ("b.safetensors", 100), ("README.md", 50)):
        (tmp_path / name).write_bytes(draw.randbytes(size))
    found = {content(tmp_path)}
    for name, at in (("a.safetensors", 0), ("a.safetensors", 120), ("a.safetensors", 249), ("b.safetensors", 99)):
        data = bytearray((tmp_path / name).read_bytes())
        data[at] ^= 1
        (tmp_path / name).write_bytes(data)
        found.add(content(tmp_path))
    assert len(found) == 5
    (tmp_path / "README.md").write_bytes(b"")
    assert content(tmp_path) in found
    assert content(tmp_path / "a.safetensors") not in found
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").rename(tmp_path / f"{name}.weights")
    before = content(tmp_path)
    (tmp_path / "README.md").write_bytes(b"x")
    assert content(tmp_path) != before, "of a folder without safetensors, all files count"
