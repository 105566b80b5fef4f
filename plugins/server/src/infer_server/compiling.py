"""Compiling clients' grammars: each new one is first compiled in a child process, with limits on time and memory."""

from __future__ import annotations

import asyncio

from infer.contracts.grammar import Fault, GrammarProtocol
from infer.contracts.params import StructuredOutputs
from infer.errors import QueueFullError
from infer.text.grammars import Grammars, refused, told
from infer_server.http.children import Child, ChildError, KilledError

SECONDS = 5.0
MEMORY = 1 << 29
MAX_WAITING = 32
"""How many requests may wait for grammars to be compiled, one after the other."""


class Compiler:
    """``Grammars.compile`` with limits on time and memory, one new grammar at a time. Use it in one event loop."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        grammars.prepare()  # at the start, since later it would hold up every stream
        self._child = Child(Grammars.__module__, grammars.first, seconds=SECONDS, memory=MEMORY)
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, outputs: StructuredOutputs | None) -> GrammarProtocol | None:
        """The compiled grammar; None without ``outputs``. Raises RequestError or QueueFullError."""
        if outputs is None:
            return None
        source = self._grammars.source(outputs)
        if grammar := self._grammars.known(source):
            return grammar
        if self._waiting == MAX_WAITING:
            raise QueueFullError(
                f"{MAX_WAITING} structured outputs are waiting to be compiled already; try again later."
            )
        self._waiting += 1
        try:
            async with self._lock:
                return self._grammars.known(source) or await self._make(source)
        finally:
            self._waiting -= 1

    async def _make(self, source: str) -> GrammarProtocol:
        try:
            checked = told(await self._child.ask(source.encode()))
        except KilledError as error:
            raise refused(f"{error}; try again later, or give a simpler one") from None  # and not remembered
        except ChildError as error:
            raise self._grammars.refuse(source, Fault(f"{error}; give a simpler one")) from None
        if checked.fault is not None:
            raise self._grammars.refuse(source, checked.fault)
        return await asyncio.to_thread(self._grammars.make, source, checked)

    async def close(self) -> None:
        await self._child.close()
