"""The console in front of several models: it is told of all, shows one, and wakes none."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.console.browser import browsing, needs_browser
from tests.router.test_gateway import KEY, front
from tests.router.test_loader import until
from tests.serving import HANG_S, chatty

from infer.contracts.command import CommandContext
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_router.machine import LocalMachine
from infer_router.plan import Plan, several
from infer_router.serve import gateway
from infer_server.http.sockets import bind

TWO = {"a": "a", "b": "b", "opus": "b"}
OWN = {"X-Infer-Console": "1"}
CHOSEN = "document.querySelector('#models').value"
OPTIONS = "[...document.querySelector('#models').options].map((each) => each.textContent).join()"
CHOOSE = """(name) => {
    const models = document.querySelector('#models');
    models.value = name;
    models.dispatchEvent(new Event('change'));
}"""
ANSWER = "document.querySelector('article.assistant:last-child')"


def plan_of(folder: Path, text: str) -> tuple[Plan, Any]:
    (folder / "settings.toml").write_text(text)
    plugins = Plugins.discover()
    loaded = load_settings(plugins, file=str(folder / "settings.toml"), env={})
    return several(CommandContext(loaded.settings, loaded.sources, plugins, ())), loaded.settings


async def test_the_page_is_there_before_any_model_is() -> None:
    async with front(TWO, console=True) as f:
        status, page, headers = await f.ask("GET", "/console")
        assert (status, "<title>infer</title>" in page) == (200, True)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        status, told, _ = await f.ask("GET", "/console/api/server?model=opus", headers=OWN)
        assert (status, told["model"], told["loaded"], told["keys"]) == (200, "b", False, False)
        assert told["models"] == [{"name": "a", "state": "unloaded"}, {"name": "b", "state": "unloaded"}]
        status, told, _ = await f.ask("GET", "/console/api/steps?model=b", headers=OWN)
        assert (status, "'b' is not loaded" in told["error"]["message"]) == (503, True)
        assert f.machine.loads == []
        assert not f.machine.asked


async def test_what_is_loaded_speaks_for_itself() -> None:
    async with front(TWO, console=True) as f:
        await f.post("/v1/completions", {"model": "b", "prompt": "x"})
        for query, loaded in (("?model=b", True), ("?model=a", False), ("?model=gone", True), ("", True)):
            f.machine.asked.clear()
            _, told, _ = await f.ask("GET", f"/console/api/server{query}", headers=OWN)
            assert (told["model"], told["loaded"]) == ("b" if loaded else "a", loaded), query
            assert [each["state"] for each in told["models"]] == ["unloaded", "loaded"]
            if loaded:
                (name, method, path, headers, _) = f.machine.asked[0]
                assert (name, method, path) == ("b", "GET", "/console/api/server")
                assert headers["Authorization"] == f"Bearer {KEY}"
                assert told["by"] == "b"
        assert (await f.ask("GET", "/console/api/steps?model=b", headers=OWN))[1] == {"by": "b"}


async def test_only_the_page_or_a_key_gets_in() -> None:
    async with front(TWO, console=True) as f:
        assert (await f.ask("GET", "/console/api/server"))[0] == 403
        assert (await f.ask("GET", "/console/api/steps"))[0] == 403
        crossed = OWN | {"Sec-Fetch-Site": "cross-site"}
        assert (await f.ask("GET", "/console/api/server", headers=crossed))[0] == 403
    async with front(TWO, server={"api_keys": "sesame"}, console=True) as f:
        for path in ("/console/api/server", "/console/api/steps", "/v1/models"):
            assert (await f.ask("GET", path, headers=OWN))[0] == 401, path
        assert (await f.ask("GET", "/console"))[0] == 200
        login = "/console/api/login"
        assert (await f.post(login, {"key": "wrong"}, headers=OWN))[0] == 401
        assert (await f.post(login, {"key": "x" * 9000}, headers=OWN))[0] == 413
        status, _, headers = await f.post(login, {"key": "sesame"}, headers=OWN)
        assert status == 204
        cookie = OWN | {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        _, told, _ = await f.ask("GET", "/console/api/server", headers=cookie)
        assert told["keys"]
        assert (await f.post("/v1/completions", {"model": "a", "prompt": "x"}, headers=cookie))[1] == {"by": "a"}
        assert (await f.post("/v1/completions", {"model": "a", "prompt": "x"}))[0] == 401
        assert (await f.post("/console/api/logout", {}, headers=cookie))[0] == 204
        assert (await f.ask("GET", "/console/api/server", headers=cookie))[0] == 401


async def test_who_watches_is_let_go_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_router.console.ASKED_S", 0.01)
    async with front(TWO, server={"api_keys": "sesame"}, console=True) as f:
        _, _, headers = await f.post("/console/api/login", {"key": "sesame"}, headers=OWN)
        cookie = OWN | {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        await f.post("/v1/completions", {"model": "b", "prompt": "x"}, headers=cookie)
        f.machine.gate.clear()
        watching = asyncio.create_task(f.ask("GET", "/console/api/steps?model=b", headers=cookie))
        await until(lambda: f.machine.asked[-1][2] == "/console/api/steps")
        assert (await f.post("/console/api/logout", {}, headers=cookie))[0] == 204
        with suppress(aiohttp.ClientError):  # or the client has asked again, without a session
            assert (await watching)[0] == 401
        f.machine.gate.set()


@pytest.mark.parametrize(("text", "there"), [("", True), ("[server.console]\nenabled = false\n", False)])
async def test_the_setting_decides(text: str, there: bool, tmp_path: Path) -> None:
    plan, _ = plan_of(tmp_path, text + "[models.a.model]\npath = 'demo'\n[models.b.model]\npath = 'demo'\n")
    assert plan.console == there
    async with front(TWO, console=there) as f:
        assert (await f.ask("GET", "/console"))[0] == (200 if there else 503)


@pytest.mark.slow
@needs_browser
async def test_a_browser_chooses_a_model_and_asking_it_loads_it(tmp_path: Path) -> None:
    model = "".join(f"{key} = {json.dumps(value)}\n" for key, value in chatty(tmp_path).items())
    plan, settings = plan_of(
        tmp_path,
        "[kernels]\nthreads = 1\n[engine]\nmax_batch_size = 4\nmax_seq_len = 256\n[server]\napi_keys = 'sesame'\n"
        f"[models.small.model]\n{model}[models.other.model]\n{model}[models.other.engine]\nmax_seq_len = 128\n",
    )
    machine = LocalMachine(plan.engines)
    memory = machine.memory = 4 << 30
    async with (
        machine,
        gateway(plan, settings.server, machine, memory, bind("127.0.0.1", 0)) as (_, url, _),
        asyncio.timeout(HANG_S),
        browsing() as tab,
    ):
        await tab.open(f"{url}/console")
        await tab.until("!document.querySelector('#login').hidden")
        await tab.type("#key", "sesame")
        await tab.press("Enter")
        await tab.until("!document.querySelector('#chat').hidden")
        assert await tab.run(OPTIONS) == "small (unloaded),other (unloaded)"
        await tab.run(f"({CHOOSE})('other')")
        await tab.until("document.title.startsWith('other')")
        await tab.run("document.querySelector('#tab-about').click()")
        await tab.until("document.querySelector('#about').textContent.includes('other is not loaded')")
        await tab.run("document.querySelector('#tab-chat').click()")
        await tab.type("#text", "a loop")
        await tab.press("Enter")
        await tab.until(f"{ANSWER}?.querySelector('footer').textContent.includes('seed')")
        await tab.until(f"{OPTIONS} === 'small (unloaded),other'")
        await tab.until("document.querySelector('#about').textContent.includes('at most 128 tokens')")
        assert await tab.run("document.querySelector('#sampling').elements.max_tokens.max") == "128"
        await tab.run("document.querySelector('#tab-live').click()")
        await tab.until("document.querySelector('#state').textContent === 'watching'")
        await tab.until("Number(document.querySelector('#at').textContent) > 0")
        await tab.run(f"({CHOOSE})('small')")
        await tab.until("document.querySelector('#state').textContent.includes('not loaded')")
        await tab.until("document.querySelector('#scrub').disabled && !document.querySelector('#at').textContent")
        await tab.until(
            "[...document.querySelectorAll('#figures dd')].every((each) => '–0'.includes(each.textContent))"
        )
        await tab.run(f"({CHOOSE})('other')")
        await tab.until("Number(document.querySelector('#at').textContent) > 0")
        await tab.reload()
        await tab.until("document.title.startsWith('other')")
        assert await tab.run(CHOSEN) == "other"
        # What a browser itself logs of the first request, which had no cookie.
        assert [each for each in tab.complaints if "401" not in each] == []
