"""Requests of which one body asks for many: texts to embed, documents to rank."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, Request
from infer.errors import RequestError
from infer_server.events import LONG_CHARS, Json, RequestFields
from infer_server.http.access import CALLER

if TYPE_CHECKING:
    from infer_server.service import Service

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs together."""
Input = TypeVar("Input")


def check_count(count: int, field: str) -> None:
    """Raises RequestError if there are too many inputs."""
    if count > MAX_INPUTS:
        raise RequestError(f"This has {count} inputs; at most {MAX_INPUTS} are allowed.", param=field)


async def make(
    service: Service,
    http: web.Request,
    inputs: Sequence[Input],
    prompt: Callable[[Input], Awaitable[str | Sequence[int]]],
    params: SamplingParams,
    fields: RequestFields,
    field: str,
    **how: Any,
) -> tuple[list[Request], Json]:
    """A request for each input, and their usage. ``prompt`` makes an input's prompt, when it is this one's turn: those
    of all inputs together may be a thousand times as long as the body. So only as many as run at a time are made
    before they are tokenized, and no further one beside a long one. ``how`` is passed to ``Service.requests``. Raises
    RequestError, about ``field`` if there are too many tokens."""
    made, size, tokens = list[Request](), at_once(service), 0
    left = deque(inputs)
    while left:
        await asyncio.sleep(0)  # short texts are tokenized here
        begin, prompts, length = len(made), list[str | Sequence[int]](), 0
        while left and len(prompts) < size and length <= LONG_CHARS:
            prompts.append(await prompt(left.popleft()))
            length += len(prompts[-1])
        how["prefix"] = f"{field}-{begin}"
        made += await service.requests(http, prompts, params, fields, **how)
        tokens += sum(len(request.prompt_token_ids) for request in made[begin:])
        if tokens > MAX_TOKENS:
            raise RequestError(f"The inputs have more than {MAX_TOKENS} tokens in all.", param=field)
    usage: Json = {"prompt_tokens": tokens, "total_tokens": tokens}
    http[CALLER].usage = usage
    return made, usage


def run(service: Service, requests: Sequence[Request]) -> AsyncGenerator[Event]:
    """The events of the requests, of which a few are open at a time, so that one body does not take all places."""
    return service.door.stream(*requests, most=at_once(service))


def at_once(service: Service) -> int:
    """How many of one body's requests may be open at a time."""
    return min(service.settings.engine.max_batch_size, service.settings.server.max_choices)
