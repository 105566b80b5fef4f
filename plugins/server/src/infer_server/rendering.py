"""Rendering chat templates in a process of their own, which is killed if a template does not end in time."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from pydantic_core import from_json, to_json

from infer.errors import RequestError, capital
from infer.text import templates
from infer.text.templates import MAX_CHARS, ChatTemplate, TemplateStyle
from infer_server.http.children import environment, kill

TIMEOUT_S = 5.0
TRIES = 2
"""How often a call is tried if the process ends. The first time something outside may have ended it; if it happens
twice, the call itself is to blame."""


class Renderer:
    """Renders one call after the other, each within ``timeout_s``. Use it in one event loop."""

    def __init__(self, template: ChatTemplate, timeout_s: float = TIMEOUT_S) -> None:
        self._first = _json(template.state) + b"\n"
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, messages: bytes, /, **form: Any) -> str:
        """``ChatTemplate.prompt``, with messages as JSON. Raises RequestError."""
        return str(await self._call(b'["prompt",%b,%b]\n' % (messages, _json(form))))

    async def style(self) -> TemplateStyle:
        """``ChatTemplate.style``. Raises RequestError."""
        return TemplateStyle(**await self._call(b'["style"]\n'))

    async def close(self) -> None:
        async with self._lock:
            await self._kill()

    async def _call(self, line: bytes) -> Any:
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s):
                    for _ in range(TRIES):
                        answer = await self._ask(line)
                        if answer.endswith(b"\n"):
                            break
                        await self._kill()
            except TimeoutError:
                await self._kill()
                raise RequestError(
                    f"The chat template took more than {self._timeout_s:g} s for these messages, and was stopped.",
                    param="messages",
                ) from None
            except BaseException:  # what is under way cannot be told from the next answer
                await self._kill()
                raise
        if not answer.endswith(b"\n"):
            raise RequestError(
                "The chat template ran out of memory, or ended its process in another way.", param="messages"
            )
        result = from_json(answer)
        if "error" in result:
            raise RequestError(f"{capital(str(result['error'])[:500])}.", param="messages")
        return result["value"]

    async def _ask(self, line: bytes) -> bytes:
        """The answer to a line; incomplete or empty if the process has ended."""
        process = self._process
        if process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", templates.__file__),
                stdin=PIPE,
                stdout=PIPE,
                limit=8 * MAX_CHARS,
                env=environment(),
                start_new_session=True,  # as in ``Child``
            )
            line = self._first + line
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return b""
        return await process.stdout.readline()

    async def _kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await kill(process)


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="constants")
