"""Every family against its implementation in ``transformers``: logits at all positions, and greedy tokens."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests import support
from tests.examples import slowly
from tests.models.checkpoints import (
    ROPES,
    TEMPERED,
    VOCAB,
    Family,
    as_transformers_4,
    edit_tensors,
    stacked,
    write_checkpoint,
)
from torch import Tensor

from infer.assemble.assembly import Assembly
from infer.checkpoint import Checkpoint, Folder, dummy_tensors
from infer.checkpoint.quantize import Quantizer
from infer.contracts.cache import CacheContext
from infer.contracts.model import ModelContext, ModelProtocol, Pass, SparingModel, StatefulModel
from infer.contracts.sections import ModelSettings, Settings
from infer.errors import CheckpointError
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins
from infer_cache_paged import PagedPool, PagedSettings
from infer_cache_slotted import SlottedPool
from infer_kernels_cpu.provider import CpuKernels
from infer_models import infer_models

PROMPT, NEW, MAX_SEQ_LEN = 150, 32, 200
TOLERANCE = 1e-4
SLIDING, FULL = "sliding_attention", "full_attention"

GEMMA4_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
}
FAMILIES: tuple[Family, ...] = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3"),
    *("ministral", "ministral3", "granite", "granite_swa", "olmo3", "smollm3", "glm4", "exaone4", "seed_oss", "gemma2"),
    *("qwen3_moe", "mixtral", "olmoe", "granite_moe", "gpt_oss", "qwen2_moe", "glm4_moe"),
    *("lfm2", "granite_hybrid", "nemotron_h", "falcon_h1", "bamba", "lfm2_moe", "lfm3", "laguna"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"),
    *("glm4_moe_lite", "deepseek_v2", "deepseek_v3", "youtu", "kimi_linear"),
)
LATENT = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3", "youtu", "kimi_linear")
"""Families whose heads share one latent vector, whatever the number of K's and V's heads."""
STATEFUL = (
    *("lfm2", "lfm2_moe", "lfm3", "granite_hybrid", "falcon_h1", "bamba"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear"),
)
MIXTURES = (
    *("qwen3_moe", "mixtral", "olmoe", "granite_moe", "gpt_oss", "qwen2_moe", "glm4_moe"),
    *(
        "granite_hybrid",
        "laguna",
        "lfm2_moe",
        "qwen3_5_moe",
        "qwen3_next",
        "glm4_moe_lite",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_linear",
    ),
)
"""Rounding may give a token other experts, where the router is undecided."""
NEW_FAMILIES: tuple[Family, ...] = FAMILIES[7:]
MANY = rf"\w+-(tied-.|untied-[14])|({'|'.join(MIXTURES)})-untied-2|(llama|qwen2|phi3|gemma3|lfm2)-(?!untied-2)[\w-]+"
"""Cases that differ little from others of the same family, or of one that shares nearly everything with it."""
HEADS = ((True, 2), (False, 1), (False, 2), (False, 4))
"""Whether embeddings are tied, and how many heads K and V have."""
CASES: dict[str, dict[str, Any]] = {
    f"{family}-{'tied' if tied else 'untied'}-{kv_heads}": {
        "family": family,
        "tied": tied,
        "kv_heads": kv_heads,
        "window": 9 if family in ("gemma2", "gemma3", "mistral", "ministral", "exaone4", "gpt_oss") else None,
        "seed": int(family in ("qwen3_moe", "qwen3_next")),
    }
    for family in FAMILIES
    for tied, kv_heads in (HEADS if family in NEW_FAMILIES else itertools.product((True, False), (1, 2, 4)))
    if family not in LATENT or kv_heads == 2
} | {
    "llama-llama3-rope": {"family": "llama", "rope": "llama3"},
    "llama-linear-rope": {"family": "llama", "rope": "linear"},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-size": {"family": "llama", "head_dim": 20, "rms_norm_eps": 0.1, "seed": 3},
    "qwen3-biases": {"family": "qwen3", "attention_bias": True, "seed": 4},
    "qwen3-eps": {"family": "qwen3", "rms_norm_eps": 0.1, "seed": 2},
    "gemma3-eps": {"family": "gemma3", "window": 9, "rms_norm_eps": 0.3, "seed": 5},
    "llama-yarn-rope": {"family": "llama", "rope": "yarn"},
    "llama-dynamic-rope": {"family": "llama", "rope": "dynamic"},
    "qwen2-window": {"family": "qwen2", "window": 7},
    "qwen2-window-late": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,
    },
    "qwen2-yarn-rope": {"family": "qwen2", "rope": "yarn", "seed": 4},
    "mistral-no-window": {"family": "mistral", "head_dim": 12, "rms_norm_eps": 0.1},
    "phi3-long": {"family": "phi3", "rope": "longrope", "window": 40},
    "phi3-short": {"family": "phi3", "rope": "longrope", "original_max_position_embeddings": 200},
    "phi3-partial": {"family": "phi3", "partial_rotary_factor": 0.5, "rms_norm_eps": 0.1, "seed": 1},
    "phi3-mini": {
        "family": "phi3",
        "num_attention_heads": 3,
        "kv_heads": 1,
        "rope": "longrope",
        "partial_rotary_factor": 0.75,
    },
    "olmo2-biases": {"family": "olmo2", "attention_bias": True, "tied": False, "seed": 4},
    "olmo2-yarn-rope": {"family": "olmo2", "rope": "yarn", "rms_norm_eps": 0.01},
    "qwen3-window": {"family": "qwen3", "window": 7},
    "qwen3-window-late": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,
    },
    "ministral-some": {
        "family": "ministral",
        "rope": "yarn",
        "window": 9,
        "layer_types": [FULL, SLIDING, FULL, SLIDING],
    },
    "granite-biases": {"family": "granite", "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 0.37},
    "smollm3-some": {"family": "smollm3", "no_rope_layers": [0, 1, 1, 0], "attention_bias": True},
    "smollm3-window": {"family": "smollm3", "window": 9, "use_sliding_window": True, "no_rope_layer_interval": 2},
    "glm4-no-biases": {"family": "glm4", "attention_bias": False, "partial_rotary_factor": 0.25},
    "exaone4-full": {
        "family": "exaone4",
        "window": 9,
        "rope": "llama3",
        "layer_types": [FULL] * 4,
        "sliding_window": None,
    },
    "exaone4-pattern": {"family": "exaone4", "sliding_window": 9, "sliding_window_pattern": 3},
    "seed_oss-biases": {"family": "seed_oss", "attention_out_bias": True, "mlp_bias": False, "rope": "dynamic"},
    "gemma2-no-caps": {"family": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma2-window": {"family": "gemma2", "window": 4, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
    "qwen3_moe-some": {"family": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    "qwen3_moe-window": {"family": "qwen3_moe", "use_sliding_window": True, "sliding_window": 9},
    "qwen2_moe-window": {
        "family": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 3,
    },
    "granite_moe-biases": {"family": "granite_moe", "attention_bias": True, "num_experts_per_tok": 3},
    "gpt_oss-yarn-rope": {"family": "gpt_oss", "rope": "yarn", "window": 9, "num_experts_per_tok": 3},
    "qwen2_moe-some": {"family": "qwen2_moe", "norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False},
    "glm4_moe-norms": {"family": "glm4_moe", "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False},
    "glm4_moe_lite-some": {
        "family": "glm4_moe_lite",
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "attention_bias": True,
        "q_lora_rank": None,
    },
    "deepseek_v2-lite": {"family": "deepseek_v2", "q_lora_rank": None, "rope": "yarn", "routed_scaling_factor": 1.5},
    "deepseek_v3-yarn": {
        "family": "deepseek_v3",
        "rope_parameters": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.7},
        "rope_interleave": False,
        "norm_topk_prob": False,
    },
    "olmoe-normed": {"family": "olmoe", "norm_topk_prob": True, "kv_heads": 4, "attention_bias": True},
    "lfm2-biases": {"family": "lfm2", "conv_bias": True, "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3},
    "lfm2-plain": {"family": "lfm2", "block_auto_adjust_ff_dim": False, "full_attn_idxs": [0, 3]},
    "lfm2-dense": {"family": "lfm2", "layer_types": [FULL] * 4},
    "lfm2_moe-plain": {"family": "lfm2_moe", "use_expert_bias": False, "norm_topk_prob": False},
    "lfm3-plain": {
        "family": "lfm3",
        "use_attention_gate": False,
        "conv_bias": True,
        "attention_bias": True,
        "conv_L_cache": 4,
        "sliding_window": 30,
    },
    "laguna-each": {
        "family": "laguna",
        "gating": "per-element",
        "attention_bias": True,
        "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
        "num_attention_heads_per_layer": None,
    },
    "lfm3-usual": {"family": "lfm3", "num_hidden_layers": 6},
    "granite_hybrid-dense": {
        "family": "granite_hybrid",
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "attention_bias": True,
    },
    "granite_hybrid-attention": {
        "family": "granite_hybrid",
        "num_local_experts": 0,
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
    },
    "granite_hybrid-last": {
        "family": "granite_hybrid",
        "layer_types": ["mamba", "mamba", "attention", "attention"],
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "time_step_limit": [0.9, 1.4],
    },
    "nemotron_h-last": {"family": "nemotron_h", "hybrid_override_pattern": "-M*M-", "use_bias": True, "mlp_bias": True},
    "nemotron_h-experts": {"family": "nemotron_h", "hybrid_override_pattern": "ME*E", "num_experts_per_tok": 3},
    "nemotron_h-latent": {
        "family": "nemotron_h",
        "hybrid_override_pattern": "EM*E",
        "moe_latent_size": 32,
        "norm_topk_prob": False,
        "mlp_bias": True,
        "seed": 1,
    },
    "falcon_h1-norm": {
        "family": "falcon_h1",
        "mamba_rms_norm": True,
        "projectors_bias": True,
        "mlp_multipliers": None,
        "mlp_bias": True,
    },
    "falcon_h1-gate-first": {
        "family": "falcon_h1",
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_d_ssm": None,
        "ssm_multipliers": None,
    },
    "gemma3-linear-rope": {"family": "gemma3", "rope": "linear", "window": 5},
    "gemma3-window-4": {"family": "gemma3", "window": 4, "layer_types": [SLIDING, SLIDING, FULL, FULL]},
    "gemma3-window-16": {"family": "gemma3", "window": 16, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
    "gemma3-pattern": {"family": "gemma3", "sliding_window": 6, "sliding_window_pattern": 3},
    "gemma3-final-cap": {"family": "gemma3", "window": 9, "final_logit_softcapping": 3.0},
    "gemma3-vision": {"family": "gemma3_vision", "window": 9, "rope": "linear"},
    "gemma3-vision-untied": {"family": "gemma3_vision", "window": 9, "tied": False},
    "gemma4-dense": {"family": "gemma4", "window": 9, "hidden_size_per_layer_input": 0},
    "gemma4-inputs": {"family": "gemma4", "window": 9, "final_logit_softcapping": 30.0, "tied": False, "seed": 2},
    "gemma4-shared": {"family": "gemma4", "window": 9, "kv_heads": 1, **GEMMA4_SHARED, "seed": 2},
    "gemma4-k-is-v": {
        "family": "gemma4",
        "window": 9,
        "kv_heads": 4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4-experts": {
        "family": "gemma4",
        "window": 9,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4-default-ropes": {"family": "gemma4", "rope_parameters": None, "layer_types": None, "seed": 1},
    "gemma4-vision": {"family": "gemma4_vision", "window": 9, **GEMMA4_SHARED},
    "lfm2_vl": {"family": "lfm2_vl"},
    "lfm3_vl": {"family": "lfm3_vl"},
    "olmo3-plain": {"family": "olmo3", "rope_parameters": None, "attention_bias": True, "tied": False},
    "granite_swa-usual": {"family": "granite_swa", "layer_rope_theta": None, "attention_bias": True},
    "gemma4_unified": {"family": "gemma4_unified", "window": 9, "attention_k_eq_v": True, "kv_heads": 4},
    "gemma4_unified-vision": {"family": "gemma4_unified_vision", "window": 9, "final_logit_softcapping": 30.0},
    "mistral3-tied": {"family": "mistral3"},
    "mistral3-untied": {"family": "mistral3", "tied": False, "window": 9},
    "ministral3-vision": {"family": "ministral3_vision", "tied": False},
    "ministral3-window": {"family": "ministral3", "window": 9, "rope_parameters": TEMPERED | {"mscale": 0.7}},
    "qwen3_vl-tied": {"family": "qwen3_vl"},
    "qwen3_vl-untied": {"family": "qwen3_vl", "tied": False, "attention_bias": True, "seed": 4},
    "qwen3_5-vision": {"family": "qwen3_5_vision"},
    "qwen3_5-vision-untied": {"family": "qwen3_5_vision", "tied": False, "attention_bias": True, "seed": 4},
    "qwen3_5-whole-heads": {
        "family": "qwen3_5",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "layer_types": [FULL, "linear_attention", "linear_attention", FULL],
    },
    "qwen3_5-every-other": {"family": "qwen3_5", "layer_types": ["linear_attention", FULL] * 2},
    "olmo_hybrid-still": {
        "family": "olmo_hybrid",
        "tied": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "attention_bias": True,
    },
    "olmo_hybrid-usual": {
        "family": "olmo_hybrid",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", FULL],
        "linear_allow_neg_eigval": False,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads")),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim")),
    },
    "qwen3_next-some": {
        "family": "qwen3_next",
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "linear_num_value_heads": 2,
    },
}

ONE_EACH = (
    "llama-untied-2",
    "qwen2-untied-2",
    "qwen3-tied-2",
    "mistral-tied-1",
    "phi3-mini",
    "olmo2-tied-2",
    "gemma3-untied-2",
    *(f"{family}-{'tied' if family in ('smollm3', 'granite') else 'untied'}-2" for family in NEW_FAMILIES),
)


@pytest.fixture(scope="module", autouse=True)
def native(monkeypatch_module: pytest.MonkeyPatch) -> None:
    """The native kernels compute, which take a fraction of the reference's time."""
    monkeypatch_module.setattr(support, "KERNELS", CpuKernels())


