"""What an ingress reads of a request's body: no more than it needs to choose a replica and to ask a second one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import model_validator

from infer.errors import InferError
from infer_router.prefixes import chain, prompt_bytes
from infer_server.http.bodies import Reader
from infer_server.http.body import Body

MOST_USER = 512


class Outline(Body):
    """A body, of which only this is kept. Large ones are read in a child process, since parsing holds the GIL."""

    stream: bool = False
    seeded: bool = False
    chain: tuple[int, ...] = ()
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _outlined(cls, data: Any) -> Any:
        salt = data.get("cache_salt")
        return outline_of(data) | {"chain": chain(prompt_bytes(data), salt if isinstance(salt, str) else "")}


def outline_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an ``Outline``, of a body's, but for the ``chain``: only who chooses among replicas needs that."""
    user = data.get("safety_identifier") or data.get("user")
    return {
        "stream": data.get("stream") is True,
        "seeded": data.get("seed") is not None,
        "user": user[:MOST_USER] if isinstance(user, str) else None,
    }


@dataclass(frozen=True)
class Outgoing:
    """A request as an ingress sends it on, as often as needed."""

    body: bytes | None = None
    chain: tuple[int, ...] = ()
    stream: bool = False
    seeded: bool = False
    """Whether another replica gives the same answer."""
    user: str | None = None
    """On whose behalf it is asked, for the access log."""


async def outlined(body: bytes, reader: Reader, *, samples: bool) -> Outgoing:
    """What there is to know of a body. If it is streamed and has no seed, it gets one, where the endpoint ``samples``:
    without one, the engine would choose a random one just so. What cannot be read is sent on as it is; the replica has
    the words for what is wrong with it."""
    try:
        outline = await reader(body, Outline)
    except InferError:
        return Outgoing(body)
    return outgoing(body, outline, samples=samples)


def outgoing(body: bytes, outline: Outline, *, samples: bool) -> Outgoing:
    """The request of a body that has been read."""
    seeded = outline.seeded
    if samples and outline.stream and not seeded:
        # Of a name that occurs twice, as with "seed": null, the last one counts.
        body = body.rstrip()[:-1] + b', "seed": %d}' % secrets.randbits(63)
        seeded = True
    return Outgoing(body, outline.chain, outline.stream, seeded, outline.user)
