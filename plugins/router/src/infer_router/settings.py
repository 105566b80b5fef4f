"""The settings of several models on one machine, ``[server.router]``."""

from __future__ import annotations

from pydantic import BaseModel, Field


class RouterSettings(BaseModel, extra="forbid"):
    memory_gib: float | None = Field(
        None, gt=0, description="memory that all loaded models may take together; none: what is free at the start"
    )
    keep_alive_s: float = Field(
        300.0, ge=-1, le=1e9, description="seconds until a model that nobody asks is let go; -1: never"
    )
    spare: bool = Field(
        True,
        description="keep a process for the next model, which loads sooner then, while memory has room for it",
    )
    max_waiting: int = Field(256, ge=0, description="requests that may wait for models; the next one is answered 503")
    load_timeout_s: float = Field(600.0, gt=0, description="seconds that a model may take to load")
    stuck_timeout_s: float = Field(
        60.0, gt=0, description="seconds of failing /health after which a model's process is replaced"
    )
