"""The APIs that coding agents speak: OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, SecretStr

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory

if TYPE_CHECKING:
    from infer.server.service import Service

INFER_PLUGIN_API = 2


class AgentsSettings(BaseModel, extra="forbid"):
    key: SecretStr | None = Field(
        None,
        description="what seals reasoning that clients send back; the same for all servers that continue each other's "
        "conversations; none for a key of this machine's own",
    )
    billing_header: bool = Field(
        False,
        description="whether prompts keep Claude Code's system block x-anthropic-billing-header, which differs in "
        "every request, so that nothing behind it is found in the cache",
    )


def _routes(service: Service, settings: AgentsSettings, /) -> Sequence[Route]:
    from infer_agents.routes import routes  # imported here, so that other commands need not wait for the server's part

    return routes(service, settings)


@hookimpl
def infer_routes() -> list[Registration[RoutesFactory]]:
    return [Registration("agents", _routes, "POST /v1/responses and /v1/messages", AgentsSettings)]
