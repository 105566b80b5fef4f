"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web
from pydantic import Field

from infer.contracts.server import Route
from infer.errors import CheckpointError, PluginError, RequestError
from infer_server.http.body import Body
from infer_server.http.errors import NotFoundError

if TYPE_CHECKING:
    from infer.assemble.adapters import LoadedAdapters
    from infer_server.service import Service

MAX_BODY_BYTES = 1 << 14
BASE = "The base's name; needed where several models are served."
NAME = r"[^\x00-\x1f\x7f]+"


class LoadRequest(Body):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256, pattern=f"^{NAME}$", description="The adapter's name.")
    lora_path: str = Field(
        min_length=1, max_length=4096, description="A folder or file within adapters.folder, from there on or in full."
    )
    model: str | None = Field(None, description=BASE)


class UnloadRequest(Body):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256, description="The adapter's name.")
    model: str | None = Field(None, description=BASE)


def routes(service: Service, settings: object) -> list[Route]:
    own = AdapterRoutes(service)
    return [
        Route("POST", "/v1/load_lora_adapter", own.load, "Load an adapter.", "text/plain", LoadRequest),
        Route("POST", "/v1/unload_lora_adapter", own.unload, "Let an adapter go.", "text/plain", UnloadRequest),
    ]


class AdapterRoutes:
    """The handlers, with what they share."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, http: web.Request) -> web.Response:
        """The adapter is read in a thread of its own, which ends with it: torch's operations would give a thread that
        stays a team of threads that the engine's has to share the processors with."""
        body = await self._service.read(http, LoadRequest, MAX_BODY_BYTES)
        adapters, path = self._adapters("lora_path"), self._place(body.lora_path)
        reader = ThreadPoolExecutor(1, "infer-adapter")
        try:
            await asyncio.get_running_loop().run_in_executor(reader, adapters.load, body.lora_name, path)
        except (CheckpointError, PluginError) as error:
            raise RequestError(str(error), param="lora_path") from error
        finally:
            reader.shutdown(wait=False)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, http: web.Request) -> web.Response:
        body = await self._service.read(http, UnloadRequest, MAX_BODY_BYTES)
        if self._adapters("lora_name").unload(body.lora_name) is None:
            raise NotFoundError(f"There is no adapter {body.lora_name!r}.", param="lora_name", code="model_not_found")
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _adapters(self, param: str) -> LoadedAdapters:
        """Raises RequestError if the server has none and loads none."""
        adapters = self._service.served.adapters
        if adapters is None:
            raise RequestError(
                "This server has no adapters; start it with adapters.load or adapters.folder.", param=param
            )
        return adapters

    def _place(self, named: str) -> Path:
        """The path that a client names. Raises RequestError if it is not within ``adapters.folder``."""
        if (folder := self._service.settings.adapters.folder) is None:
            raise RequestError(
                "This server loads adapters at its start only; set adapters.folder to load others.", param="lora_path"
            )
        try:
            within = Path(folder).resolve()
            path = (within / named).resolve()
        except (OSError, ValueError):  # of a null byte, or of links in a circle
            path = within = Path()
        if path == within or not path.is_relative_to(within):
            raise RequestError(f"lora_path {named!r} is not within adapters.folder.", param="lora_path")
        return path
