"""The model families Llama, Qwen3 and Gemma 3 text."""

from __future__ import annotations

from infer import hookimpl
from infer.hookspecs import ModelRegistration
from infer_models.gemma3 import Gemma3
from infer_models.llama import Llama
from infer_models.qwen3 import Qwen3Config

INFER_PLUGIN_API = 1


@hookimpl
def infer_models() -> list[ModelRegistration]:
    return [
        ModelRegistration(
            "llama",
            lambda config, context, settings: Llama(config, context),
            "Llama 3.x, with its rotary scaling",
            architectures=("LlamaForCausalLM",),
        ),
        ModelRegistration(
            "qwen3",
            lambda config, context, settings: Llama(config, context, Qwen3Config),
            "Qwen3, dense",
            architectures=("Qwen3ForCausalLM",),
        ),
        ModelRegistration(
            "gemma3",
            lambda config, context, settings: Gemma3(config, context),
            "Gemma 3, text only",
            architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ),
    ]
