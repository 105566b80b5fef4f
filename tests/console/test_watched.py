"""What happens to a page that somebody has left open: other tabs, another server, a lost connection, a long sleep."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.console.browser import browsing, needs_browser
from tests.console.test_browser import ENGINE, ask, click, set_field
from tests.serving import running
from yarl import URL

from infer_console import live

WATCHING = "document.querySelector('#state').textContent === 'watching'"
LAST = "import('/console/view.js').then(({ steps }) => steps.all.at(-1)?.index ?? -1)"
LOGGED_OUT = "!document.querySelector('#login').hidden"
TITLES = "[...document.querySelectorAll('#chats li')].map((each) => each.textContent)"
HURRY = "const wait = setTimeout; window.setTimeout = (act, ms) => wait(act, ms / 20);"


class Relay:
    """An address in front of a server, which may change, and whose open connections may fall silent."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self._pipes: list[asyncio.Task[None]] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(URL(self.target).host, URL(self.target).port)
        except OSError:
            writer.close()
            return
        self._pipes += [asyncio.create_task(self._pipe(*ends)) for ends in ((reader, there[1]), (there[0], writer))]

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

    def silence(self) -> None:
        """Nothing more comes by any connection that is open, which stays open."""
        for pipe in self._pipes:
            pipe.cancel()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Relay]:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*listener.sockets[0].getsockname())
        try:
            yield self
        finally:
            listener.close()
            self.silence()


@pytest.mark.slow
@needs_browser
async def test_a_page_notices_another_server_and_a_connection_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT_S", 0.2)
    body = {"prompt": "x = ", "max_tokens": 20, "ignore_eos": True}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(engine=ENGINE))
        relay = await stack.enter_async_context(Relay(first.url).listening())
        tab = await stack.enter_async_context(browsing())
        await tab.send("Page.addScriptToEvaluateOnNewDocument", source=HURRY)
        await tab.open(f"{relay.url}/console#live")
        await tab.until(WATCHING)
        await first.post(body)
        seen = await tab.until(f"{LAST}.then((last) => last > 10 && last)")

        relay.silence()
        await first.post(body)
        await tab.until(f"{LAST}.then((last) => last > {seen})")
        figures = "document.querySelector('#figures').textContent"
        await tab.until(f"!{figures}.includes('NaN')")

        slider = "document.querySelector('#scrub')"
        await tab.run(f"{slider}.value = 3; {slider}.dispatchEvent(new Event('input'))")
        assert await tab.run("document.querySelector('#pause').textContent") == "Resume"
        second = await stack.enter_async_context(running(engine=ENGINE, server={"served_model_name": "another"}))
        relay.target = second.url
        relay.silence()
        await tab.until("document.querySelector('#model').textContent === 'another'")
        assert await tab.run(LAST) == -1, "no step of the server before"
        assert await tab.run("document.querySelector('#pause').textContent") == "Pause"
        assert await tab.run("document.querySelectorAll('#step td').length") == 0
        await second.post(body)
        ended = "import('/console/view.js').then(({ steps }) => steps.ended.length && [steps.rows.size, steps.most])"
        assert await tab.until(ended) == [0, 1], "no lane of a request of the server before"
        await tab.run("location.hash = 'chat'")
        await set_field(tab, "max_tokens", "4")
        assert await ask(tab, "hello"), "which the page now asks by its name"
        assert [each for each in tab.complaints if "exception" in each.lower()] == []


@pytest.mark.slow
@needs_browser
async def test_tabs_share_what_the_browser_keeps() -> None:
    server_settings = {"api_keys": "right", "access_log": False}
    async with running(engine=ENGINE, server=server_settings) as server, browsing() as one, one.another() as two:
        for tab in (one, two):
            await tab.open(f"{server.url}/console")
            await tab.until(LOGGED_OUT)
        await one.type("#key", "right")
        await one.press("Enter")
        for tab in (one, two):
            await tab.until("!document.querySelector('#chat').hidden")
            await set_field(tab, "max_tokens", "4")
        await ask(one, "of the first tab")
        await two.until(f"{TITLES}.length === 1")
        await click(two, "New chat")
        await ask(two, "of the second tab")
        await one.until(f"{TITLES}.length === 2")
        await ask(one, "the first tab goes on")
        both = ["of the first tab", "of the second tab"]
        for tab in (one, two):
            await tab.until(f"{TITLES}.join() === '{','.join(both)}'")
        assert await two.run("document.querySelector('article .body').textContent") == "of the second tab"
        hovered = await one.run("document.querySelectorAll('article .t').length")
        assert hovered > 4, "the probabilities of the first answer are there still"
        await two.run("confirm = () => true")
        await click(two, "Delete all")
        await one.until(f"{TITLES}.length === 0")

        for tab in (one, two):
            await tab.run("location.hash = 'live'")
            await tab.until(WATCHING)
        await server.session.post(
            f"{server.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 8, "ignore_eos": True},
            headers={"Authorization": "Bearer right"},
        )
        for tab in (one, two):
            await tab.until(f"{LAST}.then((last) => last > 5)")
        await click(one, "Log out")
        await two.until(LOGGED_OUT)
        assert await two.run("document.querySelector('#live').hidden")
