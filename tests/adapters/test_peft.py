"""Adapters against ``peft``, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.adapters.checkpoints import TARGETS, linear, reference, scored, write_adapter
from tests.examples import slowly
from tests.models.checkpoints import VOCAB, Family, write_checkpoint

from infer import LLM

TOLERANCE = 1e-4
TOKENS = [(7 * i * i + 3 * i) % (VOCAB - 2) + 2 for i in range(90)]
FAMILIES: tuple[Family, ...] = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", "glm4", "qwen3_moe", "qwen3_5", "olmo2", "lfm3"),
    *("laguna", "olmo_hybrid", "kimi_linear"),
)


def differences(llm: LLM, model: Any) -> float:
    """The greatest difference of a log-probability between the adapter ``one`` and ``peft``."""
    pairs = zip(scored(llm, TOKENS, "one"), reference(model, TOKENS), strict=True)
    return max(abs(found - wanted) for found, wanted in pairs)


@pytest.mark.parametrize("family", [*FAMILIES[:3], *slowly(*FAMILIES[3:])])
def test_families(family: Family, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family, window=9 if family in ("gemma3", "mistral") else None)
    model = write_adapter(base, tmp_path / "one", target_modules=linear(family), scale=0.15)
    with LLM(str(base), adapters={"load": [f"one={tmp_path / 'one'}"]}) as llm:
        assert differences(llm, model) < TOLERANCE
        with model.disable_adapter():
            plain = reference(model, TOKENS)
        assert max(abs(a - b) for a, b in zip(scored(llm, TOKENS), plain, strict=True)) < TOLERANCE
        assert max(abs(a - b) for a, b in zip(scored(llm, TOKENS, "one"), plain, strict=True)) > 0.1


CONFIGS: dict[str, dict[str, Any]] = {
    "regex": {"target_modules": r".*\.[02]\.self_attn\.(q|v)_proj"},
    "ranks": {"rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 7, "down_proj": 9}},
    "alphas": {"alpha_pattern": {"self_attn.v_proj": 11, r"^model\.layers\.0\.mlp\.gate_proj": 1}},
    "rslora": {"use_rslora": True, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 2.5}},
    "layers": {"layers_to_transform": [1, 3]},
    "excluded": {"exclude_modules": ["q_proj"]},
    "up alone": {"target_modules": ["up_proj"]},
}


@pytest.mark.parametrize("backend", [*slowly("reference"), "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str, backend: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "qwen3")
    model = write_adapter(base, tmp_path / "one", **{"target_modules": TARGETS} | CONFIGS[name])
    with LLM(str(base), kernels={"backend": backend}, adapters={"load": [f"one={tmp_path / 'one'}"]}) as llm:
        assert differences(llm, model) < TOLERANCE


def test_quantized_base(tmp_path: Path) -> None:
    """What an adapter adds does not depend on how the base is stored: log-probabilities differ as the base's do."""
    base = write_checkpoint(tmp_path / "base", "qwen3")
    model = write_adapter(base, tmp_path / "one")
    load = {"load": [f"one={tmp_path / 'one'}"]}
    with LLM(str(base), model={"quantization": "int8", "activations": "plain"}, adapters=load) as llm:
        with model.disable_adapter():
            plain = max(abs(a - b) for a, b in zip(scored(llm, TOKENS), reference(model, TOKENS), strict=True))
        assert 0 < differences(llm, model) < 4 * plain
