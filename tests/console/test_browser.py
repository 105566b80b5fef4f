"""The console in a browser: it chats, watches, logs in, and runs nothing that a model or a client has written."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from typing import Any

import pytest
from tests.console.browser import Tab, browsing, needs_browser
from tests.serving import holding, running

import infer_console

CSS = files(infer_console).joinpath("static/style.css").read_text()
ENGINE = {"max_batch_size": 4, "max_seq_len": 2048}
ANSWER = "document.querySelector('article.assistant:last-child')"
DONE = f"""document.querySelector('#stop').hidden && {ANSWER}?.querySelector('footer').textContent.includes('seed')"""


def test_text_is_readable_in_light_and_dark() -> None:
    """WCAG's contrast of 4.5 between text and what is behind it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    themes = [dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.S)]
    assert len(themes) == 2
    for theme in themes:
        for text in ("text", "faint", "link", "bad", "on-first"):
            for back in ("first",) if text == "on-first" else ("back", "over"):
                light, dark = sorted((luminance(theme[text]), luminance(theme[back])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, back)


async def ask(tab: Tab, text: str) -> str:
    await tab.type("#text", text)
    await tab.press("Enter")
    return await answered(tab)


async def answered(tab: Tab) -> str:
    await tab.until(DONE)
    text: str = await tab.run(f"{ANSWER}.querySelector('.body').textContent")
    return text


async def set_field(tab: Tab, name: str, value: str) -> None:
    field = f"document.querySelector('#sampling').elements.{name}"
    await tab.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


async def click(tab: Tab, text: str, within: str = "document") -> None:
    button = f"[...{within}.querySelectorAll('button')].find((b) => b.textContent === {json.dumps(text)})"
    await tab.run(f"{button}.click()")


@pytest.mark.slow
@needs_browser
async def test_chat_streams_stops_repeats_and_remembers() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await tab.open(f"{server.url}/console")
        await tab.until("!document.querySelector('#chat').hidden")
        await set_field(tab, "max_tokens", "24")
        first = await ask(tab, "add two numbers")
        assert first
        await tab.run(f"{ANSWER}.querySelector('.t').dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))")
        tip = await tab.run("document.querySelector('#tip').textContent")
        assert re.search(r"[\d.]+ %.*[\d.]+ %", tip, re.S)
        spans = await tab.run(f"[...{ANSWER}.querySelectorAll('.body .t')].map((s) => s.textContent).join('').length")
        assert spans > len(first) // 2

        await set_field(tab, "seed", "7")
        texts = []
        for _ in range(2):
            await click(tab, "Again", ANSWER)
            texts.append(await answered(tab))
        assert texts[0] == texts[1], "a seed repeats its answer"

        await set_field(tab, "max_tokens", "")
        await tab.type("#text", "a long one")
        await tab.press("Enter")
        begun = f"document.querySelectorAll('article').length === 4 && {ANSWER}.querySelector('.t')"
        await tab.until(f"{begun} && (document.querySelector('#stop').click(), true)")
        assert await answered(tab)
        assert "ended by you" in await tab.run(f"{ANSWER}.querySelector('footer').textContent")
        await server.idle()

        await set_field(tab, "max_tokens", "8")
        await click(tab, "Edit", "document.querySelector('article.user')")
        await tab.run("document.querySelector('article.user textarea').value = 'another question'")
        await click(tab, "Send", "document.querySelector('article.user')")
        await tab.until("document.querySelectorAll('article').length === 2")
        edited = await answered(tab)

        # A page of a plain http address, other than this host's own, has no API for the clipboard.
        await tab.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        await tab.send("Emulation.setFocusEmulationEnabled", enabled=True)
        clipboard = "Object.getOwnPropertyDescriptor(Navigator.prototype, 'clipboard').get.call(navigator)"
        answer = "JSON.parse(localStorage['infer.console.chats'])[0].messages.at(-1).content"
        button = f"[...{ANSWER}.querySelectorAll('footer button')].at(-1)"
        for api in ("0", "Object.defineProperty(navigator, 'clipboard', { value: undefined }); 0"):
            await tab.run(f"{clipboard}.writeText('before').then(() => {{ {button}.textContent = 'Copy' }})")
            await tab.run(api)
            await tab.send("Runtime.evaluate", expression=f"{button}.click()", userGesture=True)
            await tab.until(f"{button}.textContent === 'Copied'")
            assert await tab.run(f"{clipboard}.readText().then((text) => text === {answer})")
        await tab.open(f"{server.url}/console#about")
        await tab.reload()
        await tab.until("document.querySelectorAll('#about td').length > 50")
        await tab.run("location.hash = 'chat'")
        kept = await tab.until("[...document.querySelectorAll('article .body')].map((b) => b.textContent)")
        assert kept == ["another question", edited]
        await tab.run("confirm = () => true")
        await click(tab, "Delete all")
        assert await tab.run("document.querySelectorAll('article, #chats li').length") == 0
        assert "question" not in await tab.run("JSON.stringify(localStorage)")
        assert tab.complaints == []


EVIL = "<img src=x onerror='window.harm=1'><script>window.harm=1</script>"
HOSTILE = f"""{EVIL}

# {EVIL}
- [a](javascript:window.harm=1) [b](data:text/html,{EVIL}) [c](https://good.example/?q=1)
> | {EVIL} | x |
> |---|---|
> | `{EVIL}` | **{EVIL}** |

```html"onload=window.harm=1
{EVIL}
```
https://good.example/<b>
"""


def delta(logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "logprobs": logprobs, "finish_reason": None}]}