@functools.cache
def plugins() -> Plugins:
    """What is installed is the same for all models."""
    return Plugins.discover()


class Driver:
    """One sequence through a checkpoint's model and a slotted pool, or, if the model has windows, a paged pool, which
    forgets what is behind them. The checkpoint may be a file."""

    def __init__(self, folder: Path, dtype: torch.dtype, dummy: bool = False, max_seq_len: int = MAX_SEQ_LEN) -> None:
        assembly = Assembly(Settings(model=ModelSettings(path=str(folder))), plugins())
        checkpoint = assembly.checkpoint
        (family,) = [r for r in infer_models() if set(r.architectures) & set(checkpoint.architectures)]
        context = ModelContext(support.KERNELS, dtype, torch.device("cpu"), max_seq_len)
        self.model: ModelProtocol = family.factory(checkpoint.config, context, family.settings())
        if dummy:
            self.model.load(dummy_tensors(self.model.expected(), dtype))
        else:
            unrounded = Quantizer(
                None, [], "plain", self.model.vocab_size, support.KERNELS.quantize
            )  # as transformers computes
            self.model.load(unrounded(assembly.weights.read()))
        states = self.model.states if isinstance(self.model, StatefulModel) else ()
        cache = CacheContext(
            self.model.attention,
            1,
            max_seq_len,
            dtype,
            context.device,
            context.kernels,
            max_chunk=PROMPT,
            states=states,
        )
        windowed = any(spec.window is not None for spec in self.model.attention)
        pages = PagedSettings(block_size=4, num_blocks=max_seq_len // 4 + 1)
        self.pool = PagedPool(cache, pages) if windowed else SlottedPool(cache)

    @torch.inference_mode()
    def prefill(self, tokens: list[int], chunks: Iterable[int]) -> Tensor:
        """Logits at every position, [len(tokens), V], taking ``chunks`` tokens at a time."""
        place = self.pool.allocate(tokens)
        assert place is not None
        logits, begin = [], 0
        for chunk in chunks:
            part = torch.tensor(tokens[begin : begin + chunk])
            positions = torch.arange(begin, begin + len(part))
            view = self.pool.batched_chunked_prefill_view([place.slot], [begin], [len(part)])
            logits.append(self.model.logits(self.model.forward(Pass(part, positions, view))))
            begin += len(part)
        self.slot = place.slot
        return torch.cat(logits)

    @torch.inference_mode()
    def greedy(self, last: Tensor, count: int) -> tuple[list[int], Tensor]:
        """So many likeliest tokens and the logits after each, [count, V]; then the slot is free again."""
        tokens, logits = [], [last]
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            position = torch.tensor([self.pool.length(self.slot)])
            assert self.pool.grow(self.slot, int(position) + 1)
            view = self.pool.decode_view([self.slot])
            logits.append(self.model.logits(self.model.forward(Pass(torch.tensor(tokens[-1:]), position, view)))[0])
        self.pool.free(self.slot)
        return tokens, torch.stack(logits[1:])


@functools.cache
def prompt() -> list[int]:
    return torch.randint(VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()


def reference_of(folder: Path) -> Any:
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def expected_logits(folder: Path, tokens: list[int]) -> Tensor:
    logits: Tensor = reference_of(folder)(torch.tensor([tokens])).logits[0]
    return logits


ODD = {f"{family}-untied-{(1, 4)[i % 2]}" for i, family in enumerate(NEW_FAMILIES)}
"""Each of these families has either as few heads of K and V as can be or as many, besides a number between."""


COMPARED = [case for case in CASES if case not in ODD]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if re.fullmatch(MANY, case) else case for case in COMPARED]
)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    """transformers is given our tokens and has to find each the likeliest: so its greedy tokens are ours."""
    folder = write_checkpoint(tmp_path, **CASES[case])
    driver = Driver(folder, torch.float32)
    before = driver.prefill(prompt(), [PROMPT])
    tokens, after = driver.greedy(before[-1], NEW)
    logits = torch.cat((before, after))
    expected = expected_logits(folder, prompt() + tokens)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < TOLERANCE
    assert expected[PROMPT - 1 : -1].argmax(-1).tolist() == tokens
    assert len(set(tokens)) > 3, "a constant answer shows little"


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{family}-untied-2" for family in FAMILIES])
def test_the_reference_kernels_serve_every_family(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "KERNELS", ReferenceKernels())
    test_logits_and_greedy_tokens(case, tmp_path)


