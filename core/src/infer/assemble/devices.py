"""Which device a model runs on, and what the settings leave to it."""

from __future__ import annotations

import torch

from infer.contracts.sections import Settings
from infer.errors import SettingsError

GPU_STEP, GPU_CHUNK = 8192, 2048
"""``engine.max_tokens_per_step`` and ``engine.prefill_chunk_size`` on a GPU if the settings do not say: enough tokens
to keep it busy, and a bound on the memory that a pass takes."""


def choose_device(name: str) -> torch.device:
    """The device that ``model.device`` stands for. Raises SettingsError."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingsError('model.device is "cuda", but torch sees no GPU here; use "cpu" or "auto".')
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def for_device(settings: Settings, device: torch.device) -> Settings:
    """The settings with the device's defaults: on a GPU, longer chunks, and a limit on the tokens of a step."""
    engine, more = settings.engine, {"prefill_chunk_size": GPU_CHUNK}
    if device.type == "cpu" or not engine.use_chunked_prefill:
        return settings
    more["max_tokens_per_step"] = max(GPU_STEP, engine.max_batch_size)
    unset = {name: value for name, value in more.items() if name not in engine.model_fields_set}
    return settings.model_copy(update={"engine": engine.model_copy(update=unset)})
