"""What a stream's client has been told, so that another replica can go on.

Answers are exact: the same request with the same seed gives the same answer on every replica. So a lost stream is
asked for again elsewhere, and what the client has already is left out of it. How an answer is divided into events may
differ (speculation), so that texts are counted, not events; and a checksum shows that the replicas agree.

The ids in a stream are made from the request's id, which another replica chooses anew, and ``created`` is the time. The
client sees those of the first stream throughout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal
from zlib import crc32

from pydantic_core import from_json, to_json

KEPT_BYTES = 1 << 14
"""So many bytes are kept as they were sent. Only those before them are parsed, unless the stream is lost."""
PARSED_BYTES = 1 << 20
"""The most bytes of events that are parsed at a time, which takes some ten milliseconds."""
ERROR = re.compile(rb'(?:^|\n) *(?:data: )?(\{"(?:error"|type": ?"(?:error|response\.failed)").*)')
CREATED = re.compile(rb'"created(?:_at)?": ?(\d+)')
FOREIGN = (b"event: ping\n", b"event: message_start\n")
"""How Anthropic's streams begin."""
Json = dict[str, Any]
Kind = Literal["text", "list", "once"]
Key = tuple[object, ...]
Place = tuple[Key, Kind, Any, str]
"""A part of an event: what it is a piece of, how it adds to that, and where it is: ``container[name]``."""


class DivergedError(Exception):
    """Another replica answers the same request in another way."""


def complaint(data: bytes) -> str | None:
    """The message of the error event, or of Ollama's line, among these, if there is one."""
    found = ERROR.search(data)
    if found is None:
        return None
    frame = from_json(found[1])
    error = frame.get("error") or frame.get("response", {}).get("error") or frame
    return error if isinstance(error, str) else str(error.get("message"))


class _Account:
    """How much of each text and list has been sent, with a checksum, and what is sent once."""

    def __init__(self) -> None:
        self.lengths: dict[Key, tuple[int, int]] = {}
        self.once: set[Key] = set()

    def add(self, key: Key, kind: Kind, piece: Any) -> None:
        if kind == "once":
            self.once.add(key)
        else:
            length, sum = self.lengths.get(key, (0, 0))
            self.lengths[key] = (length + len(piece), _sum(piece, sum))

    def covers(self, other: _Account, index: object = None) -> bool:
        """Whether it has all that the other has said; with ``index``, all texts of that choice."""
        return (index is not None or other.once <= self.once) and all(
            self.lengths.get(key, (0, 0))[0] >= length
            for key, (length, _) in other.lengths.items()
            if index is None or key[0] == index
        )


