"""A stream beside everybody else, in a process of its own: whether its answer stays the same, and how long its longest
silence is. Prints figures when standard input ends."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

from tests.soak.clients import CODE, head

BODY = {"prompt": CODE, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


class BusyError(Exception):
    """The server has no place."""


def stream(address: tuple[str, int]) -> tuple[str, list[float]]:
    """The answer's text and when each piece of it came. Raises BusyError if the server has no place, EOFError if the
    connection ends before the answer does, and ValueError if the server ends the answer."""
    data = json.dumps(BODY).encode()
    times, text = [time.perf_counter()], ""
    with socket.create_connection(address) as client:
        client.sendall(head("/v1/completions", len(data), "Connection: close") + data)
        with client.makefile("rb") as lines:
            status = lines.readline().split()[1:2]
            if status == [b"503"]:
                raise BusyError
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ValueError(f"the canary's stream ended by {event}")
                    times.append(time.perf_counter())
                    text += "".join(choice["text"] for choice in event["choices"])
                elif line.startswith(b"data: [DONE]"):
                    return text, times
    raise EOFError


def main(url: str) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    ended, texts, gaps, refused, cut = threading.Event(), set[str](), list[float](), 0, 0

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    print("singing", flush=True)
    while not (ended.is_set() and (texts or refused or cut)):  # once at least, however short the others are
        try:
            text, times = stream((parts.hostname, parts.port))
        except (BusyError, ConnectionRefusedError):
            refused += 1
            ended.wait(0.05)
            continue
        except (EOFError, ConnectionError):
            cut += 1
            continue
        texts.add(text)
        gaps += [after - before for before, after in itertools.pairwise(times[1:])]
    gaps.sort()
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    last = len(gaps) - 1
    found = {name: round(1000 * gaps[int(share * last)], 1) for name, share in shares.items() if gaps}
    print(json.dumps({"texts": sorted(texts), "gaps_ms": found, "pieces": len(gaps), "refused": refused, "cut": cut}))


if __name__ == "__main__":
    main(sys.argv[1])
