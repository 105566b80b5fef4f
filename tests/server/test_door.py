"""The door to the engine: many requests at once, and an event loop that others need, too."""

from __future__ import annotations

import asyncio

import pytest
from tests.core.engine.test_loop import Looped, request

from infer import SamplingParams
from infer.contracts.request import Event, Request
from infer.engine.loop import Mailbox
from infer.errors import QueueFullError
from infer_server.door import AT_ONCE, AsyncDoor


class Ready:
    """An engine that has answered before anybody asks for the first event."""

    def submit_all(self, requests: list[Request], mailbox: Mailbox) -> int:
        events = [Event(requests[0].id, (i,)) for i in range(100)]
        mailbox([*events, Event(requests[0].id, finish_reason="length")])
        return 1


async def test_events_that_have_piled_up_do_not_hold_up_the_event_loop() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    request = Request.make([1], SamplingParams(), vocab_size=9, max_seq_len=64)
    seen = []
    async for event in AsyncDoor(Ready()).stream(request):  # type: ignore[arg-type]
        seen.append((event.token_ids, turns))
    task.cancel()
    assert [tokens for tokens, _ in seen] == [*((i,) for i in range(100)), ()]
    assert max([turn for _, turn in seen].count(turn) for turn in range(turns + 1)) <= AT_ONCE + 1


async def test_a_stream_that_has_begun_waits_for_places_that_others_have_taken() -> None:
    looped = Looped(places=2)
    looped.scheduler.go.set()
    try:
        door = AsyncDoor(looped.loop)
        ended: list[str] = []
        tasks: list[asyncio.Task[None]] = []

        async def stream(*ids: str) -> None:
            async for event in door.stream(*map(request, ids), most=1):
                assert sum(id.startswith(ids[0][0]) for id in looped.loop._open) <= 1
                if event.finish_reason is not None:
                    ended.append(event.request_id)
                    if event.request_id == "a0":  # two others enter before the next of these can
                        tasks.extend(asyncio.create_task(stream(id)) for id in ("b0", "c0"))
                        await asyncio.sleep(0)
                        assert looped.loop.num_open == 2

        async with asyncio.timeout(300):
            await stream("a0", "a1", "a2")
            await asyncio.gather(*tasks)
        assert sorted(ended) == ["a0", "a1", "a2", "b0", "c0"]
        looped.submit("full0", lambda events: None, max_tokens=200)
        looped.submit("full1", lambda events: None, max_tokens=200)
        with pytest.raises(QueueFullError):
            await anext(door.stream(request("d0")))
        looped.loop.abort("full0")
        async with asyncio.timeout(300):
            while looped.loop.num_open == 2:
                await asyncio.sleep(0)
            await anext(full := door.stream(request("e0", max_tokens=200)))
            waiting = asyncio.create_task(anext(door.stream(request("d0"), patient=True)))
            await asyncio.sleep(0)
            await full.aclose()
            assert (await waiting).request_id == "d0"
    finally:
        looped.loop.close()
