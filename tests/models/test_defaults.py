"""What a config.json leaves out is what ``transformers`` takes it to be.

Sizes that follow from others, such as the number of K/V heads, are not compared: tensors of other shapes are
refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers

import infer_models
from infer_layers import DecoderConfig

LACKING = {"DeltaConfig", "Eagle3Config", "HybridConfig", "LatentConfig"}
"""Configs that transformers does not have."""
DERIVED = ("auto", None)
"""Defaults that follow from other fields."""
OTHERWISE = {
    ("time_step_limit", "infinity is no JSON"),
    ("sliding_window", "None while use_sliding_window is False, as it is by default"),
}
"""Fields whose defaults are written otherwise, and why."""


def schemas(base: type[DecoderConfig] = DecoderConfig) -> Iterator[type[DecoderConfig]]:
    for schema in base.__subclasses__():
        if schema.__module__.startswith(f"{infer_models.__name__}."):
            yield schema
        yield from schemas(schema)


SCHEMAS = {schema.__name__: schema for schema in schemas()}


def theirs(name: str) -> dict[str, Any]:
    """The defaults of a config class of ``transformers``, of its text if it has more."""
    found = getattr(transformers, f"{name.removesuffix('Config')}TextConfig", None) or getattr(transformers, name)
    fields: dict[str, Any] = found().to_dict()
    return fields


@pytest.mark.parametrize("name", sorted({*SCHEMAS} - LACKING))
def test_defaults(name: str) -> None:
    expected, skipped = theirs(name), {field for field, _ in OTHERWISE}
    defaults = {
        field: about.get_default(call_default_factory=True, validated_data={})
        for field, about in SCHEMAS[name].model_fields.items()
        if field in expected and field not in skipped and not about.is_required()
    }
    known = {field: value for field, value in defaults.items() if value not in DERIVED}
    assert known == {field: expected[field] for field in known}