@pytest.mark.slow
@needs_browser
async def test_what_a_model_or_a_user_writes_is_text() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": EVIL, "arguments": EVIL}}
    token = {"token": HOSTILE, "logprob": -0.5, "top_logprobs": [{"token": EVIL, "logprob": -1.0}]}
    said = {"served_model_name": EVIL, "access_log": False}
    async with running(engine=ENGINE, server=said) as server, browsing() as tab:
        await tab.open(f"{server.url}/console")
        await tab.until("!document.querySelector('#chat').hidden")
        assert await tab.run("document.title") == f"{EVIL} · infer"
        assert await tab.run("document.querySelector('#model').textContent") == EVIL
        assert EVIL in await tab.run("document.querySelector('#about').textContent")
        await tab.can(
            "*/v1/chat/completions",
            delta(role="assistant", content=""),
            delta(reasoning_content=HOSTILE),
            delta({"content": [token]}, content=HOSTILE),
            delta(tool_calls=[call]),
            delta(tool_calls=[{"index": 0, "function": {"arguments": "}"}}]),
        )
        await ask(tab, EVIL)
        text = await tab.run("document.querySelector('#log').textContent")
        assert text.count("onerror='window.harm=1'") >= 1 + 2 * 5 + 2
        titles = await tab.run("document.querySelector('#chats').textContent")
        assert titles.startswith("<img")
        links = await tab.run("[...document.querySelectorAll('#log a')].map((a) => [a.href, a.rel])")
        assert {tuple(link) for link in links} == {
            ("https://good.example/?q=1", "noopener noreferrer"),
            ("https://good.example/", "noopener noreferrer"),
        }
        assert await tab.run("document.querySelectorAll('#log img, #log script, #log b').length") == 0
        assert await tab.run("document.querySelectorAll('#log strong').length") > 0
        assert f"Call of {EVIL}" in text
        await tab.run("document.querySelector('#log .t').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))")
        assert await tab.run("document.querySelector('#tip').textContent.includes('onerror')")
        await tab.can("*/v1/chat/completions", {"error": {"message": EVIL}})
        await tab.type("#text", "what fails")
        await tab.press("Enter")
        await tab.until(f"{ANSWER}.querySelector('.error').textContent === {json.dumps(EVIL)}")
        counts = {"tokens": 1, "passes": 1, "running": 1, "waiting": 0, "free": 1, "totals": [0, 0, 0, 0, 0]}
        works = {"decodes": [], "at": [], "works": [[0, EVIL, EVIL, 0, 0, EVIL, EVIL]], "new": {}}
        hello = {"kind": "hello", "server": EVIL, "fault": EVIL, "requests": {EVIL: 0}, "states": [], "cache": 1}
        told = json.dumps([hello, {"kind": "step", "index": 0, "start": 0, "ms": 1} | counts | works])
        await tab.run("location.hash = 'live'")
        await tab.until("document.querySelector('#state').textContent === 'watching'")
        await tab.run(f"import('/console/view.js').then(({{ take }}) => {{ take({told}) }})")
        await tab.run("document.querySelector('#scrub').dispatchEvent(new Event('input'))")
        await tab.until("document.querySelector('#works').textContent.split('onerror').length === 6")
        await tab.until("document.querySelector('#blocks').textContent.includes('onerror')")
        assert await tab.run("document.querySelectorAll('main img, main script').length") == 0
        # Even code of the page's own cannot parse a text as HTML, or run one.
        assert await tab.run("(() => { try { document.body.innerHTML = '<b>' } catch { return true } })()")
        await tab.run(
            "document.body.append(Object.assign(document.createElement('img'), {src: 'https://elsewhere.example/x'}))"
        )
        await tab.complaint("elsewhere")  # the policy refuses other hosts
        assert await tab.run("window.harm") is None
        assert not [each for each in tab.complaints if "elsewhere" not in each and "TrustedHTML" not in each]