class ClientStream:
    """The account of one client's stream. ``relay`` takes whole events as a replica sends them, and returns those to
    send on."""

    def __init__(self) -> None:
        self._account = _Account()
        self._kept: list[bytes] = []
        self._size = 0
        self._id = self._created = b""
        self._other = b""
        """The id in place of which ``_id`` is put; empty in the first stream."""
        self._seen: _Account | None = None
        """What the present stream has said, while that is not more than the client knows."""
        self._events = 0
        self.known = True
        """Whether there is an account: none of streams with longer events than are parsed here, nor of Anthropic's and
        Ollama's."""

    def begin(self, request_id: str) -> None:
        """A stream begins: the first one, or one after a lost one."""
        if not self._id:
            self._id = request_id.encode()
            return
        self._fold()
        self._other = request_id.encode()
        self._seen = _Account()

    def relay(self, data: bytes) -> bytes:
        """Raises DivergedError."""
        if not self._other:
            self.known = self.known and not data.startswith(FOREIGN)
            self._kept.append(data)
            self._size += len(data)
            if self._size > KEPT_BYTES:
                self._fold()
            return data
        return b"".join(self._again(data.replace(self._other, self._id)))

    def count(self) -> int:
        """How many events the client has been sent, as far as there is an account."""
        self._fold()
        return self._events

    def _fold(self) -> None:
        """Enter what was kept into the account."""
        data = b"".join(self._kept)
        self._kept.clear()
        self._size = 0
        if len(data) > PARSED_BYTES:
            self.known = False
        if not self.known:
            return
        if not self._created and (found := CREATED.search(data)):
            self._created = found[0]
        for _, frame in _frames(data):
            if not isinstance(frame, dict):
                self.known = False  # as the steps are that a console watches
                return
            self._events += bool(frame)
            for key, kind, container, name in _places(frame):
                self._account.add(key, kind, container[name])

    def _again(self, data: bytes) -> Iterator[bytes]:
        """What of a later stream's events is new to the client."""
        for raw, frame in _frames(data):
            if not frame or "error" in frame:
                yield raw
                continue
            places = list(_places(frame))
            cut = self._cut(places) if self._seen is not None else False
            if cut is None:
                continue
            if "sequence_number" in frame:
                cut = cut or frame["sequence_number"] != self._events
                frame["sequence_number"] = self._events
            for key, kind, container, name in places:
                self._account.add(key, kind, container[name])
            self._events += 1
            if cut:
                head, _, _ = raw.partition(b"data: ")
                raw = head + b"data: " + json.dumps(frame).encode() + b"\n\n"
            yield CREATED.sub(self._created, raw, count=1) if self._created else raw

    def _cut(self, places: list[Place]) -> bool | None:
        """Take out of an event what the client knows. Returns whether something was; None if nothing is left."""
        assert self._seen is not None
        new = cut = False
        # The end of an answer comes last: by then its texts have to be those that the client knows.
        for key, kind, container, name in sorted(places, key=lambda place: place[3] == "finish_reason"):
            piece = container[name]
            if kind == "once":
                # What this stream says again is no news, but shows that it goes on.
                new |= key not in self._account.once or key in self._seen.once
                self._seen.once.add(key)
                if name == "finish_reason" and not self._seen.covers(self._account, key[0]):
                    raise DivergedError
                continue
            told, sum = self._account.lengths.get(key, (0, 0))
            at, sum_here = self._seen.lengths.get(key, (0, 0))
            known = max(0, min(len(piece), told - at))
            if at < told <= at + len(piece) and _sum(piece[:known], sum_here) != sum:
                raise DivergedError
            self._seen.add(key, kind, piece)
            new |= len(piece) > known
            if known:
                container[name], cut = piece[known:], True
        if self._seen.covers(self._account):
            self._seen = None
        return cut if new else None


def _sum(piece: Any, sum: int) -> int:
    if isinstance(piece, str):
        return crc32(piece.encode(errors="surrogatepass"), sum)
    for item in piece:
        sum = crc32(to_json(item, inf_nan_mode="constants"), sum)
    return sum


def _frames(data: bytes) -> Iterator[tuple[bytes, Json]]:
    """The events in ``data``, each as it is and parsed; {} for the mark of the end and for comments."""
    for raw in data.split(b"\n\n"):
        if raw:
            _, _, value = raw.partition(b"data: ")
            yield raw + b"\n\n", {} if value == b"[DONE]" or raw.startswith(b":") else from_json(value)


def _places(frame: Json) -> Iterator[Place]:
    if (kind := frame.get("type")) is not None:
        key = (kind, frame.get("output_index"), frame.get("content_index"))
        if not str(kind).endswith(".delta"):
            yield key, "once", frame, "type"
            return
        yield key, "text", frame, "delta"
        if frame.get("logprobs") is not None:
            yield (*key, "logprobs"), "list", frame, "logprobs"
        return
    if frame.get("choices") == []:
        yield ("end",), "once", frame, "choices"
    for choice in frame.get("choices", ()):
        index = choice["index"]
        if "text" in choice:
            yield (index, "text"), "text", choice, "text"
        delta = choice.get("delta") or {}
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                yield (index, name), "text", delta, name
        if "role" in delta:
            yield (index, "role"), "once", delta, "role"
        for call in delta.get("tool_calls") or ():
            key = (index, "call", call["index"])
            if "id" in call:
                yield key, "once", call, "id"
            for kind, name in (("function", "arguments"), ("custom", "input")):
                if (call.get(kind) or {}).get(name) is not None:
                    yield (*key, name), "text", call[kind], name
        for name, entries in (choice.get("logprobs") or {}).items():
            if isinstance(entries, list):
                yield (index, "logprobs", name), "list", choice["logprobs"], name
        for name in ("finish_reason", "prompt_logprobs"):
            if choice.get(name) is not None:
                yield (index, name), "once", choice, name
