"""Mixtures of experts written in the simplest way: a loop over experts, masks, lists on the host. Their decode passes
cannot be recorded and are run instead, with the answers of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.checkpoints import edit_tensors, stacked, tokenizer, write_checkpoint
from torch import Tensor

from infer import LLM, SamplingParams, hookimpl
from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext, ModelRegistration, Pass
from infer.weight import Weight
from infer_layers import (
    Attention,
    Embedding,
    GatedMLP,
    Head,
    Linear,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    Weights,
    select,
)

Experts = list[Callable[[Tensor], Tensor]]
VOCAB, LAYERS, EXPERTS, TOP = 320, 2, 6, 2


def by_mask(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, experts: Experts) -> Tensor:
    out_TD = torch.zeros_like(x_TD)
    for index, expert in enumerate(experts):
        chosen_Tk = expert_Tk == index
        rows_T = chosen_Tk.any(-1)
        if rows_T.any():
            weight = (weight_Tk * chosen_Tk).sum(-1)[rows_T]
            out_TD[rows_T] += expert(x_TD[rows_T]) * weight[:, None]
    return out_TD


def by_index_add(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, experts: Experts) -> Tensor:
    out_TD = torch.zeros_like(x_TD)
    for index, expert in enumerate(experts):
        row, place = torch.where(expert_Tk == index)
        out_TD.index_add_(0, row, expert(x_TD[row]) * weight_Tk[row, place, None])
    return out_TD


def by_list(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, experts: Experts) -> Tensor:
    rows = []
    for t, chosen in enumerate(expert_Tk.tolist()):
        parts = [experts[e](x_TD[t : t + 1])[0] * weight_Tk[t, j] for j, e in enumerate(chosen)]
        rows.append(sum(parts[1:], parts[0]))
    return torch.stack(rows) if rows else x_TD


Route = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]
ROUTES: dict[str, tuple[Route, str]] = {
    "mask": (by_mask, "by_mask calls Tensor.__bool__"),
    "index_add": (by_index_add, "by_index_add calls aten.where"),
    "list": (by_list, "by_list calls Tensor.tolist"),
}


class Moe:
    """Both families: Mixtral's router is normalized over the chosen, and so is this Qwen3-MoE's."""

    def __init__(self, config: Mapping[str, Any], context: ModelContext, route: Route) -> None:
        w = self.weights = Weights(context)
        mixtral = config["model_type"] == "mixtral"
        size, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        head_size = config["head_dim"] or size // heads
        spec = AttentionSpec(heads, config["num_key_value_heads"], head_size, head_size**-0.5)
        self.vocab_size: int = config["vocab_size"]
        self.attention: Sequence[AttentionSpec] = [spec] * LAYERS
        self.route = route
        self.embedding = Embedding(w, "model.embed_tokens", self.vocab_size, size)
        rope = RopeParameters.read(config)
        self.rotary = RotaryEmbedding(context, rope, head_size)
        self.layers = []
        for i in range(LAYERS):
            name = f"model.layers.{i}"
            moe = f"{name}.{'block_sparse_moe' if mixtral else 'mlp'}"
            width = config["intermediate_size" if mixtral else "moe_intermediate_size"]
            names: dict[str, Any] = {"gate_up": ("w1", "w3"), "down": "w2"} if mixtral else {}
            experts: Experts = [GatedMLP(w, f"{moe}.experts.{e}", size, width, "silu", **names) for e in range(EXPERTS)]
            self.layers.append(
                (
                    RMSNorm(w, f"{name}.input_layernorm", size, eps),
                    Attention(w, f"{name}.self_attn", i, size, spec, rope, qk_norm_eps=None if mixtral else eps),
                    RMSNorm(w, f"{name}.post_attention_layernorm", size, eps),
                    Linear(w, f"{moe}.gate", size, EXPERTS),
                    experts,
                )
            )
        self.norm = RMSNorm(w, "model.norm", size, eps)
        self.head = Head(w, self.embedding, "lm_head", self.vocab_size, size, tied=False)

    def forward(self, batch: Pass) -> Tensor:
        rotary, x_TD = self.rotary(batch.positions_T), self.embedding(batch.token_ids_T)
        for input_norm, attention, norm, gate, experts in self.layers:
            x_TD = x_TD + attention(input_norm(x_TD), rotary, batch.cache)
            normed_TD = norm(x_TD)
            weight_Tk, expert_Tk = torch.softmax(gate(normed_TD), -1, dtype=torch.float32).topk(TOP, -1)
            weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdim=True)
            x_TD = x_TD + self.route(normed_TD, weight_Tk, expert_Tk, experts)
        return self.norm(select(x_TD, batch.rows_N))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self.weights.shapes()

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        self.weights.load(tensors)


class Plugin:
    INFER_PLUGIN_API = 2

    def __init__(self, route: Route) -> None:
        self.route = route

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        return [
            ModelRegistration(
                "moe",
                lambda config, context, settings: Moe(config, context, self.route),
                "mixtures of experts",
                architectures=("MixtralForCausalLM", "Qwen3MoeForCausalLM"),
            )
        ]


def checkpoint(folder: Path, family: str) -> Any:
    """Written to ``folder``; the model."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_experts_per_tok": TOP,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attn_implementation": "eager",
    }
    made: Any
    if family == "mixtral":
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=EXPERTS, **fields))
    else:
        fields |= {"num_experts": EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True}
        made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return made.eval()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_naive_experts_answer_as_transformers(
    family: str, route: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, (function, says) = checkpoint(tmp_path, family), ROUTES[route]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (3, 20, 9, 40, 1, 5, 30, 2)]
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
    kernels, engine = {"backend": "cpu", "threads": 1}, {"graphs": "on", "max_batch_size": 5}
    keys: dict[str, Any] = {"model": {"family": "moe"}, "kernels": kernels, "engine": engine}
    with LLM(str(tmp_path), plugins=[Plugin(function)], **keys) as llm:
        assert llm.served.exact
        found = llm.generate(prompts, params)
    assert caplog.text.count(f"{__name__}.{says}") == 1
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + list(answer.token_ids)])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        assert expected.argmax(-1).tolist() == list(answer.token_ids)
        assert answer.logprobs is not None
        logprobs = torch.tensor([each.logprob for each in answer.logprobs])
        torch.testing.assert_close(logprobs, expected.amax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_stacked_experts_are_quantized_as_if_they_were_apart(quantization: str, tmp_path: Path) -> None:
    """And their router is not."""
    folder, answers = write_checkpoint(tmp_path, "mixtral"), []
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    for change in (None, stacked):
        if change is not None:
            edit_tensors(folder, change)
        model, kernels = {"quantization": quantization}, {"backend": "cpu", "threads": 1}
        with LLM(str(folder), model=model, kernels=kernels) as llm:
            answers.append(llm.generate([list(range(50))], params)[0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs
