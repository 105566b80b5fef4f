"""infer: an LLM inference engine whose every backend is a plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.contracts.params import SamplingParams
    from infer.contracts.registration import PLUGIN_API, hookimpl
    from infer.contracts.request import Event, Request, TokenLogprobs
    from infer.errors import (
        CheckpointError,
        EngineDeadError,
        InferError,
        PluginError,
        QueueFullError,
        RequestError,
        SettingsError,
    )
    from infer.llm import LLM, Completion

__all__ = [
    "LLM",
    "PLUGIN_API",
    "CheckpointError",
    "Completion",
    "EngineDeadError",
    "Event",
    "InferError",
    "PluginError",
    "QueueFullError",
    "Request",
    "RequestError",
    "SamplingParams",
    "SettingsError",
    "TokenLogprobs",
    "hookimpl",
]
PLACES = {
    "infer.contracts.params": ("SamplingParams",),
    "infer.contracts.registration": ("PLUGIN_API", "hookimpl"),
    "infer.contracts.request": ("Event", "Request", "TokenLogprobs"),
    "infer.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "infer.llm": ("LLM", "Completion"),
}


def __getattr__(name: str) -> Any:
    """Import what a name stands for only when it is used: plugins import this module, and the engine imports plugins. A
    list of commands needs nothing of it."""
    for place, names in PLACES.items():
        if name in names:
            if place == "infer.llm":
                import infer.openmp  # noqa: F401 (before torch)
            return getattr(import_module(place), name)
    raise AttributeError(f"module 'infer' has no attribute {name!r}")
