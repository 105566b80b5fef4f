"""The contract of endpoints that a plugin adds to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler


class WireFormatProtocol(Protocol):
    """How an API writes errors and streams. ``infer_server.http.wire.WireFormat`` is OpenAI's, to be extended."""

    ERROR: ClassVar[Any]
    """The shape of ``error``."""
    CONTENT_TYPE: ClassVar[str]
    """The media type of a stream."""
    AROUND: ClassVar[tuple[bytes, bytes]]
    """What stands before and behind the JSON of a stream's frame."""
    IDLE: ClassVar[bytes]
    """What a stream sends while there is nothing else to send."""
    DONE: ClassVar[bytes]
    """What ends a stream that did not fail."""
    ID_HEADERS: ClassVar[tuple[str, ...]]
    """The headers of every answer that tell the request's id."""

    def error(self, error: Any, status: int) -> dict[str, Any]:
        """The JSON of an answer with this status. ``error`` has ``message``, ``type``, ``param`` and ``code``."""

    def failure(self, error: Any) -> dict[str, Any]:
        """The last frame of a stream that fails."""

    def head(self, frame: Mapping[str, Any]) -> bytes:
        """The lines of an event before its data, if the stream has events."""

    def numbered(self, frame: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """A frame as it is sent after ``number`` others."""


@dataclass(frozen=True)
class Route:
    """An endpoint of the server, as its router and /openapi.json see it."""

    method: str
    """``GET``, ``POST`` and so on."""
    path: str
    """As aiohttp has it: ``/v1/models/{model}``."""
    handler: Handler
    """An async function from aiohttp's request to its response. What it raises is answered as an error in JSON."""
    summary: str
    """One line."""
    answer: Any
    """The shape of a 200's JSON, a type such as a TypedDict; a media type where it is something else; None keeps the
    endpoint, which only a page of the plugin's own uses, out of /openapi.json. A GET that has one, or is ``open``, is
    answered to HEAD, too."""
    body: type[BaseModel] | None = None
    """The request's, an ``infer_server.http.body.Body`` at the top of its module; ``Service.read`` checks it."""
    chunk: Any = None
    """The shape of an event's data, where the answer may be streamed."""
    open: bool = False
    """Whether it needs no API key, as for load balancers and the page that asks for the key. If it reads a body, that
    should be small: anybody may send it (``Service.read``'s ``most``)."""
    wire_format: WireFormatProtocol | None = None
    """How its errors and streams are written, an ``infer_server.http.wire.WireFormat``; None: as OpenAI's chats."""
    header: str | None = None
    """Only requests that have this header come here: to those, it takes the place of the endpoint of the same method
    and path that asks for none, and which there has to be. Whether a key is needed is that one's to say."""


class RoutesFactory(Protocol):
    """Called once, in the server's event loop, before it serves. ``service`` is ``infer_server.service.Service``: the
    model, as endpoints see it, and what they share."""

    def __call__(self, service: Any, settings: Any, /) -> Sequence[Route]: ...
