"""Ollama's routes about models: one is there, and it stays."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiohttp import web
from pydantic_core import to_json
from typing_extensions import TypedDict

from infer.contracts.server import Route
from infer.errors import RequestError
from infer_ollama.bodies import PullBody, ShowBody
from infer_server.events import Json
from infer_server.http.body import Body
from infer_server.http.errors import NotFoundError
from infer_server.http.wire import LATEST, OLLAMA_ROOT, OLLAMA_VERSION, Ollama

if TYPE_CHECKING:
    from infer_server.service import Service

FOREVER = "2318-01-01T00:00:00Z"
"""When Ollama says that a model expires that stays."""
T = TypeVar("T", bound=Body)


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class RunningModel(Model):
    expires_at: str
    size_vram: int
    context_length: int


class ModelList(TypedDict):
    models: list[Model]


class RunningModels(TypedDict):
    models: list[RunningModel]


class Version(TypedDict):
    version: str


class Shown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullStatus(TypedDict):
    status: str


class Nothing(TypedDict):
    """These routes only ever answer with an error."""


class Asked(Protocol):
    """A body that names a model."""

    @property
    def asked(self) -> str: ...


def check_served(service: Service, http: web.Request, body: Asked) -> None:
    """Have a request answered by the model, or by its adapter, that the body names. Raises NotFoundError, in Ollama's
    words, if there is none."""
    if not service.choose(http, body.asked):
        raise NotFoundError(f"model {body.asked[:200]!r} not found", code="model_not_found")


def now() -> str:
    """The time, as RFC 3339 has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def listed(name: str) -> str:
    """A model's name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def routes(service: Service) -> list[Route]:
    own = Models(service)
    written = Ollama()
    made = [
        Route("GET", "/", own.root, "Says that Ollama is running, which clients ask first.", None, open=True),
        Route("GET", "/api/version", own.version, "The version of Ollama's API.", Version),
        Route("GET", "/api/tags", own.tags, "The names of the model that is served.", ModelList),
        Route("GET", "/api/ps", own.ps, "The model that is served.", RunningModels),
        Route("POST", "/api/show", own.show, "What is known of the model.", Shown, ShowBody, wire_format=written),
        Route(
            *("POST", "/api/pull", own.pull, "Ollama's download; succeeds for the model that is there."),
            *(PullStatus, PullBody, PullStatus),
            wire_format=written,
        ),
    ]
    for method, path in (
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/{digest}"),
    ):
        made.append(Route(method, path, refused, "Always refused.", Nothing, wire_format=written))
    return made


async def refused(http: web.Request) -> web.Response:
    raise NotFoundError(
        f"infer does not change models, so {http.method} {http.path[:80]} is not supported; name the model that is to "
        "be served with `infer serve`."
    )


class Models:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        served = service.served
        self._since = now()
        self._details: Details = {
            "parent_model": "",
            "format": "gguf" if str(service.settings.model.path).endswith(".gguf") else "safetensors",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": served.quantization or "",
        }
        self._digest = hashlib.sha256(served.name.encode()).hexdigest()

    def _models(self) -> list[Model]:
        return [
            {
                "name": listed(name),
                "model": listed(name),
                "modified_at": self._since,
                "size": 0,
                "digest": self._digest,
                "details": self._details,
            }
            for name in self._service.names()
        ]

    async def root(self, http: web.Request) -> web.Response:
        return web.Response(text=OLLAMA_ROOT)

    async def version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": OLLAMA_VERSION})

    async def tags(self, http: web.Request) -> web.Response:
        return web.json_response({"models": self._models()})

    async def ps(self, http: web.Request) -> web.Response:
        loaded = {"expires_at": FOREVER, "size_vram": 0, "context_length": self._service.served.max_seq_len}
        return web.json_response({"models": [{**model, **loaded} for model in self._models()]})

    async def show(self, http: web.Request) -> web.StreamResponse:
        service, served = self._service, self._service.served
        body = await service.read(http, ShowBody)
        check_served(service, http, body)
        capabilities = ["completion"]
        if service.conversation.tool_format is not None:
            capabilities.append("tools")
        if served.reasoning is not None:
            capabilities.append("thinking")
        if served.pooling in ("last", "mean"):
            capabilities.append("embedding")
        info: Json = {
            "general.architecture": "infer",
            "general.basename": served.name,
            "infer.context_length": served.max_seq_len,
            "infer.vocab_size": served.vocab_size,
        }
        if served.hidden_size is not None:
            info["infer.embedding_length"] = served.hidden_size
        answer: Json = {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in served.sampling.items()),
            "template": served.template.source if served.template is not None else "",
            "details": self._details,
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": self._since,
        }
        return await service.answer(http, answer)

    async def pull(self, http: web.Request) -> web.Response:
        body = await self._service.read(http, PullBody)
        if not self._service.is_model(body.asked):
            raise RequestError(
                f"infer pulls no models: this server has {self._service.served.name!r} alone; start another one with "
                f"`infer serve` for {body.asked[:200]!r}."
            )
        if not body.stream:
            return web.json_response({"status": "success"})
        lines = [to_json({"status": status}) + b"\n" for status in ("pulling manifest", "success")]
        return web.Response(body=b"".join(lines), content_type=Ollama.CONTENT_TYPE)
