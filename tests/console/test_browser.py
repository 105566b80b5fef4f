"""The console in a browser: it chats, watches, logs in, and runs nothing that a model or a client has written."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from tests.console.browser import Tab, browsing, needs_browser
from tests.serving import Running, holding, running

import infer_console
from infer.contracts.params import SamplingParams

CSS = files(infer_console).joinpath("static/style.css").read_text()
ENGINE = {"max_batch_size": 4, "max_seq_len": 2048}
ANSWER = "document.querySelector('article.assistant:last-child')"
DONE = f"""document.querySelector('#stop').hidden && {ANSWER}?.querySelector('footer').textContent.includes('seed')"""


def test_text_is_readable_in_light_and_dark() -> None:
    """WCAG's contrast of 4.5 between text and what is behind it."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    themes = [dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.S)]
    assert len(themes) == 2
    for theme in themes:
        for text in ("text", "faint", "link", "bad", "on-first", "keyword", "string", "number"):
            for back in ("first",) if text == "on-first" else ("back", "over"):
                light, dark = sorted((luminance(theme[text]), luminance(theme[back])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, back)


def test_the_fields_take_what_the_server_takes() -> None:
    fields: dict[str, dict[str, str | None]] = {}

    class Inputs(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            if tag == "input" and given.get("type") == "number":
                fields[str(given["name"])] = given

    Inputs().feed(files(infer_console).joinpath("static/index.html").read_text())
    assert fields.keys() == {"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"}
    for name, field in fields.items():
        # How many tokens there may be depends on the model, so that the page sets that bound.
        bounds = [str(field[each]) for each in ("min", "max") if name != "max_tokens" or each == "min"]
        for bound in bounds:
            SamplingParams.model_validate({name: json.loads(bound)})


async def enter(tab: Tab, server: Running) -> None:
    """Open the console, and wait for the chat."""
    await tab.open(f"{server.url}/console")
    await tab.until("!document.querySelector('#chat').hidden")


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
        await enter(tab, server)
        await set_field(tab, "max_tokens", "24")
        first = await ask(tab, "add two numbers")
        assert first
        await tab.run(f"{ANSWER}.querySelector('.t').dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))")
        tip = await tab.run("document.querySelector('#tip').textContent")
        assert re.search(r"[\d.]+%.*[\d.]+%", tip, re.S)
        spans = await tab.run(f"[...{ANSWER}.querySelectorAll('.body .t')].map((s) => s.textContent).join('').length")
        assert spans > len(first) // 2

        await set_field(tab, "seed", "7")
        texts = []
        for _ in range(2):
            await click(tab, "Regenerate", ANSWER)
            texts.append(await answered(tab))
        assert texts[0] == texts[1], "a seed repeats its answer"

        await set_field(tab, "max_tokens", "")
        await tab.type("#text", "a long one")
        await tab.press("Enter")
        begun = f"document.querySelectorAll('article').length === 4 && {ANSWER}.querySelector('.t')"
        await tab.until(f"{begun} && (document.querySelector('#stop').click(), true)")
        assert await answered(tab)
        assert "stopped by you" in await tab.run(f"{ANSWER}.querySelector('footer').textContent")
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


ACTIVE = "document.activeElement.id || document.activeElement.name"
HIDDEN_TIP = "document.querySelector('#tip').checkVisibility() === false"


@pytest.mark.slow
@needs_browser
async def test_settings_show_the_servers_values_and_refuse_what_it_would_not_take() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await enter(tab, server)
        assert await tab.run(ACTIVE) == "text", "a message can be typed at once"
        shown = (
            "Object.fromEntries([...document.querySelector('#sampling').elements].map((f) => [f.name, f.placeholder]))"
        )
        defaults = {"temperature": "1", "top_p": "1", "top_k": "0", "min_p": "0"}
        assert defaults.items() <= (await tab.run(shown)).items()

        form = "document.querySelector('#sampling').elements"
        fault = "document.querySelector('#fault-{}').textContent"
        for name, bad, good, said in (
            ("temperature", "9", "0.5", "2"),
            ("top_p", "0", "0.9", "0.001"),
            ("top_k", "1.5", "2", ""),
            ("max_tokens", "2049", "8", "2048"),
            ("tools", "{", "", "not valid JSON"),
            ("tools", "{}", "", "array"),
        ):
            await set_field(tab, name, bad)
            assert said in (text := await tab.run(fault.format(name)))
            assert text
            await tab.run("document.querySelector('#side').open = false")
            await tab.type("#text", "kept")
            await tab.press("Enter")
            assert await tab.run(ACTIVE) == name
            assert await tab.run(f"{form}.{name}.matches('[aria-invalid=true]') && {form}.{name}.checkVisibility()")
            assert await tab.run("document.querySelectorAll('article').length") == 0, "nothing is sent"
            assert await tab.run("document.querySelector('#text').value") == "kept"
            await set_field(tab, name, good)
            assert await tab.run(fault.format(name)) == ""
            await tab.run("document.querySelector('#text').value = ''")
        assert await ask(tab, "hello")
        await set_field(tab, "temperature", "9")
        await click(tab, "Regenerate", ANSWER)
        assert await tab.run("document.querySelectorAll('article').length") == 2, "the answer stays"
        assert tab.complaints == []


@pytest.mark.slow
@needs_browser
async def test_a_chat_is_renamed_found_saved_and_deleted() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await enter(tab, server)
        assert await tab.run("document.querySelector('#one').hidden"), "there is none yet"
        await set_field(tab, "max_tokens", "4")
        await set_field(tab, "system", "be brief")
        for text in ("about apples", "about pears"):
            await click(tab, "New chat")
            assert await tab.run(ACTIVE) == "text"
            await ask(tab, text)
        titles = "[...document.querySelectorAll('#chats li')].map((each) => each.textContent)"
        rename = (
            "((name) => { const title = document.querySelector('#title'); title.value = name; "
            "title.dispatchEvent(new Event('change')); })"
        )
        await tab.run(f"{rename}('fruit / 1')")
        assert await tab.run(titles) == ["fruit / 1", "about apples"]
        await ask(tab, "and another")
        await tab.reload()
        await tab.until(f"{titles}.length === 2")
        assert await tab.run(titles) == ["fruit / 1", "about apples"], "the name stays"

        search = (
            "((text) => { const find = document.querySelector('#find'); find.value = text; "
            "find.dispatchEvent(new Event('input')); })"
        )
        for text, found in (("PEARS", ["fruit / 1"]), ("1", ["fruit / 1"]), ("apple", ["about apples"]), ("fig", [])):
            await tab.run(f"{search}({json.dumps(text)})")
            assert (await tab.run(titles))[: len(found) or 1] == found, text
        assert await tab.run("document.querySelector('#none').textContent") == "No chat found"
        await tab.run(f"{search}('')")

        await tab.run("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }")
        await tab.run("HTMLAnchorElement.prototype.click = function () { window.named = this.download; }")
        await click(tab, "Export")
        assert await tab.run("named") == "fruit-1.json"
        body = json.loads(await tab.run("saved.text()"))
        said = [(message["role"], message["content"]) for message in body["messages"]]
        assert (said[0], said[1]) == (("system", "be brief"), ("user", "about pears"))
        assert [role for role, _ in said] == ["system", "user", "assistant", "user", "assistant"]
        status, *_ = await server.post(body | {"max_tokens": 1}, "/v1/chat/completions")
        assert status == 200, "the file is a body of the API"

        await tab.run(f"{rename}('')")
        assert await tab.run(titles) == ["about pears", "about apples"], "without a name of its own"
        await tab.run("confirm = (text) => { window.asked = text; return true; }")
        await click(tab, "Delete")
        assert "about pears" in await tab.run("asked")
        assert await tab.run(titles) == ["about apples"]
        assert await tab.run("document.querySelector('article .body').textContent") == "about apples"
        assert "pears" not in await tab.run("JSON.stringify(localStorage)")
        await click(tab, "Delete")
        assert await tab.run("document.querySelectorAll('article, #chats li').length") == 0
        assert await tab.run("document.querySelector('#one').hidden")
        assert tab.complaints == []


@pytest.mark.slow
@needs_browser
async def test_a_tooltip_goes_where_its_token_goes() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await enter(tab, server)
        await set_field(tab, "max_tokens", "200")
        await tab.run("document.querySelector('#log').style.maxHeight = '6rem'")
        await ask(tab, "a question")
        hover = f"{ANSWER}.querySelector('.t').dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))"

        async def hovers() -> None:
            # Frames, so that no scroll is on its way that would hide it again.
            await tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            await tab.run(hover)
            assert not await tab.run(HIDDEN_TIP)

        for leave in (
            "document.querySelector('#log').scrollTop = 0",
            "dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))",
            "document.querySelector('#new').click()",
        ):
            await hovers()
            await tab.run(leave)
            await tab.until(HIDDEN_TIP)
        await tab.run("document.querySelector('#chats button').click()")
        await hovers()
        await tab.run("location.hash = 'live'")
        await tab.until("!document.querySelector('#live').hidden")
        assert await tab.run(HIDDEN_TIP)
        # Even a token that is hovered over at this moment has none on another view.
        await tab.run(hover)
        assert await tab.run(HIDDEN_TIP)


@pytest.mark.slow
@needs_browser
async def test_words_stay_whole_and_figures_make_sense() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await tab.resize(390, 844)
        await tab.open(f"{server.url}/console#live")
        figures = (
            "Object.fromEntries([...document.querySelectorAll('#figures div')]"
            ".map((d) => [...d.children].map((c) => c.textContent)))"
        )
        await tab.until(f"({figures})['TTFT p50 / p99'] === '–' && ({figures})['ITL p50 / p99'] === '–'")
        await tab.run("location.hash = 'about'")
        await tab.until("!document.querySelector('#about').hidden")
        assert await tab.run("document.querySelector('h1').getBoundingClientRect().top") >= 0, "the header is in view"
        broken = r"""[...document.querySelectorAll('#about :is(th, td:first-child, td:nth-child(2), td:nth-child(3))')]
            .flatMap((cell) => [...cell.textContent.matchAll(/[^\s-]{1,40}/g)].filter((word) => {
                const range = document.createRange();
                range.setStart(cell.firstChild, word.index);
                range.setEnd(cell.firstChild, word.index + word[0].length);
                return range.getClientRects().length > 1;
            }).map(String))"""
        assert await tab.run(broken) == []
        facts = "import('/console/message.js').then(({{ facts }}) => facts({}))"
        said = await tab.run(facts.format("{ usage: { completion_tokens: 5 }, ttft: 10, ms: 10.6 }"))
        assert said == "5 tokens · first token after 10 ms"
        said = await tab.run(facts.format("{ usage: { completion_tokens: 400 }, ttft: 10, ms: 10.6 }"))
        assert "tokens/s" not in said, "all of them have come at once"
        said = await tab.run(
            facts.format("{ usage: { completion_tokens: 101 }, ttft: 100, ms: 1100, finish: 'length' }")
        )
        assert said == "101 tokens · first token after 100 ms · 100.0 tokens/s · stopped at the token limit"
        assert (
            await tab.run(facts.format("{ usage: { completion_tokens: 1 }, ttft: 1, ms: 2 }"))
            == "1 token · first token after 1 ms"
        )


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


CODE = f"""> ```python
> def f(x):  # {EVIL}
>     return "{EVIL} &amp; &lt;" + f'{{x!r}}'
> ```

```html
<p class="a">{EVIL}</p>
```

```nobody-knows
def f
```
"""


@pytest.mark.slow
@needs_browser
async def test_code_is_colored_and_stays_the_text_that_it_is() -> None:
    async with running(engine=ENGINE) as server, browsing() as tab:
        await enter(tab, server)
        loaded = "performance.getEntriesByType('resource').filter((e) => e.name.includes('hljs-')).length"
        assert await tab.run(loaded) == 0, "what no answer needs is not loaded"
        pieces = [{"token": piece, "logprob": -0.5, "top_logprobs": []} for piece in re.findall(r"\w+|\W", CODE)]
        await tab.can("*/v1/chat/completions", delta({"content": pieces}, content=CODE))
        await ask(tab, "a question")
        await tab.until(f"{ANSWER}.querySelector('.hljs-keyword') && {ANSWER}.querySelector('.hljs-tag')")
        codes = await tab.run(f"[...{ANSWER}.querySelectorAll('code')].map((code) => code.textContent)")
        python, html, other = (
            block.split("\n", 1)[1] for block in re.findall(r"```(.*?)\n(?:> )?```", CODE, re.DOTALL)
        )
        assert codes == [python.replace("\n> ", "\n").removeprefix("> "), html, other]
        colored = (
            f"(kind, n) => [...{ANSWER}.querySelectorAll('code')[n].querySelectorAll(kind)].map((s) => s.textContent)"
        )
        assert await tab.run(f"({colored})('.hljs-keyword', 0)") == ["def", "return"]
        assert await tab.run(f"({colored})('.hljs-comment', 0)") == [f"# {EVIL}"]
        assert await tab.run(f"({colored})('span:not(.t)', 2)") == []
        # Each token is where it was: its tooltip shows what it covers.
        wrong = f"""[...{ANSWER}.querySelectorAll('code .t')].filter((span) => {{
            span.dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}));
            return document.querySelector('#tip td:nth-child(2)').textContent !== JSON.stringify(span.textContent);
        }}).map((span) => span.textContent)"""
        assert await tab.run(wrong) == []
        assert await tab.run("window.harm") is None
        assert await tab.run("document.querySelectorAll('#log img, #log script').length") == 0
        assert tab.complaints == []


@pytest.mark.slow
@needs_browser
async def test_what_a_model_or_a_user_writes_is_text() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": EVIL, "arguments": EVIL}}
    token = {"token": HOSTILE, "logprob": -0.5, "top_logprobs": [{"token": EVIL, "logprob": -1.0}]}
    said = {"served_model_name": EVIL, "access_log": False}
    async with running(engine=ENGINE, server=said) as server, browsing() as tab:
        await enter(tab, server)
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
        assert f"Call to {EVIL}" in text
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
        await tab.until("document.querySelector('#login-error').textContent.includes('not one of')")
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
        await enter(tab, server)
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
        tall = "document.querySelector('#log').append(...Array.from({length: 99}, () => document.createElement('hr')))"
        await tab.run(f"{tall}; document.querySelector('#side').open = true")
        assert await tab.run("document.querySelector('#ask').getBoundingClientRect().bottom") <= 640
        assert await tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        assert tab.complaints == []