EXACT = (
    *("llama-llama3-rope", "qwen2-window", "qwen3-window", "mistral-tied-2", "phi3-mini", "olmo2-biases"),
    *("gemma3-linear-rope", "gemma4-shared", "gemma4-k-is-v", "gemma4-experts", "gemma2-window", "smollm3-window"),
)
EXACT_ONCE = (
    *(
        "ministral-tied-2",
        "ministral3-window",
        "granite-biases",
        "smollm3-some",
        "glm4-untied-2",
        "exaone4-pattern",
        "seed_oss-biases",
    ),
    *("lfm2-biases", "lfm3-tied-2", "granite_hybrid-dense", "nemotron_h-latent", "falcon_h1-norm", "falcon_h1-tied-2"),
    *("qwen3_5-tied-2", "qwen3_5-whole-heads", "qwen3_5_moe-tied-2", "qwen3_next-some"),
)
"""These have types in turn: ``tests/core/test_exactness.py`` tries every family with both."""


@pytest.mark.parametrize("case", ["gemma4-dense", "gemma4-shared", "gemma4-experts"])
@pytest.mark.parametrize("length", [1, 37, 103])
def test_gemma_4_answers_prompts_of_odd_lengths(case: str, length: int, tmp_path: Path) -> None:
    folder, tokens = write_checkpoint(tmp_path, **CASES[case]), prompt()[:length]
    driver = Driver(folder, torch.float32)
    answer, _ = driver.greedy(driver.prefill(tokens, [length])[-1], 64)
    assert expected_logits(folder, tokens + answer)[length - 1 : -1].argmax(-1).tolist() == answer


