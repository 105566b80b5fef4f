"""How much memory a model will take: the arithmetic of ``infer doctor``, in a process of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.assemble.blueprint import Blueprint

PROCESS_BYTES = 1 << 29
"""What a process takes besides weights and cache: an interpreter, torch's libraries, tokenizer and tables."""


def free(settings: Any) -> int:
    """The memory that is free now where the model would run."""
    from infer.assemble.blueprint import free_memory

    return free_memory(settings)


def reckon(settings: Any, plugins: Any, memory: int) -> dict[str, Any]:
    """What is known of a model without its weights. ``bytes`` are the most that its process takes of ``memory``, of
    which nothing else takes a part, while it loads and then; ``tokenizer`` is the file of a small one. Raises
    InferError."""
    from infer.assemble.blueprint import Blueprint, bound_memory

    most = max(0, memory - PROCESS_BYTES)
    bound_memory(most, most)
    with tempfile.TemporaryDirectory(prefix="infer-sizes-") as outlines:
        blueprint = Blueprint(settings, plugins, outlines=Path(outlines))
        found, tokenizer = told(blueprint, most), blueprint.small_tokenizer
        lasting = tokenizer is not None and not tokenizer.is_relative_to(outlines)
        return {**found, "tokenizer": str(tokenizer.resolve()) if tokenizer is not None and lasting else None}


def told(blueprint: Blueprint, most: int) -> dict[str, Any]:
    """The same of a blueprint, whose model may take ``most`` bytes besides those of its process. Raises InferError."""
    settings = blueprint.settings
    blueprint.plugins.check_names(settings)
    taken = blueprint.taken(most)
    return {
        "bytes": taken.nbytes + PROCESS_BYTES,
        "weights_bytes": taken.weights,
        "max_model_len": taken.positions,
        "quantization": settings.model.quantization or blueprint.checkpoint.quant_method or None,
        "format": blueprint.chosen("container").name,
    }
