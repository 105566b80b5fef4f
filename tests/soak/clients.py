"""Clients: ordinary ones, whose answers are known, and those that a server on a network meets besides.

Each takes part in a round and ends by itself. It raises ``ViolationError`` if the server did what it must not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

Body = dict[str, Any]
JSON = {"Content-Type": "application/json"}
OWN = {"id", "created", "created_at", "completed_at", "usage", "encrypted_content"}
"""What differs from answer to answer: names, times and what the cache held."""


class ViolationError(Exception):
    """The server did what it must not."""


@dataclass
class Site:
    """What clients know of the server, and what they have seen of it."""

    url: str
    session: aiohttp.ClientSession
    wanted: dict[str, Any]
    """The answer to each of ``KNOWN``, by a server that was asked nothing else."""
    statuses: dict[int, int] = field(default_factory=dict)
    """How often each status was seen."""
    responses: list[str] = field(default_factory=list)
    """Ids of stored responses."""
    unread: list[socket.socket] = field(default_factory=list)
    """Connections that nobody reads."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def saw(self, status: int, of: str) -> None:
        """Count a status. Raises ViolationError if it is an error of the server's own."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status >= 500 and status != 503:
            raise ViolationError(f"{of} was answered {status}")


CODE = "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv:\n"
CHAT: Body = {"messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 24}
BOOLEAN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
KNOWN: dict[str, tuple[str, Body]] = {
    "greedy": ("/v1/completions", {"prompt": CODE, "max_tokens": 60, "temperature": 0, "logprobs": 2}),
    "sampled": ("/v1/completions", {"prompt": "class A:", "max_tokens": 40, "seed": 7, "n": 3, "temperature": 1.1}),
    "long": ("/v1/completions", {"prompt": CODE * 20, "max_tokens": 8, "temperature": 0, "logprobs": 1}),
    "many": ("/v1/completions", {"prompt": [CODE, "x = ", CODE * 3], "max_tokens": 12, "seed": 3}),
    "json": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 60, "seed": 1, "structured_outputs": {"json": BOOLEAN}},
    ),
    "penalized": ("/v1/completions", {"prompt": CODE, "max_tokens": 30, "seed": 5, "frequency_penalty": 0.7}),
    "chat": ("/v1/chat/completions", CHAT | {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
    "message": ("/v1/messages", {"model": "demo", **CHAT, "temperature": 0}),
    "response": ("/v1/responses", {"input": "Write.", "max_output_tokens": 24, "temperature": 0, "store": False}),
    "embedding": ("/v1/embeddings", {"input": [CODE, "a"]}),
    "ranks": ("/v1/rerank", {"query": "open", "documents": ["with open(path):", "class A:", "é"]}),
    "decision": (
        "/v1/decisions",
        {"input": CODE, "questions": [{"type": "predicate", "instructions": "It is code."}]},
    ),
    "tokens": ("/tokenize", {"prompt": CODE}),
    "large": ("/tokenize", {"prompt": CODE * 500}),
}  # fmt: skip


def plain(answer: Any) -> Any:
    """An answer without what is its own each time."""
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items() if key not in OWN}
    return [plain(value) for value in answer] if isinstance(answer, list) else answer


async def ask(site: Site, path: str, body: Body) -> Any:
    """The answer, however often the server has no place. Raises ViolationError for any other status than 200."""
    while True:
        async with site.session.post(site.url + path, json=body) as response:
            answer = await response.json()
            site.saw(response.status, path)
            if response.status == 200:
                return answer
            if response.status != 503 or "Retry-After" not in response.headers:
                raise ViolationError(f"{path} was answered {response.status}: {answer}")


async def known(site: Site, draw: random.Random) -> None:
    """Requests whose answers are known, in any company."""
    for name in draw.sample(list(KNOWN), 6):
        if plain(await ask(site, *KNOWN[name])) != site.wanted[name]:
            raise ViolationError(f"{name} was answered otherwise than alone")


async def chained(site: Site, draw: random.Random) -> None:
    """A conversation whose beginning the server keeps."""
    body: Body = {"input": f"Say {draw.randrange(10**6)}.", "max_output_tokens": 8, "temperature": 0}
    first = await ask(site, "/v1/responses", body)
    second = await ask(site, "/v1/responses", body | {"previous_response_id": first["id"], "input": "Again."})
    site.responses += [first["id"], second["id"]]


async def leaving(site: Site, draw: random.Random) -> None:
    """Streams that their clients leave after a few pieces."""
    for _ in range(4):
        body = {"prompt": CODE * draw.randrange(1, 9), "max_tokens": 400, "stream": True, "n": draw.randrange(1, 4)}
        async with site.session.post(site.url + "/v1/completions", json=body) as response:
            site.saw(response.status, "a stream")
            for _ in range(draw.randrange(6)):
                await response.content.readline()
            response.close()


@asynccontextmanager
async def wire(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*site.address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def status_of(site: Site, reader: asyncio.StreamReader, of: str) -> None:
    """Take the status of an answer, if there is one."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        line = await reader.readline()
        if line.startswith(b"HTTP/1.1 "):
            site.saw(int(line.split()[1]), of)


