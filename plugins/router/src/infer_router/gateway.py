"""One address for several models: which one a request is for, and what is said of all of them.

Only what computes wakes a model: a POST whose body names one. All else is answered here, or by a model that is loaded,
and changes nothing about which models are."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic import model_validator

from infer.contracts.sections import ServerSettings
from infer.errors import EngineDeadError, RequestError
from infer_router.console import Console
from infer_router.durations import MOST_S, keep_alive_s
from infer_router.exchange import Another
from infer_router.fleet import Fleet
from infer_router.ingress import CONNECT_S, MOST_SILENT, SAMPLING, STATE, Ingress, application, merge_metrics
from infer_router.loader import Loader
from infer_router.outline import Outgoing, Outline, outgoing, outline_of
from infer_router.plan import Plan
from infer_server.http.access import Inside
from infer_server.http.bodies import arrived, unpacked
from infer_server.http.body import Body
from infer_server.http.errors import NotFoundError, expected
from infer_server.http.keys import Keys
from infer_server.http.listing import VERSION, ListedModel, listed, page
from infer_server.http.wire import LATEST, OLLAMA_ROOT, OLLAMA_VERSION

T = TypeVar("T", bound=Body)
FOREVER = datetime(2318, 1, 1, tzinfo=UTC)
"""When Ollama says that a model expires that stays."""
OLLAMA = "/api/"
SHOWN, PULLED = "/api/show", "/api/pull"
CHAT = "/api/chat"
LOADING = ("/api/generate", CHAT)
"""Routes of which an empty request loads a model or lets it go."""
HIDDEN = ("/ray",)
INFLATED = frozenset({"content-encoding"})
"""What is not true any more of a body that has been read."""


class Asked(Outline):
    """What a server of several models reads of a body. It has no ``chain``: a model has one process, so that there is
    nothing to choose, and no prompt to remember."""

    model: str | None = None
    keep_alive: float | str | None = None
    empty: bool = False
    """Whether there is nothing to answer: no prompt, no messages."""

    @model_validator(mode="before")
    @classmethod
    def _outlined(cls, data: Any) -> Any:
        name = data.get("model", data.get("name"))
        if not isinstance(name, str | None):
            raise ValueError(f"model has to be the name of a model, not {type(name).__name__}")
        kept = data.get("keep_alive")
        if isinstance(kept, int) and not isinstance(kept, bool) and abs(kept) > MOST_S:
            kept = math.inf  # an integer of any length, which is no float
        elif not isinstance(kept, int | float | str | None) or isinstance(kept, bool):
            kept = ""  # nothing that it could be
        empty = not (data.get("prompt") or data.get("messages"))
        return outline_of(data) | {"model": name, "keep_alive": kept, "empty": empty}


class Gateway:
    """Handles all requests of a server of several models. Use it in one event loop, as ``async with``."""

    def __init__(self, plan: Plan, server: ServerSettings, loader: Loader, *, poll_s: float = 1.0) -> None:
        self._plan, self._server, self._loader, self._poll_s = plan, server, loader, poll_s
        self.keys = Keys(server.api_keys)
        patience_s = plan.router.stuck_timeout_s + MOST_SILENT * (poll_s + CONNECT_S)
        self._ingresses = {
            name: Ingress(Fleet(key=plan.key), server, poll_s=poll_s, patience_s=patience_s) for name in plan.engines
        }
        first = next(iter(self._ingresses.values()))
        self._reader, self._budget = first.reader, first.budget
        for each in self._ingresses.values():
            each.reader.expect(Asked)
        self._starts = dict.fromkeys(plan.engines, 0)
        self._since = datetime.now(UTC)
        self._inside = Inside()
        self.closing = False
        """Whether connections end with the answer that is under way on them, and new requests are refused."""

    def changed(self, name: str, url: str | None) -> None:
        """A model's process can be asked there, or no more."""
        self._starts[name] += 1
        self._ingresses[name].fleet.update({} if url is None else {f"{name}-{self._starts[name]}": {"url": url}})

    async def __aenter__(self) -> Gateway:
        for each in self._ingresses.values():
            await each.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(each.__aexit__(*exc) for each in self._ingresses.values()))

    async def working(self, name: str) -> int:
        """How many requests a model's process has, those in the background among them; 1 if it does not say."""
        said = await self._ingresses[name].said(STATE)
        return sum(json.loads(text)["open"] if text else 1 for _, text in said)

    async def drain(self) -> None:
        """Take no more requests, and wait until those that are here have been answered and none is left in the
        background."""
        self.closing = True
        await self._inside.leave()
        while any(await asyncio.gather(*map(self.working, self._ingresses))):
            await asyncio.sleep(self._poll_s)

    def end(self) -> None:
        """Have the answers that are under way end with an error each. Their models are not loaded any more."""
        for each in self._ingresses.values():
            each.end()

    def app(self) -> web.Application:
        app, opened = application(self._server, self._end_connection, self.keys)
        app.middlewares.append(self._inside.middleware)
        for path, handler, free in (
            ("/health", self._health, True),
            ("/ready", self._ready, True),
            ("/", self._root, True),
            ("/metrics", self._metrics, False),
            ("/v1/models", self._models, False),
            ("/v1/models/{model:.+}", self._model, False),
            ("/api/version", self._version, False),
            ("/api/tags", self._tags, False),
            ("/api/ps", self._ps, False),
        ):
            for method in ("GET", "HEAD"):
                route = app.router.add_route(method, path, handler)
                if free:
                    opened.add(route)
        if self._plan.console:
            from infer_console.page import page as console_page  # whose settings the plan has read

            console = Console(self._plan, self._loader, self._ingresses, self.keys, self._sent)
            for each in console_page(self, console.server, console.steps):
                route = app.router.add_route(each.method, each.path, each.handler)
                if each.open:
                    opened.add(route)
        for path in HIDDEN:
            app.router.add_route("*", path + "{rest:(/.*)?}", self._hidden)
        app.router.add_route("*", "/{path:.*}", self._handle, expect_handler=expected)
        return app

    # What is said of the whole

    async def _health(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        status = "draining" if self.closing else "ready"
        return web.json_response({"status": status}, status=503 if self.closing else 200)

    async def _root(self, http: web.Request) -> web.Response:
        return web.Response(text=OLLAMA_ROOT)

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": OLLAMA_VERSION})

    async def _hidden(self, http: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def _end_connection(self, http: web.Request, response: web.StreamResponse) -> None:
        if self.closing:
            response.force_close()
            response.headers["Connection"] = "close"

    def _listed(self) -> list[tuple[str, dict[str, Any]]]:
        """Every name that clients may use, with its model's status."""
        status = self._loader.status()
        return [(name, status[model]) for name, model in self._plan.names.items() if name != "*"]

    def _entry(self, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        about = status["about"] or {}
        return {
            "id": name,
            "object": "model",
            "created": int(self._since.timestamp()),
            "owned_by": "infer",
            "max_model_len": about.get("max_model_len"),
            "quantization": about.get("quantization"),
            "state": status["state"],
            "size_bytes": status["size_bytes"],
            "expires_in_s": status["expires_in_s"],
            "pinned": status["pinned"],
            "open": status["open"],
            "waiting": status["waiting"],
            "loads": status["loads"],
            "retry_in_s": status["retry_in_s"],
            "problem": status["problem"],
        }

    async def _models(self, http: web.Request) -> web.Response:
        if VERSION in http.headers:
            return web.json_response(page(http, [_as_listed(*each) for each in self._listed()]))
        data = [self._entry(name, status) for name, status in self._listed()]
        return web.json_response({"object": "list", "data": data})

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        model = self._meant(name)
        status = self._loader.status()[model]
        return web.json_response(_as_listed(name, status) if VERSION in http.headers else self._entry(name, status))

    def _tagged(self, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        about, tagged = status["about"] or {}, name if ":" in name.rpartition("/")[2] else name + LATEST
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": _written(self._since),
            "size": status["size_bytes"] or 0,
            "digest": hashlib.sha256(status["name"].encode()).hexdigest(),
            "details": {
                "parent_model": "",
                "format": about.get("format", ""),
                "family": "",
                "families": [],
                "parameter_size": "",
                "quantization_level": about.get("quantization") or "",
            },
        }

    async def _tags(self, http: web.Request) -> web.Response:
        return web.json_response({"models": [self._tagged(*each) for each in self._listed()]})

    async def _ps(self, http: web.Request) -> web.Response:
        running = []
        for name, status in self._listed():
            if status["state"] == "loaded":
                left = status["expires_in_s"]
                expires = FOREVER if left is None else datetime.now(UTC) + timedelta(seconds=left)
                more = {"expires_at": _written(expires), "size_vram": 0}
                more["context_length"] = (status["about"] or {}).get("max_model_len") or 0
                running.append(self._tagged(name, status) | more)
        return web.json_response({"models": running})

    async def _metrics(self, http: web.Request) -> web.Response:
        """The metrics of the models that are loaded, each with the label ``replica``, and those of all."""
        prefix = "vllm:models" if self._server.metrics_names == "vllm" else "infer_models"
        lines = []
        statuses = self._loader.status().values()
        for name, kind, text, key in (
            ("loaded", "gauge", "Whether the model is loaded.", None),
            ("open", "gauge", "Requests that the model answers.", "open"),
            ("waiting", "gauge", "Requests that wait for the model to be loaded.", "waiting"),
            ("loads_total", "counter", "How often its loading was begun.", "loads"),
        ):
            lines += [f"# HELP {prefix}_{name} {text}", f"# TYPE {prefix}_{name} {kind}"]
            for each in statuses:
                value = int(each["state"] == "loaded") if key is None else each[key]
                lines.append(f'{prefix}_{name}{{model="{_escaped(each["name"])}"}} {value}')
        texts = await asyncio.gather(*(each.said("/metrics") for each in self._ingresses.values()))
        merged = await asyncio.to_thread(merge_metrics, [text for each in texts for text in each])
        return web.Response(text="\n".join(lines) + "\n" + merged, content_type="text/plain", charset="utf-8")

    # One request

    def _meant(self, name: str) -> str:
        """The model of a name that a client uses. Raises NotFoundError."""
        if (model := self._plan.meant(name)) is None:
            there = ", ".join(repr(each) for each in self._plan.names)
            raise NotFoundError(
                f"model {name[:200]!r} not found: it is not served here; this server has {there}.",
                param="model",
                code="model_not_found",
            )
        return model

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        if not http.rel_url.raw_path.startswith("/"):
            raise web.HTTPNotFound
        with self._budget.body() as grow:
            body = None
            if http.can_read_body:
                body = await self._body(http, self._server.max_body_bytes, grow)
            if http.method != "POST" or not body:
                return await self._passed(http, body)
            asked = await self._reader(body, Asked)
            return await self._asked(http, body, asked)

    async def _body(self, http: web.Request, most: int, grow: Callable[[int], None]) -> bytes:
        body = await arrived(http, most, grow, self._server.body_timeout_s)
        return await unpacked(http, body, most, grow)

    async def read(self, http: web.Request, model: type[T], most: int) -> T:
        """Read and check a body that is for no model. Raises RequestError or an aiohttp HTTP error."""
        with self._budget.body() as grow:
            return await self._reader(await self._body(http, most, grow), model)

    async def _asked(self, http: web.Request, body: bytes, asked: Asked) -> web.StreamResponse:
        if asked.model is None:
            if len(self._plan.engines) > 1:
                there = ", ".join(repr(each) for each in self._plan.names)
                raise RequestError(f"model is missing: this server has {there}.", param="model")
            name = next(iter(self._plan.engines))
        else:
            name = self._meant(asked.model)
        keep = keep_alive_s(asked.keep_alive) if http.path.startswith(OLLAMA) else None
        if http.path == PULLED:
            return web.json_response({"status": "success"})
        if http.path == SHOWN:
            return await self._shown(http, body, name)
        if http.path in LOADING and asked.empty and keep == 0:
            self._loader.keep(name, 0.0)
            empty = {"message": {"role": "assistant", "content": ""}} if http.path == CHAT else {"response": ""}
            said = {"model": asked.model, "created_at": _written(datetime.now(UTC))}
            return web.json_response(said | empty | {"done": True, "done_reason": "unload"})
        async with self._loader.use(name, keep):
            what = outgoing(body, asked, samples=http.path in SAMPLING)
            return await self._sent(http, name, what, partial(self._again, name, keep))

    async def _again(self, name: str, keep: float | None) -> None:
        """Have the next process of a model that a request has used."""
        async with self._loader.use(name, keep, again=True):
            pass

    async def _sent(
        self, http: web.Request, name: str, what: Outgoing, another: Another | None = None
    ) -> web.StreamResponse:
        return await self._ingresses[name].passed(http, what, INFLATED, another=another)

    async def _passed(self, http: web.Request, body: bytes | None) -> web.StreamResponse:
        """What names no model is for one that is there."""
        name = self._loader.latest()
        if name is None:
            raise EngineDeadError("No model is loaded that could answer this; ask one of them something first.")
        return await self._sent(http, name, Outgoing(body, seeded=True))

    async def _shown(self, http: web.Request, body: bytes, name: str) -> web.StreamResponse:
        """What is known of a model: by itself if it is loaded."""
        status = self._loader.status()[name]
        if status["state"] == "loaded":
            return await self._sent(http, name, Outgoing(body))
        info: dict[str, Any] = {"general.architecture": "infer", "general.basename": name}
        if status["about"]:
            info["infer.context_length"] = status["about"]["max_model_len"]
        return web.json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": self._tagged(name, status)["details"],
                "model_info": info,
                "capabilities": ["completion"],
                "modified_at": _written(self._since),
            }
        )


def _as_listed(name: str, status: Mapping[str, Any]) -> ListedModel:
    return listed(name, (status["about"] or {}).get("max_model_len"))


def _written(time: datetime) -> str:
    """As RFC 3339 has it."""
    return time.isoformat().replace("+00:00", "Z")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
