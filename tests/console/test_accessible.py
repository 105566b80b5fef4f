"""What axe-core, which looks for violations of WCAG, finds on the console's pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.console.browser import Tab, browsing, needs_browser
from tests.console.test_browser import ENGINE, HOSTILE, answered, click, delta, set_field
from tests.console.test_timeline import record
from tests.serving import running

AXE = Path(sys.prefix) / "node/node_modules/axe-core/axe.min.js"
FOUND = """axe.run(document).then(({violations}) => violations.map(({id, help, nodes}) => [
    id, help, nodes.map((node) => [node.html.slice(0, 200), node.any.map((check) => check.message)])]))"""
ANSWER = HOSTILE + "\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint()\n```\n\n1. one\n   - two\n\n> quoted\n"


async def faults(tab: Tab, where: str) -> list[Any]:
    """What is wrong in light and dark, on a phone and on a screen."""
    found = []
    await tab.run(AXE.read_text() + "; 0")
    for width, height in ((360, 640), (1280, 800)):
        for dark in (False, True):
            await tab.resize(width, height, dark=dark)
            found += [[where, width, "dark" if dark else "light", *fault] for fault in await tab.run(FOUND)]
    return found


@pytest.mark.slow
@needs_browser
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed (npm, then make install)")
async def test_nothing_keeps_anybody_out(tmp_path: Path) -> None:
    found: list[Any] = []
    async with running(engine=ENGINE, server={"api_keys": "right", "access_log": False}) as server, browsing() as tab:
        await tab.open(f"{server.url}/console")
        await tab.until("!document.querySelector('#login').hidden")
        await tab.type("#key", "wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('#login-error').textContent")
        found += await faults(tab, "login")
        await tab.run("document.querySelector('#key').value = ''")
        await tab.type("#key", "right")
        await tab.press("Enter")
        await tab.until("!document.querySelector('#chat').hidden")
        found += await faults(tab, "an empty chat")
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        token = {"token": ANSWER, "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -1.0}]}
        frames = [
            delta(reasoning_content="a thought"),
            delta({"content": [token]}, content=ANSWER),
            delta(tool_calls=[call]),
        ]
        await tab.can("*/v1/chat/completions", *frames)
        await tab.type("#text", "a question")
        await tab.press("Enter")
        await answered(tab)
        await tab.run("for (const fold of document.querySelectorAll('details')) fold.open = true")
        await tab.run("document.querySelector('[name=colors]').click()")
        await tab.run("document.querySelector('.t').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
        found += await faults(tab, "a chat")
        await set_field(tab, "temperature", "9")
        await set_field(tab, "tools", "{")
        await tab.type("#find", "nothing holds this")
        found += await faults(tab, "settings that are refused")
        await click(tab, "Edit", "document.querySelector('article.user')")
        found += await faults(tab, "an edit")
        await tab.run("location.hash = 'live'")
        await tab.until("document.querySelector('#state').textContent === 'watching'")
        headers = {"Authorization": "Bearer right"}
        body = {"prompt": ["x", "y"], "max_tokens": 8, "ignore_eos": True}
        async with server.session.post(f"{server.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        slider = "document.querySelector('#scrub')"
        await tab.until(f"{slider}.max > 3")
        await tab.run(f"{slider}.value = 3; {slider}.dispatchEvent(new Event('input'))")
        await tab.until("document.querySelector('#works').getAttribute('aria-busy') === 'false'")
        found += await faults(tab, "the engine")
        await tab.run("location.hash = 'about'")
        await tab.until("!document.querySelector('#about').hidden")
        found += await faults(tab, "what is installed")
        record(tmp_path / "page.html", title="a run")
        await tab.open((tmp_path / "page.html").as_uri())
        await tab.until(f"{slider}.max === '2'")
        await tab.run(f"{slider}.value = 1; {slider}.dispatchEvent(new Event('input'))")
        found += await faults(tab, "a timeline")
    assert not found, "\n".join(map(json.dumps, found))
