"""A Chromium without a screen, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.serving import HANG_S

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed (apt-get install chromium)")
UNTIL = """new Promise((done, fail) => {
    const look = async () => {
        const value = await (%s);
        if (value) {
            changes.disconnect();
            done(value);
        }
    };
    const changes = new MutationObserver(() => look().catch(fail));
    changes.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
    look().catch(fail);
})"""


class Tab:
    """A page. What its scripts log as errors, and what its policy has refused, is in ``complaints``."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self._session, self._socket, self._address = session, socket, address
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        self._loaded = ""
        """Which document has been loaded, by its loader's id."""
        self._heard = asyncio.Event()
        self._canned = ""
        self._replying: asyncio.Task[Any] | None = None
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Page.lifecycleEvent" and said["params"]["name"] == "load":
                self._loaded = said["params"]["loaderId"]
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
            self._heard.set()

    async def _when(self, reached: Callable[[], bool]) -> None:
        """Wait until what the browser says has come to this. Raises TimeoutError."""
        async with asyncio.timeout(HANG_S):
            while not reached():
                self._heard.clear()
                await self._heard.wait()

    async def complaint(self, part: str) -> None:
        """Wait for a complaint that holds this. Raises TimeoutError."""
        await self._when(lambda: any(part in each for each in self.complaints))

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
        said = await asyncio.wait_for(answer, HANG_S)
        assert "error" not in said, said
        return said["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        done = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression is true, which may be a promise, and return its value. It is looked at whenever the
        document changes: what it depends on has to show there. Raises TimeoutError."""
        return await self.run(UNTIL % condition)

    async def open(self, url: str) -> None:
        said = await self.send("Page.navigate", url=url)
        if loader := said.get("loaderId"):  # Chrome names none if only the fragment changes.
            await self._when(lambda: self._loaded == loader)

    async def reload(self) -> None:
        """Load the page again, and wait: a script sent while one page replaces another is refused."""
        before = self._loaded
        await self.send("Page.reload")
        await self._when(lambda: self._loaded != before)

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
        quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        env = os.environ | {"HOME": profile}
        process = await asyncio.create_subprocess_exec(
            BINARY, *flags, stdout=quiet, stderr=pipe, env=env, limit=1 << 24
        )
        assert process.stderr is not None
        try:
            async with aiohttp.ClientSession() as session:
                page = await _first_page(session, process.stderr)
                async with _attached(session, page) as tab:
                    yield tab
        finally:
            process.terminate()
            await process.communicate()


@asynccontextmanager
async def _attached(session: aiohttp.ClientSession, address: str) -> AsyncIterator[Tab]:
    async with session.ws_connect(address, max_msg_size=0) as socket:
        tab = Tab(session, socket, address)
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        await tab.send("Page.setLifecycleEventsEnabled", enabled=True)
        yield tab


async def _first_page(session: aiohttp.ClientSession, log: asyncio.StreamReader) -> str:
    """Wait for the page that a new browser opens. Returns its address. Raises TimeoutError."""
    async with asyncio.timeout(HANG_S):
        await log.readuntil(b"DevTools listening on ")
        browser = (await log.readline()).decode().strip()
        async with session.ws_connect(browser) as socket:
            await socket.send_json({"id": 1, "method": "Target.setDiscoverTargets", "params": {"discover": True}})
            target: dict[str, str] = {}
            while target.get("type") != "page":
                target = (await socket.receive_json()).get("params", {}).get("targetInfo", {})
    return f"{browser.partition('/devtools/')[0]}/devtools/page/{target['targetId']}"
