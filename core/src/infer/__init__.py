"""infer: an LLM inference engine whose every backend is a plugin."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Import LLM and Completion only when they are used: plugins import this module, and the engine imports plugins."""
    if name in ("LLM", "Completion"):
        import infer.openmp  # noqa: F401 (before torch)
        from infer import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'infer' has no attribute {name!r}")
