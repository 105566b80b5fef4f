"""The ways in which published checkpoints store quantised weights."""

from __future__ import annotations

from infer import hookimpl
from infer.hookspecs import ContainerRegistration, WeightFormatRegistration
from infer_formats.gguf import GGUF, GGUFFormat

INFER_PLUGIN_API = 1


@hookimpl
def infer_containers() -> list[ContainerRegistration]:
    return [
        ContainerRegistration(
            "gguf", lambda path, settings: GGUF(path), "llama.cpp's files, with all in one", suffixes=(".gguf",)
        )
    ]


@hookimpl
def infer_weight_formats() -> list[WeightFormatRegistration]:
    return [
        WeightFormatRegistration(
            "gguf", lambda config, files, settings: GGUFFormat(config, files), "GGUF's blocks", methods=("gguf",)
        )
    ]
