"""A tier in memory, and threads that are none, so that tests depend on no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from infer_cache_paged.tier import BlockKey, Payload


@dataclass
class Memory:
    """A TierProtocol that keeps everything."""

    kept: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    closed: bool = False

    def contains(self, name: str) -> bool:
        return name in self.kept

    def get(self, key: BlockKey) -> Payload | None:
        self.reads.append(key.name)
        head, payload = self.kept.get(key.name, (b"", b""))
        if head != key.head or len(payload) != key.nbytes:
            self.kept.pop(key.name, None)
            return None
        return bytearray(payload)

    def put(self, key: BlockKey, payload: Payload) -> None:
        assert len(payload) == key.nbytes
        self.kept[key.name] = key.head, bytes(payload)

    def touch(self, names: Iterable[str]) -> None:
        self.used += names

    def first(self) -> tuple[bytes, Payload] | None:
        head, payload = self.kept[min(self.kept)] if self.kept else (b"", b"")
        return (head, bytearray(payload)) if head else None

    def clear(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        self.closed = True


class Inline(Executor):
    """Whatever is submitted is done at once."""

    def __init__(self, count: int = 1, name: str = "") -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Patient(Executor):
    """Whatever is submitted waits for ``work``."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self, count: int = 1 << 30) -> None:
        for future, call in self.waiting[:count]:
            if future.set_running_or_notify_cancel():
                future.set_result(call())
        del self.waiting[:count]
