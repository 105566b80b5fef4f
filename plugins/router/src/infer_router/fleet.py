"""The replicas that an ingress knows, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infer_router.router import Router


@dataclass
class Fleet:
    """The replicas, by name, and the router that chooses among them. Somebody calls ``update`` when they change, and
    ``poll`` asks them how they are."""

    router: Router = field(default_factory=Router)
    key: str | None = None
    """What replicas want to be shown."""
    urls: dict[str, str] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def update(self, table: Mapping[str, Mapping[str, Any]]) -> None:
        """``table`` has every replica's ``url`` and whether it is ``draining``."""
        for name in [*self.router]:
            if name not in table:
                self.router.leave(name)
                self.urls.pop(name)
        for name, entry in table.items():
            new = name not in self.router
            self.urls[name] = str(entry["url"])
            self.router.join(name)
            if entry.get("draining"):
                self.draining.add(name)
                self.router.take(name, False)
            elif new:
                self.router.take(name, True)
        self.draining &= table.keys()
        self._wake()

    def suspect(self, name: str) -> None:
        """Send it nothing until it has answered."""
        if name in self.router:
            self.router.take(name, False)

    def report(self, name: str, state: Mapping[str, Any]) -> None:
        """What a replica says of itself."""
        if name not in self.router:
            return
        self.router.report(name, int(state["open"]))
        self.router.holds(name, state.get("held", ()))
        self.router.forgets(name, state.get("forgotten", ()))
        taking = bool(state["taking"]) and name not in self.draining
        if taking != self.router.taking(name):
            self.router.take(name, taking)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait until something changes."""
        await self._changed.wait()
