"""Tiny adapters with random factors, written by ``peft``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from infer import LLM
from infer.contracts.params import SamplingParams
from infer.llm import Completion

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = TARGETS[:4]
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def write_adapter(base: Path, folder: Path, *, seed: int = 1, scale: float = 0.3, **config: Any) -> Any:
    """An adapter of the checkpoint ``base`` in ``folder``; returns ``peft``'s model with it. Further arguments are
    fields of its LoraConfig."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS} | config
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that it saves, too
        adapted.save_pretrained(folder)
    return adapted.eval()


def linear(family: str) -> str | list[str]:
    """All linear layers. In a mixture, those that are not of experts; with latent attention, those that may change."""
    return ATTENTION if family in ("qwen3_moe", "kimi_linear") else "all-linear"


def reference(model: Any, token_ids: list[int]) -> list[float]:
    """The log-probability of each token but the first, by ``peft``."""
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    return [logprobs_TV[i, token].item() for i, token in enumerate(token_ids[1:])]


def logprobs(answer: Completion) -> list[float]:
    """The log-probability of each token of the prompt but the first."""
    assert answer.prompt_logprobs is not None
    return [entry.logprob for entry in answer.prompt_logprobs if entry is not None]


def scored(llm: LLM, token_ids: list[int], adapter: str | None = None) -> list[float]:
    return logprobs(llm.generate([token_ids], SCORED, adapter=adapter)[0])
