"""The console's routes: its files and their headers, logging in, and the engine's steps for whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

import pytest
from aiohttp import ClientResponse
from tests.serving import HANG_S, Running, running
from yarl import URL

import infer_console
from infer.plugins.discovery import Plugins
from infer_cache_paged import PagedBlockManager
from infer_console import live, messages, sessions
from infer_console.files import HEADERS, POLICY
from infer_console.live import Live, Watcher

STATIC = {file.name: file.read_text() for file in files(infer_console).joinpath("static").iterdir()}
VENDORED = {name: STATIC.pop(name) for name in sorted(STATIC) if name.startswith("hljs-")}
PUBLISHED = "debb6942760de6e1473333b0cf7e62619bf94e36824cdbfab4e92d7fb2900eec"
"""The digest of highlight.js 11.12.0: LICENSE, es/core.min.js and es/languages/*.min.js of @highlightjs/cdn-assets."""
OWN = {"X-Infer-Console": "1"}
ENGINE = {"max_batch_size": 4, "max_seq_len": 128}


async def ask(server: Running, method: str, path: str, body: Any = None, **headers: str) -> ClientResponse:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    url = URL(server.url + path, encoded=True)
    async with server.session.request(method, url, json=body, headers=given) as response:
        await response.read()
        return response


def test_the_page_has_no_script_or_style_in_it_and_names_only_its_own_files() -> None:
    page = STATIC["index.html"]
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", page)
    named = set(re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page))
    named |= {f"console/{name}" for text in STATIC.values() for name in re.findall(r'from "\./([^"]*)"', text)}
    # timeline.js is of pages that are written to files.
    assert named == {f"console/{name}" for name in STATIC.keys() - {"index.html", "timeline.js"}}
    for name, text in STATIC.items():
        assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), name
        assert not re.search(r"https?://(?!ui\.perfetto)[a-z]", text), name
    assert HEADERS == {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    others = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    own = {"script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:"}
    assert {*POLICY.split("; ")} == {*others, *own, "require-trusted-types-for 'script'", "trusted-types 'none'"}


def test_what_is_of_others_is_as_published_and_all_of_it_is_used() -> None:
    digest = hashlib.sha256("".join(VENDORED.values()).encode()).hexdigest()
    assert digest == PUBLISHED
    table = re.search(r"const GRAMMARS = \{(.*?)\};", STATIC["highlight.js"], re.DOTALL)
    assert table is not None
    used = {f"hljs-{name}.min.js" for name in re.findall(r"(\w+): \"", table[1])}
    assert VENDORED.keys() == {*used, "hljs-core.min.js", "hljs-LICENSE.txt"}
    assert "BSD 3-Clause" in VENDORED["hljs-LICENSE.txt"]
    assert not any(re.search(r"\beval\(|new Function|document\.write", text) for text in VENDORED.values())


async def test_files_have_headers_and_nothing_else_is_found_and_login_leads_in() -> None:
    server_settings = {"api_keys": "right,other", "access_log": False}
    async with running(engine=ENGINE, server=server_settings) as server:
        await _files(server)
        await _login(server)


async def _files(server: Running) -> None:
    for path, kind in {
        "/console": "text/html",
        "/console/app.js": "text/javascript",
        "/console/style.css": "text/css",
    }.items():
        response = await ask(server, "GET", path)
        assert (response.status, response.content_type) == (200, kind)
        assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
        tag = response.headers["ETag"]
        again = await ask(server, "GET", path, If_None_Match=f'"x", {tag}')
        assert (again.status, again.headers["ETag"]) == (304, tag)
        assert (await ask(server, "GET", path, If_None_Match='"x"')).status == 200
    for path in ("..%2froutes.py", "%2e%2e/routes.py", "..%5croutes.py", "%2fetc%2fpasswd", "x.js", "app.js%00", "."):
        response = await ask(server, "GET", f"/console/{path}", Authorization="Bearer right")
        assert response.status == 404, path


async def _login(server: Running) -> None:
    own = "http://" + URL(server.url).authority
    assert (await ask(server, "GET", "/console/api/server", **OWN)).status == 401
    assert (await ask(server, "GET", "/console/api/steps", **OWN)).status == 401
    login = "/console/api/login"
    key = {"key": "right"}
    assert (await ask(server, "POST", login, {"key": "wrong"}, **OWN)).status == 401
    assert (await ask(server, "POST", login, {}, **OWN)).status == 400
    large = json.dumps({"key": "x" * 20_000}).encode()
    # Anybody may send it, so it does not reach the process that checks large bodies.
    for body, encoding in ((large, "identity"), (gzip.compress(large), "gzip")):
        given = OWN | {"Content-Encoding": encoding, "Content-Type": "application/json"}
        async with server.session.post(server.url + login, data=body, headers=given) as response:
            assert response.status == 413
    for foreign in (
        {},  # a form's post: it cannot have the header
        OWN | {"Sec-Fetch-Site": "cross-site"},
        OWN | {"Sec-Fetch-Site": "same-site"},
        OWN | {"Origin": "https://evil.example"},
        OWN | {"Origin": own + "1"},
        OWN | {"Origin": "null"},
    ):
        response = await ask(server, "POST", login, key, **foreign)
        assert (response.status, "Set-Cookie" in response.headers) == (403, False), foreign

    planted = f"infer_console_{URL(server.url).port}=planted"
    response = await ask(server, "POST", login, key, **OWN, Origin=own, Cookie=planted)
    assert response.status == 204
    (cookie,) = response.headers.getall("Set-Cookie")
    name, _, token = cookie.partition(";")[0].partition("=")
    attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/", f"max-age={sessions.LIFE_S}"} <= attributes
    assert "secure" not in attributes
    assert token != "planted"
    assert "right" not in token
    shown = OWN | {"Cookie": f"{name}={token}"}

    async def enters(**headers: str) -> bool:
        response = await ask(server, "GET", "/v1/models", **headers)
        assert response.status in (200, 401)
        return response.status == 200

    assert await enters(**shown)
    assert await enters(**shown, Sec_Fetch_Site="same-origin")
    assert await enters(**shown, Origin=own)
    assert not await enters(Cookie=planted, **OWN)
    assert not await enters(Cookie=shown["Cookie"]), "a page of elsewhere cannot send the header"
    for site in ("cross-site", "same-site", "none"):
        assert not await enters(**shown, Sec_Fetch_Site=site), site
    assert not await enters(**shown, Origin=own + "1"), "another port is same-site, but not this page"
    response = await ask(server, "GET", "/console/api/server", **shown)
    about = await response.json()
    values = {row["key"]: row["value"] for row in about["settings"]}
    assert about["keys"]
    assert "right" not in json.dumps(about)
    assert values["engine.max_batch_size"] == "4"
    sources = {row["key"]: row["source"] for row in about["settings"]}
    assert (sources["engine.max_batch_size"], sources["engine.graphs"]) == ("argument", "default")
    assert {"slot": "cache", "name": "paged", "chosen": "yes"}.items() <= next(
        row for row in about["plugins"] if row["name"] == "paged"
    ).items()

    response = await ask(server, "POST", login, key, **shown)
    assert not await enters(**shown), "a new login ends the session that it had"
    shown["Cookie"] = response.headers["Set-Cookie"].partition(";")[0]
    assert (await ask(server, "POST", "/console/api/logout", {}, Cookie=shown["Cookie"])).status == 403
    assert await enters(**shown)
    assert (await ask(server, "POST", "/console/api/logout", {}, **shown)).status == 204
    assert not await enters(**shown)

    response = await ask(server, "POST", login, key, **OWN)
    shown["Cookie"] = response.headers["Set-Cookie"].partition(";")[0]
    async with server.session.get(f"{server.url}/console/api/steps", headers=shown) as watched:
        assert b"hello" in await watched.content.readline()
        await ask(server, "POST", "/console/api/logout", {}, **shown)
        asked = {"prompt": "x", "max_tokens": 4}
        assert (await ask(server, "POST", "/v1/completions", asked, Authorization="Bearer right")).status == 200
        assert b"step" not in await asyncio.wait_for(watched.read(), HANG_S), "who has logged out watches no longer"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "MOST", 2)
        made = []
        for _ in range(3):
            response = await ask(server, "POST", login, {"key": "other"}, **OWN)
            made.append(OWN | {"Cookie": response.headers["Set-Cookie"].partition(";")[0]})
        assert [await enters(**each) for each in made] == [False, True, True]
        patch.setattr(sessions, "LIFE_S", 0)
        response = await ask(server, "POST", login, key, **OWN, X_Forwarded_Proto="https")
        cookie = response.headers["Set-Cookie"]
        assert "secure" in cookie.lower()
        assert not await enters(**OWN, Cookie=cookie.partition(";")[0]), "it has ended"


@contextlib.asynccontextmanager
async def watching(server: Running, query: str = "") -> AsyncIterator[AsyncIterator[Any]]:
    async def records(response: ClientResponse) -> AsyncIterator[Any]:
        async for line in response.content:
            if line.startswith(b"data: "):
                for record in json.loads(line.removeprefix(b"data: ")):
                    yield record

    async with server.session.get(f"{server.url}/console/api/steps{query}", headers=OWN) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        yield records(response)


async def test_who_watches_sees_every_step_and_no_text_and_nobody_else_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Plugins] = []
    discover = Plugins.discover

    def remember(*given: Any, **named: Any) -> Plugins:
        found.append(discover(*given, **named))
        return found[-1]

    monkeypatch.setattr(Plugins, "discover", remember)
    monkeypatch.setattr(live, "MOST_WATCHERS", 2)
    prompt = "secret = 1\n" * 8
    changed = asyncio.Event()

    def noting(change: Callable[[Live, Watcher], None]) -> Callable[[Live, Watcher], None]:
        def noted(self: Live, watcher: Watcher) -> None:
            change(self, watcher)
            changed.set()

        return noted

    monkeypatch.setattr(Live, "_enter", noting(Live._enter))
    monkeypatch.setattr(Live, "_leave", noting(Live._leave))
    settings = {"access_log": False, "stall_timeout_s": 0.5}
    engine = ENGINE | {"prefill_chunk_size": 16}
    async with running(engine=engine, server=settings) as server, asyncio.timeout(HANG_S):
        hooks = found[0].manager.hook

        def observers() -> int:
            return len(hooks.infer_step_finished.get_hookimpls()) + len(hooks.infer_request_finished.get_hookimpls())

        async def watched(so: bool) -> None:
            while (observers() != before) is not so:
                changed.clear()
                await changed.wait()

        before = observers()
        for bad in ("-1", "1e3", "99999999999999999999", "2001", "%D9%A3", ""):
            response = await ask(server, "GET", f"/console/api/steps?last={bad}", **OWN)
            assert response.status == 400, bad
            assert "from 0 to 2000" in (await response.json())["error"]["message"]
        for path in ("steps", "server"):
            elsewhere = [OWN | {"Sec-Fetch-Site": "cross-site"}, OWN | {"Origin": "https://evil.example"}]
            for headers in ({}, {"Authorization": "Bearer x"}, *elsewhere):
                response = await ask(server, "GET", f"/console/api/{path}", **headers)
                assert response.status == 403, "a page of elsewhere takes no place"
        assert observers() == before
        async with watching(server) as records:
            hello = await anext(records)
            assert (hello["kind"], hello["requests"], hello["batch"]) == ("hello", {}, 4)
            assert observers() == before + 2
            body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "n": 2}
            status, answer, _ = await server.post(body)
            assert status == 200
            seen: list[Any] = []
            while len([r for r in seen if r["kind"] == "end"]) < 2 or seen[-1]["kind"] != "map":
                seen.append(await anext(records))
            await _check(seen, answer)
            async with watching(server, "?last=2000") as others:
                assert (await anext(others))["kind"] == "hello"
                kept = [r for r in seen if r["kind"] != "map"]
                assert [await anext(others) for _ in kept] == kept, "what is kept is the same"
                response = await ask(server, "GET", "/console/api/steps", **OWN)
                assert response.status == 503
                assert "2 places" in (await response.json())["error"]["message"]
        await watched(False)
        await server.post({"prompt": prompt, "max_tokens": 1})
        async with watching(server, "?last=2000") as records:
            hello = await anext(records)
            assert hello["requests"] == {}
            await server.post({"prompt": "x", "max_tokens": 1})
            assert (await anext(records))["new"] != {}, "nothing from before"
        await watched(False)

        # One that never reads is dropped: a batch is as large as what may wait for it.
        event = live._event
        monkeypatch.setattr(live, "_event", lambda made: b": " + bytes(live.BACKLOG_BYTES) + b"\n" + event(made))
        url = URL(server.url)
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1)
        writer.write(b"GET /console/api/steps HTTP/1.1\r\nHost: localhost\r\nX-Infer-Console: 1\r\n\r\n")
        await watched(True)
        while observers() != before:
            await server.post({"prompt": "x", "max_tokens": 1})
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):  # what had been sent; nothing more waits for it
                pass
        writer.close()


async def _check(seen: list[Any], answer: Any) -> None:
    steps = [record for record in seen if record["kind"] == "step"]
    ends = [record for record in seen if record["kind"] == "end"]
    assert [step["index"] for step in steps] == list(range(steps[0]["index"], steps[0]["index"] + len(steps)))
    ids = {int(number): id for step in steps for number, id in step["new"].items()}
    assert sorted(ids.values()) == sorted(end["id"] for end in ends)
    assert all(id.startswith(answer["id"]) for id in ids.values())
    usage = answer["usage"]
    prefilled: dict[int, int] = {}
    decoded: dict[int, list[int]] = {}
    for step in steps:
        assert step["tokens"] == len(step["decodes"]) + sum(work[2] for work in step["works"])
        for number, _, length, prefill, *_ in step["works"]:
            assert prefill
            prefilled[number] = prefilled.get(number, 0) + length
        for number, at in zip(step["decodes"], step["at"], strict=True):
            decoded.setdefault(number, []).append(at)
    for end in ends:
        number = end["number"]
        assert end["prompt"] == usage["prompt_tokens"]
        assert prefilled[number] == end["prompt"] - end["cached"]
        assert decoded[number] == list(range(end["prompt"], end["prompt"] + 4))
        assert 0 < end["ttft"] <= end["ms"]
    assert any(end["cached"] for end in ends), "the second answer shares the prompt"
    assert len([step for step in steps if step["works"]]) > 2
    last = [record for record in seen if record["kind"] == "map"][-1]
    assert [last["cells"].count(digit) for digit in "0123"] == last["counts"]
    assert last["counts"][1:3] == [0, 0]
    assert last["counts"][3] > 0
    assert "secret" not in json.dumps(seen)


def test_who_does_not_read_loses_the_oldest_and_is_told() -> None:
    watcher = Watcher()
    piece = bytes(live.BACKLOG_BYTES // 4)
    for n in range(6):
        watcher.put(b"%d" % n + piece[1:], n + 1)
    batches, lost = watcher.take()
    assert [batch[:1] for batch in batches] == [b"2", b"3", b"4", b"5"]
    assert lost == 1 + 2
    assert watcher.take() == ([], 0)


def test_a_large_cache_is_shown_in_fewer_cells() -> None:
    states = bytes([0, 0, 0, 2] * messages.MAP_CELLS)
    shown = messages.cells(7, states)
    assert (shown["step"], shown["each"], shown["counts"], shown["cells"]) == (
        7,
        4,
        [3 * messages.MAP_CELLS, 0, messages.MAP_CELLS, 0],
        "2" * messages.MAP_CELLS,
    )


async def test_a_pool_whose_map_fails_is_said_and_the_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(pool: Any) -> bytes:
        raise RuntimeError("lost count")

    monkeypatch.setattr(PagedBlockManager, "states", fails)
    async with running(engine=ENGINE) as server, asyncio.timeout(HANG_S), watching(server) as records:
        assert (await anext(records))["fault"] is None
        await server.post({"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        seen: list[Any] = []
        while {each["kind"] for each in seen} != {"step", "end", "hello"}:
            seen.append(await anext(records))
        (said,) = [each["fault"] for each in seen if each["kind"] == "hello"]
        assert said.startswith("the pool cannot make one: RuntimeError: lost count")
        await server.post({"prompt": "x", "max_tokens": 1})
        assert (await anext(records))["kind"] == "step", "it goes on"
        async with watching(server) as others:
            assert (await anext(others))["fault"] == said
    assert len([each for each in caplog.records if "made no map" in each.message]) == 1


async def test_it_can_be_turned_off() -> None:
    async with running(engine=ENGINE, server={"access_log": False, "console": {"enabled": False}}) as server:
        for path in ("/console", "/console/app.js", "/console/api/server", "/console/api/steps"):
            assert (await ask(server, "GET", path)).status == 404
