"""The sockets of a server: bound to an address, and served until it ends."""

from __future__ import annotations

import asyncio
import errno
import functools
import resource
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from infer.errors import SettingsError
from infer_server.http.errors import Protocol

KEEPALIVE_S = 75.0
"""How long, in seconds, a connection may be idle. Clients that keep theirs as long or longer would send a request while
the server closes the connection, and lose it: aiohttp keeps them for 15 s, nginx for 60."""
MAX_CONNECTIONS = 8192
"""How many connections there may be at a time, if the process may open twice as many files."""
WAITING = 1024
"""How many more wait in the kernel until they are accepted; Linux has a limit of its own (net.core.somaxconn)."""
ACCEPTED = 8
"""How many connections one turn of the event loop accepts: frames of open streams come between two turns, and each
connection takes as long as many frames. asyncio would accept all that wait."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to every address of the host. Raises SettingsError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _elsewhere(host, error) from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(bound := socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # With port 0, all addresses use the port that the first one got.
            bound.bind((address[0], sockets[0].getsockname()[1] or port, *address[2:]))
    except OSError as error:
        for bound in sockets:
            bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _elsewhere(host, error) from None
        raise _taken(host, port, error) from None
    return sockets


def _elsewhere(host: str, error: Exception) -> SettingsError:
    return SettingsError(
        f"server.host = {host!r} is no address of this machine: {error}; use 127.0.0.1 for this machine "
        "only, or 0.0.0.0 for all that reach it."
    )


def _taken(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"server.port = {port} cannot be listened on at {host}: {error.strerror}; stop what uses it, or give another "
        "port (0 for any free one)."
    )


def _files() -> int:
    """How many files this process may have open, connections among them, once the limit is as high as it may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has another limit below an unlimited one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


@asynccontextmanager
async def listen(
    app: web.Application, sockets: Sequence[socket.socket], stall_timeout_s: float = 60.0
) -> AsyncIterator[str]:
    """Serve the app until the end of the block. Yields the URL. A client that reads nothing for ``stall_timeout_s``
    loses its connection, whatever is being written to it and even if the server has closed it: Linux sees to that."""
    for bound in sockets:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_timeout_s * 1000)))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # if a client disconnects, its handler is canceled, and so its request
        shutdown_timeout=1.0,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    try:
        assert runner.server is not None
        how: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_S, "access_log": None, "auto_decompress": False}
        # Half of the files are left for others than clients: an ingress has another connection for each of theirs.
        how |= {"most": min(MAX_CONNECTIONS, _files() // 2), "refused": set()}
        protocol = functools.partial(Protocol, runner.server, loop=loop, **how)
        try:
            listening = [await loop.create_server(protocol, sock=bound, backlog=ACCEPTED) for bound in sockets]
            for bound in sockets:
                bound.listen(WAITING)
        except OSError as error:  # another process has bound the port as well and listens already
            host, port = sockets[0].getsockname()[:2]
            raise _taken(host, port, error) from None
        try:
            address, port = sockets[0].getsockname()[:2]
            yield f"http://{f'[{address}]' if ':' in address else address}:{port}"
        finally:
            for server in listening:
                server.close()  # waiting for it would wait for clients that keep their connection open
    finally:
        await runner.cleanup()
