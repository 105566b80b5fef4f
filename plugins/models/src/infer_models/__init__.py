"""The model families Llama, Qwen3 and Gemma 3 text."""

from __future__ import annotations

from infer import hookimpl
from infer.hookspecs import ModelRegistration
from infer_models.llama import Llama

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
    ]
