"""Model families: Llama and those that are composed of the same parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infer import hookimpl
from infer.contracts.model import ModelContext, ModelRegistration
from infer_layers import Decoder, DecoderConfig, DecoderLayer, config_table
from infer_models.bamba import BambaConfig
from infer_models.deepseek_v2 import DeepseekV2Config
from infer_models.deepseek_v3 import DeepseekV3Config, DeepseekV3Layer, Glm4MoeLiteConfig
from infer_models.delta import DeltaLayer
from infer_models.eagle3 import Eagle3Head
from infer_models.exaone4 import Exaone4Config
from infer_models.falcon_h1 import FalconH1Config, FalconH1Layer
from infer_models.gemma2 import Gemma2Config
from infer_models.gemma3 import Gemma3Config
from infer_models.gemma4 import Gemma4, Gemma4UnifiedConfig
from infer_models.glm4 import Glm4Config
from infer_models.glm4_moe import Glm4MoeConfig, Glm4MoeLayer
from infer_models.gpt_oss import GptOssConfig, GptOssLayer
from infer_models.granite import GraniteConfig
from infer_models.granite_hybrid import GraniteMoeHybridConfig, GraniteMoeHybridLayer
from infer_models.granite_moe import GraniteMoeConfig, GraniteMoeLayer
from infer_models.granite_swa import GraniteSWAConfig
from infer_models.hybrid import HybridLayer
from infer_models.kimi_linear import KimiLinear, KimiLinearConfig, KimiLinearLayer
from infer_models.laguna import LagunaConfig, LagunaLayer
from infer_models.latent import LatentLayer
from infer_models.lfm2 import Lfm2Config, Lfm2Layer
from infer_models.lfm2_moe import Lfm2MoeConfig, Lfm2MoeLayer
from infer_models.lfm3 import Lfm3Config
from infer_models.llama import LlamaConfig, LlamaLayer
from infer_models.ministral import MinistralConfig
from infer_models.ministral3 import Ministral3Config
from infer_models.mistral import MistralConfig
from infer_models.mixtral import MixtralConfig, MixtralLayer
from infer_models.mtp import MTPModel, NextLayerModel
from infer_models.multimodal import LanguageModel
from infer_models.nemotron_h import NemotronHConfig, NemotronHLayer
from infer_models.olmo2 import Olmo2Config
from infer_models.olmo3 import Olmo3Config
from infer_models.olmo_hybrid import OlmoHybrid, OlmoHybridConfig, OlmoHybridLayer
from infer_models.olmoe import OlmoeConfig, OlmoeLayer
from infer_models.phi3 import Phi3Config
from infer_models.qwen2 import Qwen2Config
from infer_models.qwen2_moe import Qwen2MoeConfig, Qwen2MoeLayer
from infer_models.qwen3 import Qwen3Config
from infer_models.qwen3_5 import Qwen3_5Config
from infer_models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeLayer
from infer_models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeLayer
from infer_models.qwen3_next import Qwen3NextConfig
from infer_models.qwen3_vl import Qwen3VLConfig
from infer_models.seed_oss import SeedOssConfig
from infer_models.smollm3 import SmolLM3Config
from infer_models.youtu import YoutuConfig

INFER_PLUGIN_API = 2


def _decoder(
    name: str,
    description: str,
    schema: type[DecoderConfig],
    layer: Callable[..., DecoderLayer] = LlamaLayer,
    model: type[Decoder] = Decoder,
) -> ModelRegistration:
    """The registration of a family made of ``Decoder``. The names of its architectures, with and without a head, follow
    from that of its config class."""
    family = schema.__name__.removesuffix("Config")
    return ModelRegistration(
        name,
        lambda config, context, settings: model(config, context, schema, layer),
        description,
        architectures=(f"{family}ForCausalLM", f"{family}Model"),
    )


def _mistral3(config: Mapping[str, Any], context: ModelContext) -> LanguageModel:
    grows = config_table(config, "text_config").get("model_type") == "ministral3"
    schema = Ministral3Config if grows else MistralConfig
    return LanguageModel(config, context, schema, LlamaLayer, ("mistral", "ministral3"))


@hookimpl
def infer_models() -> list[ModelRegistration]:
    return [
        _decoder("llama", "Llama 3.x, with its rotary scaling", LlamaConfig),
        _decoder("qwen2", "Qwen2 and Qwen2.5, dense", Qwen2Config),
        _decoder("qwen2_moe", "Qwen1.5 and Qwen2, mixtures of experts", Qwen2MoeConfig, Qwen2MoeLayer),
        _decoder("qwen3", "Qwen3, dense", Qwen3Config),
        _decoder("qwen3_moe", "Qwen3, mixtures of experts", Qwen3MoeConfig, Qwen3MoeLayer),
        _decoder("mistral", "Mistral", MistralConfig),
        _decoder("mixtral", "Mixtral", MixtralConfig, MixtralLayer),
        _decoder("phi3", "Phi-3, Phi-3.5 and Phi-4, text only", Phi3Config),
        _decoder("olmo2", "OLMo 2", Olmo2Config),
        _decoder("olmo3", "OLMo 3", Olmo3Config),
        _decoder("olmo_hybrid", "OLMo Hybrid", OlmoHybridConfig, OlmoHybridLayer, OlmoHybrid),
        _decoder("olmoe", "OLMoE", OlmoeConfig, OlmoeLayer),
        _decoder("ministral", "Ministral", MinistralConfig),
        _decoder("ministral3", "Ministral 3", Ministral3Config),
        _decoder("granite", "Granite 3, dense", GraniteConfig),
        _decoder("granite_swa", "Granite with windows", GraniteSWAConfig),
        _decoder("granite_moe", "Granite 3, mixtures of experts", GraniteMoeConfig, GraniteMoeLayer),
        _decoder(
            "granite_hybrid", "Granite 4, with and without Mamba 2", GraniteMoeHybridConfig, GraniteMoeHybridLayer
        ),
        _decoder("lfm2", "LFM2, dense", Lfm2Config, Lfm2Layer),
        _decoder("lfm2_moe", "LFM2, mixtures of experts", Lfm2MoeConfig, Lfm2MoeLayer),
        _decoder("laguna", "Laguna", LagunaConfig, LagunaLayer),
        _decoder("lfm3", "LFM3", Lfm3Config, Lfm2Layer),
        _decoder("falcon_h1", "Falcon-H1", FalconH1Config, FalconH1Layer),
        _decoder("bamba", "Bamba", BambaConfig, HybridLayer),
        _decoder("smollm3", "SmolLM3", SmolLM3Config),
        _decoder("glm4", "GLM-4 of 2025, text only", Glm4Config),
        _decoder("exaone4", "EXAONE 4", Exaone4Config),
        _decoder("seed_oss", "Seed-OSS", SeedOssConfig),
        _decoder("gpt_oss", "gpt-oss", GptOssConfig, GptOssLayer),
        _decoder("gemma2", "Gemma 2", Gemma2Config),
        _decoder("glm4_moe", "GLM-4.5 and 4.6", Glm4MoeConfig, Glm4MoeLayer, NextLayerModel),
        _decoder("glm4_moe_lite", "GLM-4.7-Flash", Glm4MoeLiteConfig, DeepseekV3Layer, NextLayerModel),
        _decoder("deepseek_v2", "DeepSeek-V2-Lite", DeepseekV2Config, DeepseekV3Layer),
        _decoder(
            "deepseek_v3",
            "DeepSeek-V3 without groups of experts, as Moonlight",
            DeepseekV3Config,
            DeepseekV3Layer,
            NextLayerModel,
        ),
        _decoder("kimi_linear", "Kimi Linear", KimiLinearConfig, KimiLinearLayer, KimiLinear),
        _decoder("youtu", "Youtu-LLM", YoutuConfig, LatentLayer),
        ModelRegistration(
            "gemma3",
            lambda config, context, settings: LanguageModel(config, context, Gemma3Config, LlamaLayer),
            "Gemma 3, text only",
            architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
        ),
        ModelRegistration(
            "gemma4",
            lambda config, context, settings: Gemma4(config, context),
            "Gemma 4, text only",
            architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4TextModel"),
        ),
        ModelRegistration(
            "gemma4_unified",
            lambda config, context, settings: Gemma4(config, context, Gemma4UnifiedConfig),
            "Gemma 4 of 12B, text only",
            architectures=(
                *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
                "Gemma4UnifiedTextModel",
            ),
        ),
        ModelRegistration(
            "nemotron_h",
            lambda config, context, settings: LanguageModel(config, context, NemotronHConfig, NemotronHLayer),
            "Nemotron-H, Nemotron Nano 2 and Nemotron 3",
            architectures=("NemotronHForCausalLM", "NemotronHModel"),
        ),
        ModelRegistration(
            "mistral3",
            lambda config, context, settings: _mistral3(config, context),
            "Mistral Small 3.1 and 3.2, Ministral 3 and Devstral Small 2, text only",
            architectures=("Mistral3ForConditionalGeneration",),
        ),
        *(
            ModelRegistration(
                f"{name}_vl",
                lambda config, context, settings, name=name, schema=schema: LanguageModel(
                    config, context, schema, Lfm2Layer, (name,)
                ),
                f"{name.upper()}-VL, text only",
                architectures=(f"{name.capitalize()}VlForConditionalGeneration",),
            )
            for name, schema in (("lfm2", Lfm2Config), ("lfm3", Lfm3Config))
        ),
        ModelRegistration(
            "qwen3_vl",
            lambda config, context, settings: LanguageModel(config, context, Qwen3VLConfig, LlamaLayer),
            "Qwen3-VL, dense, text only",
            architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLTextModel"),
        ),
        ModelRegistration(
            "qwen3_5",
            lambda config, context, settings: MTPModel(config, context, Qwen3_5Config, DeltaLayer),
            "Qwen3.5, dense, text only",
            architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5TextModel"),
        ),
        ModelRegistration(
            "qwen3_5_moe",
            lambda config, context, settings: MTPModel(config, context, Qwen3_5MoeConfig, Qwen3_5MoeLayer),
            "Qwen3.5, mixtures of experts, text only",
            architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeTextModel"),
        ),
        ModelRegistration(
            "qwen3_next",
            lambda config, context, settings: MTPModel(config, context, Qwen3NextConfig, Qwen3_5MoeLayer),
            "Qwen3-Next",
            architectures=("Qwen3NextForCausalLM", "Qwen3NextModel"),
        ),
        ModelRegistration(
            "eagle3",
            lambda config, context, settings: Eagle3Head(config, context),
            "EAGLE-3 draft heads, for engine.speculation",
            architectures=(
                *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
                *("Eagle3Speculator", "Eagle3DraftModel"),
            ),
        ),
    ]
