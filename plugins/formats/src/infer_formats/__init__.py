"""The ways in which published checkpoints store quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infer import hookimpl
from infer.contracts.adapters import AdapterRegistration
from infer.contracts.weights import (
    ContainerRegistration,
    TensorFilesProtocol,
    TokenizerRegistration,
    WeightFormatProtocol,
    WeightFormatRegistration,
)
from infer_formats.awq import Awq
from infer_formats.compressed import CompressedTensors
from infer_formats.fp8 import Fp8
from infer_formats.gguf import GGUF, GGUFFormat
from infer_formats.gguf.adapters import GGUFAdapter
from infer_formats.gptq import Gptq
from infer_formats.mxfp4 import Mxfp4
from infer_formats.peft import PeftAdapter
from infer_formats.ranks import tekken, tiktoken

INFER_PLUGIN_API = 2


def _format(
    name: str,
    method: str,
    reader: Callable[[Mapping[str, Any], TensorFilesProtocol], WeightFormatProtocol],
    description: str,
) -> WeightFormatRegistration:
    make = lambda config, files, settings: reader(config, files)  # noqa: E731
    return WeightFormatRegistration(name, make, description, methods=(method,))


@hookimpl
def infer_containers() -> list[ContainerRegistration]:
    return [
        ContainerRegistration(
            "gguf", lambda path, settings: GGUF(path), "llama.cpp's files, with all in one", suffixes=(".gguf",)
        )
    ]


@hookimpl
def infer_tokenizers() -> list[TokenizerRegistration]:
    return [
        TokenizerRegistration(
            "tekken", lambda file, settings: tekken(file), "Mistral's tekken.json", files=("tekken.json",)
        ),
        TokenizerRegistration(
            "tiktoken",
            lambda file, settings: tiktoken(file),
            "the tiktoken.model of Moonshot's models",
            files=("tiktoken.model",),
        ),
    ]


@hookimpl
def infer_adapters() -> list[AdapterRegistration]:
    return [
        AdapterRegistration(
            "peft",
            lambda path, config, settings: PeftAdapter(path),
            "PEFT's folders: LoRA of linear layers, in safetensors",
            suffixes=("/",),
        ),
        AdapterRegistration(
            "gguf", lambda path, config, settings: GGUFAdapter(path, config), "llama.cpp's files", suffixes=(".gguf",)
        ),
    ]


@hookimpl
def infer_weight_formats() -> list[WeightFormatRegistration]:
    return [
        _format(
            "compressed_tensors",
            CompressedTensors.method,
            CompressedTensors,
            "compressed-tensors: int4, int8 (W8A8, too) and fp8",
        ),
        _format("awq", Awq.method, Awq, "AWQ: int4 in the layout gemm"),
        _format("gptq", Gptq.method, Gptq, "GPTQ: int4 and int8"),
        _format("fp8", Fp8.method, Fp8, "fp8 with a scale per block or tensor, as plain weights in memory"),
        _format("mxfp4", Mxfp4.method, Mxfp4, "MXFP4 as gpt-oss stores its experts"),
        _format(
            "gguf", "gguf", GGUFFormat, "the blocks of llama.cpp's files: Q4_0 to Q8_0, Q4_K to Q6_K, MXFP4 and others"
        ),
    ]
