"""``infer models``, before servers on sockets."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.router.test_gateway import THREE, front
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
        assert "answers 401; if it has keys, set server.api_keys to one of them" in capsys.readouterr().err
    assert await models(f.url) == 2
    assert "start infer serve, or set server.host and server.port" in capsys.readouterr().err
