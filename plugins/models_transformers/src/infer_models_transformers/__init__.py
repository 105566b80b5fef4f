"""A family for all decoder-only language models of transformers that no other family knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer import hookimpl
from infer.contracts.model import ModelContext, ModelProtocol, ModelRegistration

INFER_PLUGIN_API = 2
PRIORITY = -100
"""Below that of every family that names the architectures that it knows."""


def _make(config: Mapping[str, Any], context: ModelContext, settings: Any) -> ModelProtocol:
    from infer_models_transformers.model import TransformersModel  # transformers takes seconds to import

    return TransformersModel(config, context)


@hookimpl
def infer_models() -> list[ModelRegistration]:
    return [
        ModelRegistration(
            "transformers",
            _make,
            "what transformers' own modules can run through its attention interface; slower than a family of infer's",
            priority=PRIORITY,
            architectures=("*",),
        )
    ]
