"""Has the server's own tests run against an ingress: ``pytest -p tests.ray.behind tests/server tests/clients``.

Where a test starts a server, there are two of it and an ingress before them, with the settings that ``infer ray`` gives
them. A real Ray places the servers of the clients' tests; those that a test looks into (``running``) are in its own
process."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, cast

import aiohttp
import pytest
from tests import serving as servers
from tests.serving import Running

from infer.contracts.command import CommandContext
from infer.contracts.sections import Settings
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_ray import command
from infer_router.fleet import Fleet
from infer_router.ingress import Ingress
from infer_router.ingress import serving as serving_ingress
from infer_server.http.sockets import bind, listen
from infer_server.testing import Serving

OTHERWISE = {
    "usage is in the log of a replica alone": (
        "test_an_echo_without_an_answer_is_billed_as_none",
        "test_an_echo_that_is_streamed_is_billed_as_if_whole",
        "test_every_chunk_says_what_it_has_to",
        "test_the_end_user_is_in_the_access_log",
    ),
    "counts of one engine, or a prompt that is too short to be routed": (
        "test_metrics_count_what_was_computed_and_what_was_needed",
        "test_metrics_count_passes_that_raised",
        "test_a_common_prefix_is_computed_once_and_not_across_salts",
        "test_two_run_four_wait_two_are_refused",
        "test_no_body_is_read_while_there_is_no_place",
        "test_a_stream_that_is_refused_after_a_place_was_seen_is_an_error",
        "test_headers_come_when_requests_are_taken_and_comments_until_there_is_a_token",
        "test_the_next_turn_finds_the_first_in_the_cache",
        "test_all_that_an_answer_holds_can_be_sent_back",
        "test_three_turns_with_tools_go_on_from_the_tokens_that_were_computed",
    ),
    "looks into the engine or changes the server's code": (
        "test_a_client_that_does_not_read_is_dropped",
        "test_a_stream_pings_while_its_prompt_is_computed",
        "test_what_a_server_did_not_finish_has_failed",
        "test_an_answer_goes_out_though_the_disk_is_full",
        "test_a_server_says_that_a_pass_is_stuck",
        "test_responses_in_the_background_leave_places_to_others",
    ),
    "each of two replicas has a store, a log and a limit of its own": (
        "test_a_conversation_is_no_larger_than_a_body_may_be",
        "test_the_vocabulary_is_read_at_the_start_in_a_thread_and_for_a_store_alone",
        "test_clients_are_told_nothing_of_the_file",
    ),
    "an ingress says in its own words that no replica is there": (
        "test_a_draining_server_finishes_what_it_has_and_takes_no_more",
        "test_what_does_not_finish_within_the_drain_is_told_so",
    ),
    "an ingress writes its own errors as OpenAI does": ("test_errors_are_the_clients_exceptions",),
}
"""Tests that do not hold for an ingress, by why."""
FOLDER: list[str] = []


def planned(plugins: Plugins, **sections: Any) -> dict[str, Any]:
    given = {"model": {"path": "demo"}, "kernels": {"threads": 1}, "server": {"access_log": False}} | sections
    loaded = load_settings(plugins, env={}, overrides=given | {"ray": {"replicas": 2, "cpus": 0}}, read_file=False)
    return command.plan(CommandContext(loaded.settings, loaded.sources, plugins, ()), local=True)


class Loops:
    """Two servers' engine loops, as far as tests look at them."""

    def __init__(self, loops: Sequence[Any]) -> None:
        self._loops = loops

    @property
    def num_open(self) -> int:
        return sum(loop.num_open for loop in self._loops)


@asynccontextmanager
async def running(plugins: Sequence[object] = (), **sections: Any) -> AsyncIterator[Running]:
    found = Plugins.discover(plugins)
    plan = planned(found, **sections)

    def settings(kind: str) -> Settings:
        return load_settings(found, env={}, overrides=plan[kind], read_file=False).settings

    async with AsyncExitStack() as stack:
        loops, table = [], {}
        for name in ("r0", "r1"):
            own = Plugins.discover(plugins)  # as in processes of their own: observers hear of one engine
            engine_loop, served = await asyncio.to_thread(servers.start_checked_once, settings("engine"), own)
            stack.callback(engine_loop.close)
            app = servers.make_app_described_once(engine_loop, served, own, settings("engine"))
            table[name] = {"url": await stack.enter_async_context(listen(app, bind("127.0.0.1", 0)))}
            loops.append(engine_loop)
        ingress = Ingress(Fleet(key=plan["key"]), settings("ingress").server, poll_s=0.05)
        ingress.fleet.update(table)
        url = await stack.enter_async_context(serving_ingress(ingress, bind("127.0.0.1", 0)))
        yield Running(await stack.enter_async_context(aiohttp.ClientSession()), url, Loops(loops))


@contextmanager
def serving(**sections: Any) -> Iterator[Serving]:
    model = {"path": "demo"} | sections.pop("model", {})
    plan = planned(Plugins.discover(), model=model, **sections)
    plan["name"] += plan["key"][-8:]
    if not FOLDER:
        FOLDER.append(tempfile.mkdtemp(prefix="infer-"))
        url = command.start(plan, FOLDER[0])
    else:
        url = command.serve(plan)
    from ray import serve  # not before ``start`` has set what Ray reads when it is imported

    yield Serving(url, cast(Any, None))
    serve.delete(plan["name"])


def pytest_configure(config: pytest.Config) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    servers.running, servers.serving = running, serving


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {name for names in OTHERWISE.values() for name in names}
    unknown = left_out - {item.name.partition("[")[0] for item in items}
    assert not unknown, f"no longer there: {unknown}"
    items[:] = [item for item in items if starts_servers(item) and item.name.partition("[")[0] not in left_out]


def starts_servers(item: pytest.Item) -> bool:
    """Whether a test is of a server at all. Those that ask it from outside have it from a fixture."""
    assert isinstance(item, pytest.Function)
    return inspect.iscoroutinefunction(item.function) or "server" in item.fixturenames


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER:
        command.end()
        shutil.rmtree(FOLDER[0], ignore_errors=True)
