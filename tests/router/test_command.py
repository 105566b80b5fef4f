"""``infer models``, before servers on sockets."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.router.test_gateway import THREE, front
from tests.server.test_fetching import answering
from tests.serving import serving

from infer.commands.cli import main


async def models(url: str, *more: str) -> int:
    port = url.rpartition(":")[2]
    return await asyncio.to_thread(main, ["models", "--server.port", port, *more])


async def test_every_model_is_shown_with_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    async with front(THREE) as f:
        await f.post("/api/generate", {"model": "b", "keep_alive": -1})
        assert await models(f.url) == 0
        heading, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
        assert heading == ["name", "state", "size", "expires"]
        assert {row[0]: row[1] for row in rows} == dict.fromkeys(THREE, "unloaded") | {"b": "loaded"}
        assert await models(f.url, "--json") == 0
        said = {each["id"]: each for each in json.loads(capsys.readouterr().out)}
        assert said["b"]["state"] == "loaded"
        assert said["b"]["size_bytes"] == 4
        assert f.machine.loads == ["b"], "who looks wakes nobody"


async def test_a_server_of_one_model_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as one:
        assert await models(one.url) == 0
    assert "loaded" in capsys.readouterr().out


async def test_keys_are_shown_and_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with front(THREE, server={"api_keys": ["k"]}) as f:
        assert await models(f.url, "--server.api_keys", "k") == 0
        capsys.readouterr()
        assert await models(f.url) == 2
        assert "answers 401 to /v1/models; set server.api_keys to one of its keys" in capsys.readouterr().err
    assert await models(f.url) == 2
    assert "start infer serve, or set server.host and server.port" in capsys.readouterr().err


async def test_no_proxy_and_no_other_host_gets_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ("--server.api_keys", "k")
    with answering("404 Not Found") as (other, got), answering(f"302 Found\r\nLocation: {other}/v1/models") as (url, _):
        monkeypatch.setenv("http_proxy", other)
        monkeypatch.setenv("no_proxy", "")
        assert await models(url, *key) == 2
        assert f"redirects /v1/models to {other}" in " ".join(capsys.readouterr().err.split())
        async with front(THREE, server={"api_keys": ["k"]}) as f:
            assert await models(f.url, *key) == 0
    assert got == []


async def test_another_program_is_no_server_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    with answering("200 OK\r\n\r\n[1]") as (url, _):
        assert await models(url) == 2
    assert f"What answers at {url} is no server of infer" in " ".join(capsys.readouterr().err.split())


def test_a_host_that_is_none_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--server.host", "a b"]) == 2
    assert "server.host = 'a b' is no host's name or address" in " ".join(capsys.readouterr().err.split())
