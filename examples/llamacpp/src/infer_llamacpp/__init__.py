"""Two routes of llama.cpp's server, for clients that ask for them: GET /props and POST /apply-template."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from aiohttp import web
from typing_extensions import TypedDict

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer_server.endpoints.chat_completions import ChatRequest

if TYPE_CHECKING:
    from infer_server.service import Service

INFER_PLUGIN_API = 2


class Generation(TypedDict):
    n_ctx: int
    params: dict[str, Any]


class Props(TypedDict):
    default_generation_settings: Generation
    total_slots: int
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class Applied(TypedDict):
    prompt: str


class LlamaCpp:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def props(self, http: web.Request) -> web.StreamResponse:
        served, settings = self._service.served, self._service.settings
        params = served.defaulted().model_dump(include={"temperature", "top_k", "top_p", "min_p", "seed", "max_tokens"})
        template = served.template
        tokens = {} if template is None else template.tokens
        found = Props(
            default_generation_settings={"n_ctx": served.max_seq_len, "params": params},
            total_slots=settings.engine.max_batch_size,
            model_path=str(settings.model.path),
            chat_template="" if template is None else template.source,
            bos_token=tokens.get("bos_token", ""),
            eos_token=tokens.get("eos_token", ""),
            build_info=f"infer {version('infer-core')}",
        )
        return await self._service.answer(http, dict(found))

    async def apply(self, http: web.Request) -> web.StreamResponse:
        """The prompt of a chat's messages. Other fields of a chat's body are taken, too, as llama.cpp takes them."""
        body = await self._service.read(http, ChatRequest)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        prompt = await self._service.conversation.prompt(body, tools)
        return await self._service.answer(http, {"prompt": prompt})


def _routes(service: Service, settings: object) -> Sequence[Route]:
    own = LlamaCpp(service)
    return [
        Route("GET", "/props", own.props, "What is served, as llama.cpp says it.", Props),
        Route("POST", "/apply-template", own.apply, "A chat's messages as a prompt.", Applied, ChatRequest),
    ]


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("llamacpp", _routes, "llama.cpp's GET /props and POST /apply-template")]
