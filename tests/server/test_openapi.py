"""/openapi.json and /docs as they are answered. tests/server/test_api.py has what they say."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web
from tests.serving import HANG_S

from infer_server.openapi import pages


async def test_many_who_ask_for_the_document_leave_others_their_turns() -> None:
    """It has hundreds of kilobytes, so those who waited for it are not all answered in one turn of the loop."""
    openapi, _ = pages([], "name")
    turn, answered = 0, list[int]()

    async def ask() -> None:
        response = await openapi(cast(web.Request, None))
        assert isinstance(response, web.Response)
        assert response.body is not None
        answered.append(turn)

    asked = [asyncio.ensure_future(ask()) for _ in range(20)]
    all_answered = asyncio.gather(*asked)
    async with asyncio.timeout(HANG_S):
        while not all_answered.done():
            turn += 1
            await asyncio.sleep(0)
    await all_answered
    assert len(set(answered)) == len(asked)
