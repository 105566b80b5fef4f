"""The rules by which models are loaded, and what they are loaded on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Engine(Protocol):
    """A process that serves a model."""

    @property
    def url(self) -> str: ...
    async def wait(self) -> int:
        """Until it has ended. Returns its exit code."""
        ...

    async def healthy(self) -> bool:
        """Whether it says so, within a few seconds."""
        ...

    async def end(self, drain_s: float) -> None:
        """Have it end: kill it if it has not after some seconds. Returns when it has ended."""
        ...


class Machine(Protocol):
    """What models are loaded on."""

    async def size(self, name: str) -> Mapping[str, Any]:
        """What is known of a model before it is loaded; ``bytes`` are those that it takes. Raises InferError."""
        ...

    async def start(self, name: str) -> Engine:
        """Load a model. Raises InferError. Whatever else ends it, no process is left."""
        ...

    def expect(self, name: str) -> None:
        """The model is loaded once others have ended, unless something else happens: what takes none of their memory
        may begin."""
        ...

    def may_spare(self, room: bool) -> None:
        """Whether a process that waits for a model may begin. One that is there waits on, and is the next model's."""
        ...


@dataclass(frozen=True)
class Rules:
    """How a model is kept, and what limits all of them."""

    memory: int
    keep_alive_s: Mapping[str, float]
    """By model, the default; math.inf for ever."""
    pinned: frozenset[str] = frozenset()
    max_waiting: int = 256
    load_timeout_s: float = 600.0
    stuck_timeout_s: float = 60.0
    spare_bytes: float = math.inf
    """What a process takes that waits for a model; math.inf if there is to be none."""
    sizing_bytes: int = 0
    """What a process takes that does the arithmetic. One at a time is beside ``memory``."""
    health_s: float = 1.0
    """How often a process is asked whether it is healthy."""
    backoff_s: float = 1.0
    """How long a model that ended by itself is left alone, unless somebody asks for it: twice as long each time."""