@pytest.mark.slow
@needs_browser
async def test_what_grows_with_the_server_and_what_a_model_writes_is_bounded() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await tab.open(f"{server.url}/console")
        heading = "'# ' + ' '.repeat(4000) + 'a' + ' '.repeat(4000) + '\\rx'"
        rendered = f"import('/console/markdown.js').then((m) => m.render({heading}).textContent.trim())"
        assert (await tab.run(rendered)).endswith("x"), "in time"
        steps = """import('/console/steps.js').then((m) => {
            const steps = new m.Steps();
            for (let i = 0; i < 12000; i++) {
                const of = { decodes: [i], at: [0], works: [], new: { [i]: `r${i}` }, running: 1 };
                steps.take({ kind: 'step', index: i, start: i, ms: 1, ...of });
                steps.take({ kind: 'end', number: i, arrival: i, ttft: null });
            }
            const kept = [steps.all.length, steps.ids.size, steps.rows.size];
            const of = { decodes: [], at: [], works: [], new: {}, running: 0 };
            steps.take({ kind: 'step', index: 20000, start: 9e9, ms: 1, ...of });
            return [...kept, steps.recent(200).length];
        })"""
        kept, ids, rows, recent = await tab.run(steps)
        assert recent == 1, "rates are of a time in which somebody watched"
        assert 10_000 <= kept == ids <= 10_500
        assert rows == 0

        # What the server keeps is sent again to a page that comes back, and after a restart there is another server.
        again = """import('/console/view.js').then(({ pause, steps, take }) => {
            const of = { kind: 'step', ms: 1, running: 1, tokens: 1, free: 1, totals: [0, 0, 0, 0, 0] };
            const step = (index) => ({ ...of, index, start: index, decodes: [0], at: [0], works: [], new: {} });
            const end = { kind: 'end', nth: 0, number: 0, id: 'a', arrival: 0, ttft: 1 };
            const hello = (server) => ({ kind: 'hello', server, requests: {} });
            for (let n = 0; n < 2; n++) take([hello('x'), step(0), step(1), end]);
            const before = [steps.all.length, steps.ended.length, steps.ids.get(0)];
            pause(true);
            take([hello('y'), step(0)]);
            return [...before, steps.all.length, steps.ended.length, document.querySelector('#pause').textContent];
        })"""
        assert await tab.run(again) == [2, 1, "a", 1, 0, "Pause"]


@pytest.mark.slow
@needs_browser
async def test_the_page_asks_for_a_key_and_works_by_its_cookie() -> None:
    async with running(engine=ENGINE, server={"api_keys": "right", "access_log": False}) as server, browsing() as tab:
        await tab.open(f"{server.url}/console")
        await tab.until("!document.querySelector('#login').hidden")
        assert await tab.run("document.querySelector('#chat').hidden")
        await tab.type("#key", "wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('#login-error').textContent.includes('no key')")
        await tab.run("document.querySelector('#key').value = ''")
        await tab.type("#key", "right")
        await tab.press("Enter")
        await tab.until("!document.querySelector('#chat').hidden")
        await set_field(tab, "max_tokens", "4")
        assert await ask(tab, "hello")
        assert await tab.run("document.cookie") == ""
        assert "right" not in await tab.run("JSON.stringify(localStorage)")
        await tab.run("location.hash = 'live'")
        await tab.until("document.querySelector('#state').textContent === 'watching'")
        await tab.reload()
        await tab.until("document.querySelector('#live')?.hidden === false")
        await click(tab, "Log out")
        await tab.until("!document.querySelector('#login').hidden")
        assert await tab.run("document.querySelector('#live').hidden")
        status = "fetch('v1/models', {headers: {'X-Infer-Console': '1'}}).then((r) => r.status)"
        assert await tab.run(status) == 401


