"""What ``infer ray`` makes of an engine that does not answer any more."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from infer_ray.application import Pulse, examine


class Running:
    """A process that runs until it is ended."""

    code: int | None = None

    def end(self, drain_s: float) -> None:
        assert drain_s == 0, "it would wait for what is stuck"
        self.code = -9


async def test_an_engine_that_is_stuck_for_too_long_is_ended_so_that_there_is_room_for_another() -> None:
    statuses = [200, 503, 503, 200, 503]

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(0))

    app = web.Application()
    app.router.add_get("/health", health)
    process = Running()
    async with TestServer(app) as server:
        patient, hasty = (Pulse(str(server.make_url("")).rstrip("/"), patience_s) for patience_s in (3600.0, -1.0))
        seen = [patient._good]
        for _ in range(2):
            await examine(process, patient)  # type: ignore[arg-type]
            seen.append(patient._good)
        assert seen[0] < seen[1] == seen[2], "when it was last well"
        assert await hasty.lost_s() is not None
        assert await patient.lost_s() is None
        with pytest.raises(RuntimeError, match=r"/health has failed for \d+ s \(server.router.stuck_timeout_s\)"):
            await examine(process, hasty)  # type: ignore[arg-type]
    assert not statuses
    assert process.code == -9
    with pytest.raises(RuntimeError, match="ended with code -9"):
        await examine(process, patient)  # type: ignore[arg-type]


async def test_an_engine_that_is_gone_or_does_not_answer_has_no_pulse(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert await Pulse(url, 3600.0).lost_s() is None
    assert await Pulse(url, -1.0).lost_s() is not None
