"""A Chromium without a screen, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed (apt-get install chromium)")


class Tab:
    """A page. What its scripts log as errors, and what its policy has refused, is in ``complaints``."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self._session, self._socket, self._address = session, socket, address
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        self._loaded = asyncio.Event()
        self._canned = ""
        self._replying: asyncio.Task[Any] | None = None
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(said["params"]["exceptionDetails"]["text"])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said["method"] == "Fetch.requestPaused":
                body = base64.b64encode(self._canned.encode()).decode()
                headers = [{"name": "Content-Type", "value": "text/event-stream"}]
                request = said["params"]["requestId"]
                call = self.send(
                    "Fetch.fulfillRequest", requestId=request, responseCode=200, responseHeaders=headers, body=body
                )
                self._replying = asyncio.create_task(call)
            elif said["method"] == "Page.javascriptDialogOpening":
                self.complaints.append(f"a dialog: {said['params']['message']}")

    @asynccontextmanager
    async def another(self) -> AsyncIterator[Tab]:
        """A further page of this browser, in a window of its own, so that both are shown."""
        id = (await self.send("Target.createTarget", url="about:blank", newWindow=True))["targetId"]
        async with _attached(self._session, f"{self._address.rpartition('/')[0]}/{id}") as tab:
            yield tab

    async def send(self, method: str, **params: Any) -> Any:
        id = next(self._ids)
        self._answers[id] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": id, "method": method, "params": params}))
        said = await asyncio.wait_for(answer, 60)
        assert "error" not in said, said
        return said["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        done = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true, and return its value."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.run(condition)):
                await asyncio.sleep(0.05)
            return value

    async def open(self, url: str) -> None:
        self._loaded.clear()
        if "loaderId" in await self.send("Page.navigate", url=url):  # Chrome names none if only the fragment changes.
            await asyncio.wait_for(self._loaded.wait(), 60)

    async def reload(self) -> None:
        """Load the page again, and wait: a script sent while one page replaces another is refused."""
        self._loaded.clear()
        await self.send("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), 60)

    async def can(self, pattern: str, *frames: object) -> None:
        """Answer further requests to such addresses with server-sent events, in place of the server."""
        self._canned = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
        await self.send("Fetch.enable", patterns=[{"urlPattern": pattern}])

    async def type(self, selector: str, text: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        more = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browsing() -> AsyncIterator[Tab]:
    """A new browser with an empty profile and one page."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank"]
        quiet = asyncio.subprocess.DEVNULL
        env = os.environ | {"HOME": profile}
        process = await asyncio.create_subprocess_exec(BINARY, *flags, stdout=quiet, stderr=quiet, env=env)
        try:
            async with aiohttp.ClientSession() as session:
                port = await _port(Path(profile) / "DevToolsActivePort")
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    (page,) = [each for each in await response.json() if each["type"] == "page"]
                async with _attached(session, page["webSocketDebuggerUrl"]) as tab:
                    yield tab
        finally:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def _attached(session: aiohttp.ClientSession, address: str) -> AsyncIterator[Tab]:
    async with session.ws_connect(address, max_msg_size=0) as socket:
        tab = Tab(session, socket, address)
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        yield tab


async def _port(file: Path) -> int:
    async with asyncio.timeout(60):
        while not (file.exists() and (lines := file.read_text().split())):
            await asyncio.sleep(0.05)
    return int(lines[0])
