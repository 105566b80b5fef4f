"""The console in front of several models: the page chooses among them. It wakes none; what it asks a model does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from infer.errors import EngineDeadError
from infer_router.ingress import Ingress
from infer_router.loader import Loader
from infer_router.outline import Outgoing
from infer_router.plan import Plan
from infer_server.http.keys import Keys

ASKED_S = 5.0
"""How often it is seen whether who watches is still let in."""
Sent = Callable[[web.Request, str, Outgoing], Awaitable[web.StreamResponse]]


class Console:
    """What the page is told of the models."""

    def __init__(self, plan: Plan, loader: Loader, ingresses: Mapping[str, Ingress], keys: Keys, sent: Sent) -> None:
        """``sent`` answers a request by a model that is loaded."""
        self._plan, self._loader, self._ingresses, self._keys, self._sent = plan, loader, ingresses, keys, sent

    async def server(self, http: web.Request) -> web.Response:
        """What there is to know of the model that the page has chosen: by itself if it is loaded."""
        name, states = self._chosen(http), self._loader.status()
        about = states[name]["about"] or {}
        own = await self._own(name) if states[name]["state"] == "loaded" else None
        models = [{"name": each, "state": status["state"]} for each, status in states.items()]
        told: dict[str, Any] = {"max_seq_len": about.get("max_model_len"), "sampling": {}} if own is None else own
        told |= {"model": name, "models": models, "loaded": states[name]["state"] == "loaded", "keys": bool(self._keys)}
        return web.json_response(told, headers={"Cache-Control": "no-store"})

    async def steps(self, http: web.Request) -> web.StreamResponse:
        """The steps of its engine."""
        name = self._chosen(http)
        if not self._ingresses[name].fleet.urls:
            raise EngineDeadError(f"{name!r} is not loaded: it is when it is asked something.")
        sending = asyncio.ensure_future(self._sent(http, name, Outgoing()))
        try:
            while not (await asyncio.wait((sending,), timeout=ASKED_S))[0]:
                if self._keys and not self._keys.admit(http) and http.transport is not None:
                    http.transport.close()  # its session has ended
            return await sending
        finally:
            sending.cancel()

    def _chosen(self, http: web.Request) -> str:
        """The model that the page names; if it names none that is served, the one that was used last."""
        named = self._plan.meant(model) if (model := http.query.get("model")) else None
        return named or self._loader.latest() or next(iter(self._plan.engines))

    async def _own(self, name: str) -> dict[str, Any] | None:
        """What its process says; None if it does not."""
        said = await self._ingresses[name].said("/console/api/server")
        return next((json.loads(text) for _, text in said if text), None)