def head(path: str, length: int, *more: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


async def slow_headers(site: Site, draw: random.Random) -> None:
    """Connections on which headers never end."""

    async def one() -> None:
        async with wire(site) as (reader, writer):
            with contextlib.suppress(OSError):
                for byte in head("/v1/completions", 10)[: draw.randrange(1, 90)]:
                    writer.write(bytes([byte]))
                    await writer.drain()
                await status_of(site, reader, "slow headers")

    await asyncio.gather(*(one() for _ in range(20)))


async def slow_body(site: Site, draw: random.Random) -> None:
    """Bodies that never end."""

    async def one() -> None:
        async with wire(site) as (reader, writer):
            writer.write(head("/v1/completions", draw.randrange(100, 4_000_000)) + b'{"prompt": "')
            await status_of(site, reader, "a slow body")

    await asyncio.gather(*(one() for _ in range(20)))


async def never_reads(site: Site, draw: random.Random) -> None:
    """Answers of megabytes that their clients never read."""
    body = json.dumps({"prompt": "a", "max_tokens": 1500, "stream": True, "logprobs": 20, "n": 2}).encode()
    for _ in range(draw.randrange(1, 5)):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        site.unread.append(client)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, site.address)
        await loop.sock_sendall(client, head("/v1/completions", len(body)) + body)
    for client in site.unread[:-40]:
        client.close()


async def half_open(site: Site, draw: random.Random) -> None:
    """Connections that are reset, or closed in one direction, in the middle of an answer."""
    body = json.dumps({"prompt": "a", "max_tokens": 300, "stream": True}).encode()
    for _ in range(10):
        async with wire(site) as (reader, writer):
            writer.write(head("/v1/completions", len(body)) + body)
            await writer.drain()
            if draw.random() < 0.5:
                await reader.read(draw.randrange(1, 400))
            if draw.random() < 0.5:
                writer.write_eof()
            else:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def garbage(site: Site, draw: random.Random) -> None:
    """Bytes that are no HTTP, or nearly."""
    starts = (
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
    )
    for _ in range(20):
        async with wire(site) as (reader, writer):
            with contextlib.suppress(OSError):
                writer.write(draw.choice(starts) + draw.randbytes(draw.randrange(2000)) + b"\r\n\r\n")
                writer.write_eof()
                await status_of(site, reader, "garbage")


