"""Chat templates in a process of their own: one that runs away is killed, and takes nothing with it."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from infer import chat_template
from infer.chat_template import MAX_CHARS, ChatTemplate
from infer.errors import RequestError, capital

TIMEOUT_S = 5.0


class Renderer:
    """Renders one call after the other, each within ``timeout_s``. Use it in one event loop."""

    def __init__(self, template: ChatTemplate, timeout_s: float = TIMEOUT_S) -> None:
        self._first = _line({"source": template.source, "tokens": template.tokens})
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, **call: Any) -> str:
        """``ChatTemplate.render``. Raises RequestError."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._ask(_line(call))
            except TimeoutError:
                await self._kill()
                raise RequestError(
                    f"The chat template took more than {self._timeout_s:g} s for these messages, and was stopped.",
                    param="messages",
                ) from None
            except BaseException:  # what is under way cannot be told from the next answer
                await self._kill()
                raise
        if "error" in answer:
            raise RequestError(capital(str(answer["error"])[:500]), param="messages")
        return str(answer["text"])

    async def close(self) -> None:
        async with self._lock:
            await self._kill()

    async def _ask(self, line: bytes) -> dict[str, Any]:
        process = self._process
        if process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", chat_template.__file__, stdin=PIPE, stdout=PIPE, limit=8 * MAX_CHARS
            )
            line = self._first + line
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            await self._kill()
            return {"error": "the chat template ran out of memory, or ended its process in another way"}
        found = json.loads(answer)
        assert isinstance(found, dict)
        return found

    async def _kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            if process.returncode is None:
                process.kill()
            await process.wait()


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