def test_layers_that_share_k_and_v_see_the_wanted_rows_only(tmp_path: Path) -> None:
    """They take no memory in the cache, and a wanted row's bits do not depend on which others are wanted. A pass
    that ends no prompt wants none."""
    driver = Driver(write_checkpoint(tmp_path, **CASES["gemma4-shared"]), torch.float32)
    assert len(driver.model.attention) == 3
    seen: list[int] = []
    whole = driver.prefill(prompt(), [PROMPT])
    driver.pool.free(driver.slot)
    shared = driver.model.layers[4].mlp  # type: ignore[attr-defined]
    driver.model.layers[4].mlp = lambda x: (seen.append(len(x)), shared(x))[1]  # type: ignore[attr-defined, func-returns-value]
    for rows in ([3, 77, PROMPT - 1], []):
        place = driver.pool.allocate(prompt())
        assert place is not None
        view = driver.pool.batched_chunked_prefill_view([place.slot], [0], [PROMPT])
        rows_N = torch.tensor(rows, dtype=torch.int64)
        with torch.inference_mode():
            hidden = driver.model.forward(Pass(torch.tensor(prompt()), torch.arange(PROMPT), view, rows_N))
            assert torch.equal(driver.model.logits(hidden), whole[rows_N])
        driver.pool.free(place.slot)
    assert seen == [3, 0]


def test_projections_of_layers_that_share_k_and_v_are_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["gemma4-shared"])
    before = logits_of(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.ones(3, 3)

    edit_tensors(folder, add)
    assert torch.equal(logits_of(folder), before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 5}, "layer 1 shares K and V .num_kv_shared_layers is 5., but no layer of its kind"),
        ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is 300, but there are 320 tokens"),
        ({"enable_moe_block": True}, "num_experts, top_k_experts and moe_intermediate_size have to be set"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: Input should be 'vision'"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config: 1: sliding_window: Extra inputs"),
    ],
)
def test_configs_of_gemma_4_that_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["gemma4-shared"])
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        Driver(folder, torch.float32)


def test_heads_of_layers_without_a_window_as_google_writes_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["gemma4-k-is-v"])
    before, config = logits_of(folder), json.loads((folder / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(folder), before)


@pytest.mark.parametrize(
    "case",
    [
        "gemma3-vision",
        "gemma4-vision",
        "gemma4_unified-vision",
        "mistral3-tied",
        "ministral3-vision",
        "qwen3_vl-tied",
        "qwen3_5-vision",
    ],
)
def test_what_is_left_out_is_said_once(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    with caplog.at_level("INFO", logger="infer_models"):
        Driver(folder, torch.float32)
    (line,) = [line for line in caplog.messages if "only the language model is served" in line]
    towers = {"qwen": "visual", "gemma4_unified": "vision_embedder"}
    tower = next((name for start, name in towers.items() if case.startswith(start)), "vision_tower")
    left = [x for name, x in load_file(folder / "model.safetensors").items() if "language_model" not in name]
    assert tower in line
    assert f"{len(left)} tensors ({sum(x.nbytes for x in left) / 2**20:.1f} MiB)" in line


def test_drafting_layers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, **CASES["qwen3_5-vision"])
    before = logits_of(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(48, 96)}))
    with caplog.at_level("INFO", logger="infer_models"):
        assert torch.equal(logits_of(folder), before)
    assert re.search(r"only the language model is served: .* of .*\bmtp\b", caplog.text)


@pytest.mark.parametrize("case", ["qwen3_5-untied-2", "qwen3_next-untied-2", "olmo_hybrid-untied-2"])
def test_small_matrices_of_delta_nets_stay_plain(case: str, tmp_path: Path) -> None:
    """Decays and strengths are the rule's own, and their matrices have a row or two for each head."""
    model = Driver(write_checkpoint(tmp_path, **CASES[case]), torch.float32).model
    assert isinstance(model, SparingModel)
    others = {"qwen3_next": ("in_proj_ba",), "olmo_hybrid": ("a_proj", "b_proj")}
    names = others.get(case.removesuffix("-untied-2"), ("in_proj_a", "in_proj_b"))
    wanted = {f"model.layers.{i}.linear_attn.{name}.weight" for i in (0, 2, 3) for name in names}
    assert set(model.spared) == wanted


def test_heads_of_a_delta_net_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["qwen3_5-untied-2"])
    config = json.loads((folder / "config.json").read_text()) | {"linear_num_value_heads": 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"linear_num_value_heads, 5, is not a multiple of .*, 2"):
        Driver(folder, torch.float32)
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"]}))
    with pytest.raises(CheckpointError, match="layer_types has 1 entries, but num_hidden_layers is 4"):
        Driver(folder, torch.float32)