def mutated(value: Any, draw: random.Random) -> Any:
    """The value with one part of it replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        kind = draw.randrange(4)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return value | {draw.choice(["x", "", key + "s", "stream", "n", "model"]): draw.choice(ODD)}
        return value | {key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], mutated(value[at], draw), *value[at + 1 :]] * draw.choice([1, 1, 2])
    return draw.choice(ODD)


ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 2**63, -(2**63) - 1, "", "a", "\0", "\ud800", "é" * 300, [], [[]], {}, {"a": {}},
    [None] * 5, [1, 2, 3], ["a", 1], "data:image/png;base64,AAAA", float("nan"), float("inf"),
    {"type": "text", "text": "a"}, "demo",
]  # fmt: skip


async def fuzz(site: Site, draw: random.Random, count: int = 60) -> None:
    """Bodies that are nearly right."""
    paths = [path for path, _ in KNOWN.values()]
    for _ in range(count):
        path, body = draw.choice(list(KNOWN.values()))
        for _ in range(draw.randrange(1, 4)):
            body = mutated(body, draw)
        if isinstance(body, dict) and "max_tokens" in body and draw.random() < 0.9:
            body = body | {"max_tokens": 2}
        path = path if draw.random() < 0.9 else draw.choice(paths)
        data = json.dumps(body)
        async with site.session.post(site.url + path, data=data, headers=JSON) as answer:
            await answer.read()
            try:
                site.saw(answer.status, path)
            except ViolationError:
                raise ViolationError(f"{path} was answered {answer.status}: {data[:500]}") from None


async def post_all(site: Site, path: str, bodies: list[bytes], *, encoding: str | None = None) -> None:
    """Send bodies at once, and wait for all answers."""
    headers = JSON | ({"Content-Encoding": encoding} if encoding else {})

    async def one(body: bytes) -> None:
        async with site.session.post(site.url + path, data=body, headers=headers) as answer:
            await answer.read()
            site.saw(answer.status, path)

    await asyncio.gather(*(one(body) for body in bodies))


def as_json(**body: Any) -> bytes:
    return json.dumps(body).encode()


async def long_queries(site: Site, draw: random.Random) -> None:
    """A query, a text or an instruction that is long, before each of many documents."""
    await post_all(site, "/v1/rerank", [as_json(query="a" * 400_000, documents=["x"] * 2000)])
    await post_all(site, "/v1/score", [as_json(text_1="a" * 2_000_000, text_2=["x"] * 512)])
    await post_all(site, "/v1/rerank", [as_json(query="a", documents=["x"] * 512, instruction="b" * 1_000_000)])


async def many_questions(site: Site, draw: random.Random) -> None:
    """As many questions on a long input as a body may ask."""
    asked = [{"type": "predicate", "instructions": f"Is it {i}?"} for i in range(256)]
    await post_all(site, "/v1/decisions", [as_json(input=CODE * 30, questions=asked)])


async def large_grammars(site: Site, draw: random.Random) -> None:
    """Grammars whose source is long, or takes long to compile."""
    nested = {"allOf": [{"type": "string", "pattern": f".*{draw.choice('abc')}.{{{i}}}b.*"} for i in range(12)]}
    forms = [{"regex": "a" * 2_000_000}, {"json": nested}, {"grammar": 'start: "a" ' + "| b " * 100_000}]
    await post_all(
        site, "/v1/completions", [as_json(prompt="a", max_tokens=2, structured_outputs=form) for form in forms]
    )


async def long_texts(site: Site, draw: random.Random) -> None:
    """Texts of megabytes to tokenize, several at a time."""
    text = "".join(draw.choice("ab \n") for _ in range(100_000)) * 39
    await post_all(site, "/tokenize", [as_json(prompt=text)] * 6)


async def bombs(site: Site, draw: random.Random) -> None:
    """Bodies that inflate to a thousand times their size, or nest without end."""
    bomb = gzip.compress(b'{"prompt":"' + b"a" * draw.choice([3_000_000, 20_000_000, 100_000_000]) + b'"}', 1)
    await post_all(site, "/v1/completions", [bomb] * 4, encoding="gzip")
    await post_all(site, "/v1/completions", [b'{"prompt":' + b"[" * 1_000_000, b'{"a":' * 500_000])
    image = "data:image/png;base64," + base64.b64encode(bytes(1_000_000)).decode()
    part = {"type": "image_url", "image_url": {"url": image}}
    await post_all(site, "/v1/chat/completions", [as_json(messages=[{"role": "user", "content": [part]}])])


async def burst(site: Site, draw: random.Random) -> None:
    """Three hundred small requests at once."""
    path, body = draw.choice([
        ("/tokenize", as_json(prompt="a b c")),
        ("/v1/completions", as_json(prompt="a", max_tokens=1)),
        ("/v1/completions", as_json(prompt="a", n=10_000)),
        ("/v1/embeddings", as_json(input="a")),
    ])  # fmt: skip
    await post_all(site, path, [body] * 300)


async def scrapes(site: Site, draw: random.Random) -> None:
    """Three hundred readers of the server's figures at once."""

    async def one(path: str) -> None:
        async with site.session.get(site.url + path) as answer:
            await answer.read()
            site.saw(answer.status, path)

    await asyncio.gather(
        *(one(draw.choice(["/metrics", "/health", "/v1/models", "/openapi.json"])) for _ in range(300))
    )


Client = Callable[[Site, random.Random], Awaitable[None]]
ORDINARY: tuple[Client, ...] = (known, chained, leaving)
HOSTILE: tuple[Client, ...] = (
    slow_headers, slow_body, never_reads, half_open, garbage, fuzz, long_queries, many_questions, large_grammars,
    long_texts, bombs, burst, scrapes,
)  # fmt: skip
