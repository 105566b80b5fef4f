"""Reading config.json: every error is one sentence that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from infer.errors import CheckpointError, first_fault

C = TypeVar("C", bound=BaseModel)
LARGEST = 2**31 - 1
"""The largest integer that config.json may have for a model's fields; products of two such fit into 64 bits."""
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LayerType = Literal["full_attention", "sliding_attention"]
HiddenAct = Literal["silu", "gelu_pytorch_tanh"]
"""The activations that config.json may name."""


def layer_windows(layer_types: Sequence[LayerType], window: int | None, num_layers: int) -> list[int | None]:
    """Each layer's sliding window; None for full attention. Raises CheckpointError if the arguments contradict each
    other."""
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(layer_types)} entries, but num_hidden_layers is {num_layers}."
        )
    if window is None and "sliding_attention" in layer_types:
        raise CheckpointError("config.json: layer_types has 'sliding_attention', but there is no sliding_window.")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def read_config(cls: type[C], values: Mapping[str, Any]) -> C:
    """Validate config.json's fields. Raises CheckpointError that names the first bad field."""
    try:
        made = cls.model_validate(values)
    except ValidationError as error:
        fault = first_fault(error)
        place = "".join(f"{key}: " for key in fault.path)
        got = "" if fault.kind == "missing" or not place else f" (it is {fault.value!r})"
        raise CheckpointError(f"config.json: {place}{fault.text}{got}.") from None
    for name, value in made:
        if isinstance(value, int) and value > LARGEST:
            raise CheckpointError(f"config.json: {name}: Input should be at most {LARGEST} (it is {value}).")
    return made


def config_table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The table at ``key``; empty if it is absent or null. Raises CheckpointError if it is not a table."""
    table = values.get(key)
    if table is not None and not isinstance(table, dict):
        raise CheckpointError(f"config.json: {key} is {table!r}, which is not a table.")
    return table or {}
