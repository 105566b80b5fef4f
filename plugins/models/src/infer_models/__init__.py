"""The model families Llama, Qwen2, Qwen3, Mistral, Phi-3, OLMo 2 and Gemma 3 text."""

from __future__ import annotations

from collections.abc import Callable

from infer import hookimpl
from infer.hookspecs import ModelRegistration
from infer.layers import Decoder, DecoderConfig, DecoderLayer
from infer_models.gemma3 import Gemma3
from infer_models.llama import LlamaConfig, LlamaLayer
from infer_models.mistral import MistralConfig
from infer_models.olmo2 import Olmo2Config, Olmo2Layer
from infer_models.phi3 import Phi3Config
from infer_models.qwen2 import Qwen2Config
from infer_models.qwen3 import Qwen3Config

INFER_PLUGIN_API = 1


def _decoder(
    name: str, description: str, schema: type[DecoderConfig], layer: Callable[..., DecoderLayer] = LlamaLayer
) -> ModelRegistration:
    """The registration of a family made of ``Decoder``. Its architecture's name follows from that of its config
    class."""
    return ModelRegistration(
        name,
        lambda config, context, settings: Decoder(config, context, schema, layer),
        description,
        architectures=(schema.__name__.replace("Config", "ForCausalLM"),),
    )


@hookimpl
def infer_models() -> list[ModelRegistration]:
    return [
        _decoder("llama", "Llama 3.x, with its rotary scaling", LlamaConfig),
        _decoder("qwen2", "Qwen2 and Qwen2.5, dense", Qwen2Config),
        _decoder("qwen3", "Qwen3, dense", Qwen3Config),
        _decoder("mistral", "Mistral", MistralConfig),
        _decoder("phi3", "Phi-3, Phi-3.5 and Phi-4, text only", Phi3Config),
        _decoder("olmo2", "OLMo 2", Olmo2Config, Olmo2Layer),
        ModelRegistration(
            "gemma3",
            lambda config, context, settings: Gemma3(config, context),
            "Gemma 3, text only",
            architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ),
    ]