LONG = (
    *(f"{family}-untied-2" for family in (*STATEFUL, "nemotron_h")),
    *("nemotron_h-experts", "gemma4-dense", "gemma4-inputs", "gemma4-shared", "gemma4-k-is-v", "gemma4-experts"),
    *("mistral3-tied", "ministral3-vision", "qwen3_vl-tied", "gemma4_unified-vision"),
    *(f"{family}-untied-2" for family in LATENT if family not in STATEFUL),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_sixty_four_greedy_tokens_of_twenty_prompts(case: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    driver, reference = Driver(folder, torch.float32), reference_of(folder)
    generator = torch.Generator().manual_seed(5)
    for length in range(1, 121, 6):
        given = torch.randint(VOCAB, (length,), generator=generator).tolist()
        tokens, _ = driver.greedy(driver.prefill(given, [length])[-1], 64)
        with torch.inference_mode():
            logits = reference(torch.tensor([given + tokens])).logits[0]
        assert logits[length - 1 : -1].argmax(-1).tolist() == tokens, length


def test_attention_in_every_other_layer_by_its_interval(tmp_path: Path) -> None:
    """As Qwen3-Next's published configs have it."""
    folder = write_checkpoint(tmp_path, **CASES["qwen3_5-every-other"])
    before = logits_of(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config | {"full_attention_interval": 2}))
    assert torch.equal(logits_of(folder), before)


def test_windows_that_qwen3_vl_does_not_have(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["qwen3_vl-tied"])
    before = logits_of(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(folder), before)


@pytest.mark.parametrize("share", [None, 1.0])
def test_half_of_bambas_heads_rotates_whatever_the_config_says_outside(share: float | None, tmp_path: Path) -> None:
    """As in transformers, where only rope_parameters may say otherwise."""
    folder = write_checkpoint(tmp_path, **CASES["bamba-tied-2"])
    before = logits_of(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"].pop("partial_rotary_factor", None)
    (folder / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": share}))
    assert torch.equal(logits_of(folder), before)


@pytest.mark.parametrize(
    ("case", "kind", "known"),
    [
        ("mistral3-tied", "mistral4", "'mistral', 'ministral3'"),
        ("mistral3-tied", ["mistral"], "'mistral', 'ministral3'"),
        ("lfm2_vl", "lfm2_moe", "'lfm2'"),
    ],
)
def test_a_language_model_that_is_not_known_is_refused(case: str, kind: Any, known: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = kind
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"has model_type {re.escape(repr(kind))}; .* with {known}\."):
        Driver(folder, torch.float32)


def test_dynamic_rope_grows_with_the_longest_sequence(tmp_path: Path) -> None:
    """That of transformers, for a sequence as long as one may become."""
    folder = write_checkpoint(tmp_path, "llama", rope="dynamic", max_position_embeddings=64)
    tokens = prompt()
    logits = Driver(folder, torch.float32, max_seq_len=PROMPT).prefill(tokens, [30, PROMPT - 30])
    assert (logits - expected_logits(folder, tokens)).abs().max() < TOLERANCE


def test_longrope_goes_by_the_longest_sequence(tmp_path: Path) -> None:
    """A short text is answered with the long factors where longer ones may come; transformers does so with a text."""
    folder = write_checkpoint(tmp_path, "phi3", rope="longrope")
    tokens = prompt()[:80]
    long = Driver(folder, torch.float32, max_seq_len=65).prefill(tokens[:60], [60])
    assert (long - expected_logits(folder, tokens)[:60]).abs().max() < TOLERANCE
    short = Driver(folder, torch.float32, max_seq_len=64).prefill(tokens[:60], [60])
    assert (short - expected_logits(folder, tokens[:60])).abs().max() < TOLERANCE
    assert (short - long).abs().max() > 0.1


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *itertools.product(EXACT, (torch.float32, torch.bfloat16)),
        *slowly(*((case, (torch.float32, torch.bfloat16)[i % 2]) for i, case in enumerate(EXACT_ONCE))),
    ],
)
def test_chunks_give_the_same_bits(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    driver = Driver(write_checkpoint(tmp_path, **CASES[case], dtype=dtype), dtype)
    whole = driver.prefill(prompt(), [PROMPT])
    rest = driver.greedy(whole[-1], 12)
    for chunks in ([*[1] * 40, PROMPT - 40], [7] * 22, [127, 1, 22], [129, 21], [33, 64, 53]):
        chunked = driver.prefill(prompt(), chunks)
        assert torch.equal(whole, chunked), chunks
        again = driver.greedy(chunked[-1], 12)
        assert rest[0] == again[0]
        assert torch.equal(rest[1], again[1])


@pytest.mark.parametrize(
    "case", [*(f"{family}-tied-2" for family in FAMILIES if family not in MIXTURES), "phi3-mini", "gemma3-linear-rope"]
)
def test_bfloat16_stays_near(case: str, tmp_path: Path) -> None:
    """The same bf16 weights, computed in bf16 by us and in fp32 by transformers."""
    folder = write_checkpoint(tmp_path, **CASES[case], dtype=torch.bfloat16)
    difference = Driver(folder, torch.bfloat16).prefill(prompt(), [PROMPT]) - expected_logits(folder, prompt())
    # Norms of OLMo Hybrid's heads magnify small values: transformers itself is as far off.
    assert difference.square().mean().sqrt() < (0.07 if case.startswith("olmo_hybrid") else 0.05)


def logits_of(folder: Path) -> Tensor:
    return Driver(folder, torch.float32).prefill(prompt(), [PROMPT])


@pytest.mark.parametrize(
    "case",
    [
        "llama-tied-2",
        "llama-llama3-rope",
        "llama-linear-rope",
        "llama-yarn-rope",
        "qwen2-window",
        "qwen3-untied-2",
        "qwen3-window",
        "mistral-tied-2",
        "phi3-mini",
        "olmo2-yarn-rope",
        "gemma3-tied-2",
        "gemma3-linear-rope",
        "gemma3-vision",
        # Layers of LFM3 and Laguna rotate in two ways, which it has no form for.
        *(
            pytest.param(f"{family}-tied-2", marks=pytest.mark.slow)
            for family in NEW_FAMILIES
            if family not in ("lfm3", "laguna")
        ),
    ],
)
def test_configs_of_transformers_4(case: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    new = logits_of(folder)
    as_transformers_4(folder)
    text = (folder / "config.json").read_text()
    assert "rope_theta" in text
    assert "rope_parameters" not in text
    assert Checkpoint(Folder(folder)).dtype == torch.float32
    assert torch.equal(new, logits_of(folder))


def test_old_spelling_of_the_rotary_kind(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", rope="linear")
    new = logits_of(folder)
    as_transformers_4(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"rope_type"', '"type"'))
    assert torch.equal(new, logits_of(folder))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("mixtral-untied-2", "rope_parameters"),
        ("gpt_oss-untied-2", "rope_parameters"),
        ("smollm3-untied-2", "rope_parameters"),
        ("ministral3-untied-2", "rope_parameters"),
        ("lfm3-untied-2", "rope_parameters"),
        ("lfm3-usual", "layer_types"),
        ("olmo3-plain", "layer_types"),
        ("granite_swa-usual", "layer_types"),
        ("qwen2_moe-window", "layer_types"),
        ("olmo_hybrid-usual", "layer_types"),
    ],
)
def test_a_config_that_leaves_a_field_out(case: str, key: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    expected = expected_logits(folder, prompt())
    torch.testing.assert_close(logits_of(folder), expected, rtol=TOLERANCE, atol=10 * TOLERANCE)


@pytest.mark.parametrize("ropes", [None, {"rope_type": None}, {"rope_type": "default"}, {"rope_theta": None}], ids=str)
def test_positions_that_olmo_hybrid_does_not_rotate(ropes: dict[str, Any] | None, tmp_path: Path) -> None:
    """Published configs give no base, where transformers 5 takes one that the models were not trained with."""
    folder = write_checkpoint(tmp_path, **CASES["olmo_hybrid-still"])
    before = logits_of(folder)
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": ropes}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(folder), before)


def test_layers_of_kimi_linear_without_lists(tmp_path: Path) -> None:
    kinds = [*["linear_attention"] * 4, FULL]
    folder = write_checkpoint(tmp_path, **CASES["kimi_linear-untied-2"], num_hidden_layers=5, layer_types=kinds)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"], config["mlp_layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(
        logits_of(folder), expected_logits(folder, prompt()), rtol=TOLERANCE, atol=10 * TOLERANCE
    )


@pytest.mark.parametrize("key", ["tie_embedding", "tie_word_embeddings"])
def test_a_head_that_the_text_of_a_whole_says_is_tied(key: str, tmp_path: Path) -> None:
    """What the whole model's config says is what transformers does."""
    folder = write_checkpoint(tmp_path, **CASES["lfm2_vl"], tied=False)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    config[key] = False
    config["text_config"] |= {"tie_embedding": True, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    expected = expected_logits(folder, prompt())
    torch.testing.assert_close(logits_of(folder), expected, rtol=TOLERANCE, atol=10 * TOLERANCE)


CONVOLUTIONS = [f"{part}_conv1d" for part in "qkv"]


def convolutions(tensors: dict[str, Tensor], cut: Callable[[Tensor], Iterable[Tensor]], names: Iterable[str]) -> None:
    """Cut each layer's convolution elsewhere."""
    for layer in {name.rsplit(".", 2)[0] for name in tensors if name.endswith(".q_conv1d.weight")}:
        whole = torch.cat([tensors.pop(f"{layer}.{part}.weight") for part in CONVOLUTIONS])
        tensors.update({f"{layer}.{name}.weight": x.clone() for name, x in zip(names, cut(whole), strict=True)})


@pytest.mark.parametrize("written", ["published", "modules"])
def test_names_of_olmo_hybrid(written: str, tmp_path: Path) -> None:
    """As in the published files, whose parts are those of q, K and V and whose layers with attention have OLMo 2's
    names; and as transformers calls its modules. It writes neither."""
    folder = write_checkpoint(tmp_path, **CASES["olmo_hybrid-tied-2"])
    before = logits_of(folder)
    keys, values = 2 * 16, 6 * 8
    assert load_file(folder / "model.safetensors")["model.layers.0.linear_attn.q_conv1d.weight"].shape[0] != keys

    def change(tensors: dict[str, Tensor]) -> None:
        if written == "modules":
            convolutions(tensors, lambda whole: [whole], ["conv1d"])
        else:
            convolutions(tensors, lambda whole: whole.split_with_sizes([keys, keys, values]), CONVOLUTIONS)
        for name in [name for name in tensors if "layer_norm" in name]:
            if written == "modules" or ".1." in name:
                new = name.replace("feedforward_layer_norm", "post_attention_layernorm")
                tensors[new.replace("attention_layer_norm", "input_layernorm")] = tensors.pop(name)

    edit_tensors(folder, change)
    assert torch.equal(logits_of(folder), before)


def test_a_convolution_of_olmo_hybrid_without_one_of_its_parts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["olmo_hybrid-tied-2"])

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.2.linear_attn.k_conv1d.weight"]

    edit_tensors(folder, drop)
    with pytest.raises(CheckpointError, match=r"linear_attn.q_conv1d.weight', which this model does not have"):
        logits_of(folder)


def test_tables_of_lfm3_that_leave_their_base_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES["lfm3-untied-2"])
    config = json.loads((folder / "config.json").read_text())
    for table in config["rope_parameters"].values():
        del table["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(folder), expected_logits(folder, prompt()), rtol=1e-4, atol=1e-3)


one_of_each = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case.startswith(NEW_FAMILIES) else case for case in ONE_EACH],
)


@one_of_each
def test_sharded_checkpoints(case: str, tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", **CASES[case])
    shards = write_checkpoint(tmp_path / "shards", **CASES[case], sharded=True)
    assert len(list(shards.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits_of(whole), logits_of(shards))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@one_of_each
def test_a_file_may_change_once_it_is_loaded(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case], dtype=dtype)
    before, driver = Driver(folder, dtype).prefill(prompt(), [PROMPT]), Driver(folder, dtype)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:  # in place: a mapping would see it
        stream.seek(size // 8)
        stream.write(bytes(size - size // 8))
    assert torch.equal(driver.prefill(prompt(), [PROMPT]), before)


MXFP4: Family = "gpt_oss"


def test_mxfp4(tmp_path: Path) -> None:
    """Against transformers with the values that the blocks stand for."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 3}
    plain = write_checkpoint(tmp_path / "plain", MXFP4, rope="yarn", **sizes)
    packed = write_checkpoint(tmp_path / "packed", MXFP4, rope="yarn", **sizes)
    generator, values = torch.Generator().manual_seed(0), {}
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            X, K, N = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (X, N, K // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 125, (X, N, K // 32), generator=generator, dtype=torch.uint8)
            codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
            signed = magnitudes[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
            whole = (signed * 2.0 ** (scales[..., None].float() - 127)).flatten(-2)
            values[name] = whole.mT.contiguous()
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    edit_tensors(packed, pack)
    edit_tensors(plain, lambda tensors: tensors.update(values))
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    assert (logits_of(packed) - expected_logits(plain, prompt())).abs().max() < TOLERANCE

    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.down_proj_scales"]

    edit_tensors(packed, lose)
    with pytest.raises(CheckpointError, match=r"lacks 'model.layers.1.mlp.experts.down_proj_scales'"):
        logits_of(packed)


@pytest.mark.parametrize("case", ["qwen3_moe-some", "mixtral-tied-2"])
def test_experts_may_be_stacked(case: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **CASES[case])
    apart = logits_of(folder)
    edit_tensors(folder, stacked)
    names = load_file(folder / "model.safetensors")
    assert not any(".experts.0." in name or "block_sparse" in name for name in names)
    assert torch.equal(apart, logits_of(folder))

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.down_proj"] = tensors["model.layers.1.mlp.experts.down_proj"][:5].clone()

    edit_tensors(folder, cut)
    with pytest.raises(CheckpointError, match=r"mlp.experts.down_proj' has shape \[5, .*\], but .* asks for \[6, "):
        logits_of(folder)


def rename(change: Callable[[str], str]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        renamed = {change(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return apply


def new_name(name: str) -> str:
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name.removeprefix("language_model.") if name.startswith("language_model.") else f"model.{name}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_both_namings_of_a_model_with_vision(tied: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gemma3_vision", window=9, tied=tied)
    old = logits_of(folder)
    edit_tensors(folder, rename(new_name))
    assert torch.equal(old, logits_of(folder))


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("llama", ""),
        ("gemma3_vision", "language_model."),
        *slowly(*((family, "") for family in FAMILIES if family not in ("llama", "nemotron_h", "kimi_linear"))),
    ],
)
def test_surplus_tensors_that_are_known(family: Family, prefix: str, tmp_path: Path) -> None:
    """A second copy of a tied head, and the rotary frequencies that old checkpoints hold."""
    folder = write_checkpoint(tmp_path, family, tied=True)
    plain = logits_of(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{prefix}lm_head.weight"] = tensors[f"{prefix}model.embed_tokens.weight"].clone()
        tensors[f"{prefix}model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)

    edit_tensors(folder, add)
    assert torch.equal(plain, logits_of(folder))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_differs_is_named(same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As fine-tuning may leave it, beside a config that says otherwise."""
    folder = write_checkpoint(tmp_path, "qwen3", tied=True)
    plain = logits_of(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, 5] += 0 if same else 1e-3

    edit_tensors(folder, add)
    assert torch.equal(plain, logits_of(folder))
    assert ("another 'lm_head.weight', which is not used; if" in caplog.text) is not same


@pytest.mark.parametrize(
    "case", ["qwen3-tied-2", *(pytest.param(c, marks=pytest.mark.slow) for c in ("llama-untied-2", "gemma3-tied-2"))]
)
def test_a_checkpoint_without_its_head(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Qwen3-Embedding is stored: names lack their prefix. The hidden states are those of the whole checkpoint."""
    folder = write_checkpoint(tmp_path, **CASES[case])
    whole = Driver(folder, torch.float32)
    logits = whole.prefill(prompt(), [PROMPT])

    def bare(tensors: dict[str, Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        rename(lambda name: name.removeprefix("model."))(tensors)

    edit_tensors(folder, bare)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("ForCausalLM", "TextModel" if "gemma3" in case else "Model"))
    found = Driver(folder, torch.float32)
    if "untied" in case:
        assert "has no output head" in caplog.text
        found.model.head = whole.model.head  # type: ignore[attr-defined]
    assert torch.equal(found.prefill(prompt(), [PROMPT]), logits)


PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "DeepSeek-R1-Distill-Llama-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "model_type": "phi3",
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_attention_heads": 32,
        "num_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "use_pos_enc": True,
        "vocab_size": 65536,
    },
    "LFM3-1.7B": {
        "architectures": ["Lfm3ForCausalLM"],
        "conv_L_cache": 7,
        "conv_bias": False,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "max_position_embeddings": 128000,
        "model_type": "lfm3",
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 256,
        "use_attention_gate": True,
        "use_sandwich_norm": True,
        "vocab_size": 128000,
    },
    "Falcon-H1-0.5B": {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1536,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1",
        "num_attention_heads": 8,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587,
        "tie_word_embeddings": False,
        "vocab_size": 32784,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "architectures": ["NemotronHForCausalLM"],
        "conv_kernel": 4,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 128,
        "topk_group": 1,
        "vocab_size": 131072,
    },
    "Nemotron-3-Nano-4B": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_head_dim": 128,
        "conv_kernel": 4,
        "head_dim": 128,
        "hidden_size": 3136,
        "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        "intermediate_size": 12544,
        "mamba_head_dim": 80,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 96,
        "max_position_embeddings": 262144,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "n_groups": 8,
        "num_attention_heads": 40,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "ssm_state_size": 128,
        "time_step_limit": [0.0, math.inf],
        "vocab_size": 131072,
    },
    "Olmo-Hybrid-7B": {
        "architectures": ["OlmoHybridForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 96,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
        "model_type": "olmo_hybrid",
        "num_attention_heads": 30,
        "num_hidden_layers": 32,
        "num_key_value_heads": 30,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_parameters": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    },
}
"""config.json as these checkpoints have it, in transformers 4's terms."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    """As the config class of transformers understands them; the model is made, but not its weights."""
    config = PUBLISHED[name]
    (family,) = [r for r in infer_models() if config["architectures"][0] in r.architectures]
    context = ModelContext(support.KERNELS, torch.bfloat16, torch.device("cpu"), 64)
    found = family.factory(config, context, family.settings())
    known = {name: value for name, value in config.items() if name != "torch_dtype"}
    theirs: Any = transformers.AutoConfig.for_model(**known)
    size = theirs.hidden_size // theirs.num_attention_heads
    windows = {"sliding_attention": theirs.sliding_window} if getattr(theirs, "sliding_window", None) else {}
    kinds = getattr(theirs, "layer_types", None) or [FULL] * theirs.num_hidden_layers
    attending = [kind for kind in kinds if kind in (FULL, SLIDING, "hybrid")]
    assert [spec.window for spec in found.attention] == [windows.get(kind) for kind in attending]
    recurrent = sum(kind in ("linear_attention", "conv", "hybrid") for kind in kinds)
    assert len(found.states if isinstance(found, StatefulModel) else ()) == recurrent
    assert {(s.num_heads, s.num_kv_heads, s.head_size) for s in found.attention} == {
        (theirs.num_attention_heads, theirs.num_key_value_heads, getattr(theirs, "head_dim", None) or size)
    }
    assert {s.soft_cap for s in found.attention} == {getattr(theirs, "attn_logit_softcapping", None)}
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(theirs)  # type: ignore[no-untyped-call]
    own = "backbone" if config["model_type"] == "nemotron_h" else "model"
    biases = ((name, b) for name, b in empty.named_buffers() if name.endswith("e_score_correction_bias"))
    names: dict[str, tuple[int, ...]] = {}
    for name, tensor in (*empty.named_parameters(), *biases):
        name = name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")  # as files have it
        place, experts, part = name.replace("model.", f"{own}.").partition(".experts.")
        each = [f"{place}.experts.{i}.{part}.weight" for i in range(len(tensor))] if experts else [place]
        names |= dict.fromkeys(each, tuple(tensor.shape[bool(experts) :]))
    assert dict(found.expected()) == names


LATENT_PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}


@pytest.mark.parametrize("name", LATENT_PUBLISHED)
def test_published_configs_of_latent_attention(name: str) -> None:
    config = LATENT_PUBLISHED[name]
    (family,) = [r for r in infer_models() if config["architectures"][0] in r.architectures]
    context = ModelContext(support.KERNELS, torch.bfloat16, torch.device("cpu"), 64)
    found: Any = family.factory(config, context, family.settings())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]
    attention = theirs.model.layers[0].self_attn
    assert len(found.attention) == config["num_hidden_layers"]
    (spec,) = {*found.attention}
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (config["num_attention_heads"], 1, 512 + 64)
    assert spec.scale == pytest.approx(attention.scaling, rel=1e-6)
    rotary = type(theirs.model.rotary_emb)(theirs.config)
    turned = found.rotary[0](torch.tensor([0, 1, 63]))
    expected = torch.outer(torch.tensor([0.0, 1.0, 63.0]), rotary.inv_freq)
    assert (turned.cos[:, :32] - expected.cos() * rotary.attention_scaling).abs().max() < 1e-5
    assert (turned.sin[:, :32] - expected.sin() * rotary.attention_scaling).abs().max() < 1e-5
    assert (turned.cos[:, 32:] == 1).all()
    assert {key: shape for key, shape in found.expected().items() if "self_attn" in key} == {
        key: tuple(tensor.shape) for key, tensor in theirs.named_parameters() if "self_attn" in key
    }


KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [
            *range(1, 4),
            *range(5, 8),
            *range(9, 12),
            *range(13, 16),
            *range(17, 20),
            *range(21, 24),
            25,
            26,
        ],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""As published for Kimi-Linear-48B-A3B."""


def test_the_published_config_of_kimi_linear() -> None:
    (family,) = [r for r in infer_models() if KIMI["architectures"][0] in r.architectures]
    context = ModelContext(support.KERNELS, torch.bfloat16, torch.device("cpu"), 64)
    config = KIMI | {"num_experts": 2, "num_experts_per_token": 2}  # of which no other field depends
    found: Any = family.factory(config, context, family.settings())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]
    assert (len(found.attention), len(found.states)) == (7, 20)
    assert {*found.rotary} == {None}
    assert {spec.scale for spec in found.attention} == {theirs.model.layers[3].self_attn.scaling}
    buffers = {name: x for name, x in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    expected = {name: tuple(x.shape) for name, x in {**dict(theirs.named_parameters()), **buffers}.items()}
    expected |= {name: (32,) for name in expected if name.endswith("A_log")}  # of [1, 1, 32, 1]
    assert {name: shape for name, shape in found.expected().items() if ".experts." not in name} == {
        name: shape for name, shape in expected.items() if ".experts." not in name
    }


@pytest.mark.parametrize("written", ["published", "modules"])
def test_names_of_kimi_linear(written: str, tmp_path: Path) -> None:
    """As in the published files, whose dense layers have other names than the others; and as transformers calls its
    modules. It writes neither."""
    folder = write_checkpoint(tmp_path, **CASES["kimi_linear-untied-2"])
    before, config = logits_of(folder), json.loads((folder / "config.json").read_text())

    def change(tensors: dict[str, Tensor]) -> None:
        experts = "block_sparse_moe" if written == "published" else "mlp"
        for name in list(tensors):
            new = name.replace("block_sparse_moe", "mlp" if ".layers.0." in name else experts)
            if written == "modules":
                new = re.sub(r"self_attn\.(f_|dt_bias|A_log)", r"self_attn.forget_gate.\1", new)
            tensors[new] = tensors.pop(name)

    edit_tensors(folder, change)
    own = {
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
    }
    fields = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    config = {key: value for key, value in config.items() if key not in fields} | {"linear_attn_config": own}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(folder), before)
    assert Checkpoint(Folder(folder)).max_positions == config["model_max_length"]


def test_small_matrices_of_kimi_linear_stay_plain(tmp_path: Path) -> None:
    model = Driver(write_checkpoint(tmp_path, **CASES["kimi_linear-untied-2"]), torch.float32).model
    assert isinstance(model, SparingModel)
    names = ("forget_gate.f_a_proj", "forget_gate.f_b_proj", "b_proj")
    delta = {f"model.layers.{i}.self_attn.{name}.weight" for i in (0, 2, 3) for name in names}
    assert set(model.spared) == delta | {"model.layers.1.self_attn.kv_b_proj.weight"}


def test_groups_of_experts_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "deepseek_v3", n_group=2)
    said = r'n_group: .* no groups of experts; set model\.family = "transformers" \(it is 2\)'
    with pytest.raises(CheckpointError, match=said):
        Driver(folder, torch.float32)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types has 2 entries, but num_hidden_layers is 4"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"kv_lora_rank": 21}, "kv_lora_rank is 21 and qk_rope_head_dim 8"),
    ],
)
def test_configs_of_latent_attention_that_are_refused(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "glm4_moe_lite")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=why):
        Driver(folder, torch.float32)


def test_only_stretched_positions_sharpen_attention(tmp_path: Path) -> None:
    """As in transformers: not whatever else stands there."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "factor": 40.0, "mscale_all_dim": 1.0}
    folder = write_checkpoint(tmp_path, "youtu", rope_parameters=rope)
    assert Driver(folder, torch.float32).model.attention[0].scale == pytest.approx(20**-0.5)
    assert (logits_of(folder) - expected_logits(folder, prompt())).abs().max() < TOLERANCE


def test_attention_soft_cap_is_ignored_as_transformers_ignores_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gemma3", window=9, attn_logit_softcapping=2.0)
    assert (logits_of(folder) - expected_logits(folder, prompt())).abs().max() < TOLERANCE


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.vision_tower.weight"] = torch.ones(1)


def transpose(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].clone()


def quantize(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"][3, 1] = torch.nan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop, "The checkpoint lacks 'model.layers.1.mlp.up_proj.weight'."),
        (add, "The checkpoint holds the tensor 'model.vision_tower.weight', which this model does not have."),
        (transpose, "'model.layers.0.mlp.up_proj.weight' has shape [48, 72], but config.json asks for [72, 48]."),
        (quantize, "'model.norm.weight' is of type int8; infer loads float32, float16 and bfloat16 weights"),
        (spoil, "'model.embed_tokens.weight' holds values that are not finite as float32."),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "olmo2"])
def test_a_checkpoint_that_does_not_fit(
    family: Family, change: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, family)
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError) as caught:
        Driver(folder, torch.float32)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "case",
    ["llama-untied-2", "qwen2-tied-2", "qwen3-tied-2", "mistral-tied-1", "phi3-mini", "olmo2-tied-2", "gemma3-vision"],
)
def test_dummy_weights_run(case: str, tmp_path: Path) -> None:
    """With a config alone."""
    folder = write_checkpoint(tmp_path, **CASES[case])
    (folder / "model.safetensors").unlink()
    first, again = (Driver(folder, torch.bfloat16, dummy=True).prefill(prompt(), [PROMPT]) for _ in range(2))
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(first, again)