@pytest.mark.slow
@needs_browser
async def test_the_engine_is_shown_at_work_with_two_hundred_requests() -> None:
    engine = {"max_batch_size": 200, "max_seq_len": 256, "max_tokens_per_step": 512}
    async with running(engine=engine) as server, browsing() as tab:
        await tab.resize(1200, 900)
        await tab.open(f"{server.url}/console#live")
        await tab.until("document.querySelector('#state').textContent === 'watching'")
        prompts = [f"import os{chr(10) * (n % 7)}" for n in range(200)]
        body = {"prompt": prompts, "max_tokens": 60, "ignore_eos": True, "seed": 1}
        figure = (
            "[...document.querySelectorAll('#figures div')].find((d) => d.textContent.startsWith('{}'))"
            ".lastChild.textContent"
        )
        drawn = "Number(document.querySelector('#lanes').dataset.drawn)"
        with holding(30):  # all run, and none is done
            asked = asyncio.create_task(server.post(body))
            await tab.until(f"Number({figure.format('Running')}) > 100")
            before = await tab.run(drawn)
        assert (await asked)[0] == 200
        await tab.until(f"{drawn} > {before} && Number({figure.format('Running')}) === 0")
        assert re.search(r"\d ms", await tab.run(figure.format("TTFT")))
        assert await tab.run(figure.format("Prefix hits")) != "–"
        assert await tab.run(figure.format("Missed records")) == "0"
        assert re.match(r"\(\d+, 0, 0, \d+", await tab.run("document.querySelector('#blocks').textContent"))

        await tab.run("document.querySelector('#lanes').focus()")
        slider = "document.querySelector('#scrub')"
        busy = "document.querySelector('#works').getAttribute('aria-busy')"
        move = f"{slider}.value = Number({slider}.max) - 5; {slider}.dispatchEvent(new Event('input'))"
        assert await tab.run(f"{move}; {busy}") == "true", "the table waits until the slider rests"
        chosen = await tab.run(f"Number({slider}.value)")
        assert await tab.run("document.querySelector('#step h2').textContent") == f"Step {chosen}"
        assert await tab.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
        await tab.until(f"{busy} === 'false'")
        rows = await tab.run("[...document.querySelectorAll('#step tbody tr')].map((r) => r.textContent)")
        assert rows
        assert all(row.startswith("cmpl-") for row in rows)

        await tab.run("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }")
        await tab.run("HTMLAnchorElement.prototype.click = () => {}")
        await click(tab, "Export trace")
        events = json.loads(await tab.run("saved.text()"))["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        steps = [event for event in slices if event["pid"] == 1]
        assert all(event["dur"] >= 0 and event["ts"] > 0 for event in slices)
        assert {event["ph"] for event in events} == {"X", "M", "C"}
        drew = sum(event["args"].get("tokens", 0) for event in slices if event["pid"] == 2)
        assert drew == 200 * 59, "the first token of an answer comes of its prefill"
        assert sum(event["args"]["tokens"] for event in steps) >= drew
        assert tab.complaints == []


@pytest.mark.slow
@needs_browser
async def test_it_fits_a_phone_and_is_operated_by_keys() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await tab.resize(360, 640, dark=True)
        await tab.open(f"{server.url}/console")
        await tab.until("!document.querySelector('#chat').hidden")
        for view in ("chat", "live", "about"):
            await tab.until(f"!document.querySelector('#{view}').hidden")
            assert await tab.run("document.documentElement.scrollWidth") <= 360
            assert await tab.run("document.querySelector('[role=tab][aria-selected=true]').id") == f"tab-{view}"
            unnamed = (
                f"[...document.querySelectorAll('#{view} :is(input, select, textarea, button, canvas)')].filter((e) => "
                "!(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"
            )
            assert await tab.run(unnamed) == []
            await tab.run(f"document.querySelector('#tab-{view}').focus()")
            await tab.press("ArrowRight")
        await tab.until("!document.querySelector('#chat').hidden")
        assert await tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        assert tab.complaints == []
