"""The task that owns the models, on a machine that is made up: every wait is for an event."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from infer.errors import EngineDeadError, QueueFullError, SettingsError
from infer_router.loader import Loader, NeverFitsError
from infer_router.rules import Rules

LIMIT_S = 60.0
MEMORY = 10


class Engine:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.url = machine, name, f"http://{name}"
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.well = True
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.ends = 0
        self.work = 0

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    async def healthy(self) -> bool:
        return self.well

    def die(self, code: int) -> None:
        if not self.code.done():
            self.code.set_result(code)
            self.machine.live.pop(self.name)

    async def end(self, drain_s: float) -> None:
        self.ends += 1
        await self.may_end.wait()
        self.die(0)


class Machine:
    """Loads at once, unless the gate of a model is closed. Notes what it has, and that this never is too much."""

    def __init__(self, memory: int = MEMORY, **sizes: int | Exception) -> None:
        self.memory, self.sizes = memory, sizes
        self.sizing = {name: asyncio.Event() for name in sizes}
        self.gates = {name: asyncio.Event() for name in sizes}
        for event in (*self.gates.values(), *self.sizing.values()):
            event.set()
        self.faults: dict[str, Exception] = {}
        self.live: dict[str, Engine | None] = {}
        self.loads: Counter[str] = Counter()
        self.canceled: list[str] = []
        self.urls: dict[str, str | None] = {}
        self.spare_bytes = math.inf
        self.spare = False
        self.sizing_bytes = 0
        self.expected: list[str] = []
        self.reckoning = 0
        """How many sizes are being told."""
        self.asked: Counter[str] = Counter()
        """How often a process was asked what it has to do."""

    async def size(self, name: str) -> Mapping[str, Any]:
        self.reckoning += 1
        assert self.reckoning == 1 or self.held <= self.memory, "too many processes that do the arithmetic"
        try:
            await self.sizing[name].wait()
        finally:
            self.reckoning -= 1
        if isinstance(found := self.sizes[name], Exception):
            raise found
        return {"bytes": found}

    async def start(self, name: str) -> Engine:
        assert name not in self.live, "two processes of one model"
        self.live[name] = None
        self.spare = False  # which is this model's process
        assert self.held <= self.memory, f"{sorted(self.live)} do not fit"
        self.loads[name] += 1
        try:
            await self.gates[name].wait()
            if name in self.faults:
                raise self.faults[name]
        except BaseException as error:
            del self.live[name]
            if isinstance(error, asyncio.CancelledError):
                self.canceled.append(name)
            raise
        engine = self.live[name] = Engine(self, name)
        return engine

    @property
    def held(self) -> int:
        lent = max(0, self.reckoning - 1) * self.sizing_bytes
        return lent + sum(size for each in self.live if isinstance(size := self.sizes[each], int))

    def expect(self, name: str) -> None:
        assert name not in self.live, "it is loaded already"
        self.expected.append(name)

    def may_spare(self, room: bool) -> None:
        self.spare = self.spare or room
        if room:
            assert self.held + self.spare_bytes <= self.memory, f"{sorted(self.live)} leave no room for a process"
            assert None not in self.live.values(), "it takes the processor while a model is loaded"

    async def working(self, name: str) -> int:
        self.asked[name] += 1
        engine = self.live.get(name)
        return engine.work if engine is not None else 0

    def engine(self, name: str) -> Engine:
        engine = self.live[name]
        assert engine is not None
        return engine


@asynccontextmanager
async def loading(machine: Machine, keep_alive_s: float = math.inf, **rules: Any) -> AsyncIterator[Loader]:
    keeps = dict.fromkeys(machine.sizes, keep_alive_s)
    given = Rules(machine.memory, keeps, health_s=0.01, backoff_s=0.01, spare_bytes=machine.spare_bytes)
    given = replace(given, sizing_bytes=machine.sizing_bytes, **rules)
    loader = Loader(machine, given, machine.urls.__setitem__, machine.working)
    owning = asyncio.create_task(loader.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield loader
    finally:
        assert not owning.done(), owning
        owning.cancel()
        await asyncio.wait((owning,))
        assert all(engine is not None for engine in machine.live.values()), "a load has outlived the task"


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not reached():
            await asyncio.sleep(0)


def state(loader: Loader, name: str) -> str:
    return str(loader.status()[name]["state"])


def about(loader: Loader, name: str) -> dict[str, Any]:
    return loader.status()[name]


async def used(loader: Loader, name: str, keep_alive_s: float | None = None) -> None:
    async with loader.use(name, keep_alive_s):
        assert state(loader, name) == "loaded"


class Holding:
    """A request that goes on until it is told to end."""

    def __init__(self, loader: Loader, name: str) -> None:
        self.inside, self._end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(loader, name))

    async def _run(self, loader: Loader, name: str) -> None:
        async with loader.use(name):
            self.inside.set()
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task


async def holding(loader: Loader, name: str) -> Holding:
    held = Holding(loader, name)
    await held.inside.wait()
    return held


async def test_many_requests_load_a_model_once() -> None:
    machine = Machine(a=4)
    async with loading(machine) as loader:
        await asyncio.gather(*(used(loader, "a") for _ in range(50)))
        await used(loader, "a")
    assert machine.loads == {"a": 1}


async def test_the_least_recently_used_one_makes_room() -> None:
    machine = Machine(a=4, b=4, c=4)
    async with loading(machine) as loader:
        for name in ("a", "b", "a", "c"):
            await used(loader, name)
        assert machine.live.keys() == {"a", "c"}
        assert machine.urls["b"] is None


async def test_the_machine_knows_what_is_loaded_next_once_others_end() -> None:
    machine = Machine(a=10, b=10)
    async with loading(machine) as loader:
        held = await holding(loader, "a")
        machine.engine("a").may_end.clear()
        waiting = asyncio.create_task(used(loader, "b"))
        await until(lambda: about(loader, "b")["waiting"])
        await until(lambda: about(loader, "b")["size_bytes"] is not None)
        await asyncio.sleep(0)
        assert not machine.expected, "its requests may go on for long"
        engine = machine.engine("a")
        await held.end()
        await until(lambda: engine.ends)
        assert {*machine.expected} == {"b"}
        engine.may_end.set()
        await waiting
        await used(loader, "b")
        assert {*machine.expected} == {"b"}


async def test_a_load_that_hangs_blocks_no_other_and_is_stopped() -> None:
    machine = Machine(a=4, b=4, c=4)
    machine.gates["a"].clear()
    async with loading(machine, load_timeout_s=0.5) as loader:
        waiting = asyncio.create_task(used(loader, "a"))
        await until(lambda: "a" in machine.live)
        for name in ("b", "c", "b"):
            await used(loader, name)
        assert not waiting.done()
        with pytest.raises(EngineDeadError, match=r"longer than server\.router\.load_timeout_s = 0\.5 s"):
            await waiting
        assert machine.canceled == ["a"]
        assert state(loader, "a") == "failed"
        machine.gates["a"].set()
        await used(loader, "a")


async def test_an_arithmetic_that_hangs_blocks_no_other() -> None:
    machine = Machine(a=4, b=4)
    machine.sizing["a"].clear()
    async with loading(machine, load_timeout_s=0.5) as loader:
        waiting = asyncio.create_task(used(loader, "a"))
        await used(loader, "b")
        with pytest.raises(EngineDeadError, match="The model 'a' cannot be loaded: it took longer"):
            await waiting
        machine.sizing["a"].set()
        await used(loader, "a")


async def test_who_comes_during_the_arithmetic_is_served() -> None:
    machine = Machine(a=4)
    machine.sizing["a"].clear()
    async with loading(machine) as loader:
        waiting = [asyncio.create_task(used(loader, "a")) for _ in range(3)]
        await until(lambda: about(loader, "a")["waiting"] == 3)
        machine.sizing["a"].set()
        await asyncio.gather(*waiting)


async def test_what_the_arithmetic_refuses_is_said_and_asked_again_next_time() -> None:
    machine = Machine(a=SettingsError("no such checkpoint"))
    async with loading(machine) as loader:
        with pytest.raises(EngineDeadError, match="no such checkpoint"):
            await used(loader, "a")
        machine.sizes["a"] = 4
        await used(loader, "a")


async def test_a_process_that_dies_while_it_loads_fails_who_waits_and_no_one_later() -> None:
    machine = Machine(a=4)
    machine.faults["a"] = EngineDeadError("its process ended with code 3")
    async with loading(machine) as loader:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="ended with code 3"):
                await used(loader, "a")
        del machine.faults["a"]
        machine.sizes["a"] = 5  # another checkpoint is there
        await used(loader, "a")
        assert about(loader, "a")["size_bytes"] == 5
    assert machine.loads["a"] == 3


async def test_who_comes_while_another_is_unloaded_is_served() -> None:
    machine = Machine(a=6, b=6)
    async with loading(machine) as loader:
        await used(loader, "a")
        engine = machine.engine("a")
        engine.may_end.clear()
        first = asyncio.create_task(used(loader, "b"))
        await until(lambda: engine.ends)
        assert state(loader, "a") == "unloading"
        back = asyncio.create_task(used(loader, "a"))
        await until(lambda: about(loader, "a")["waiting"])
        engine.may_end.set()
        await asyncio.gather(first, back)
    assert machine.loads == {"a": 2, "b": 1}


async def test_a_victim_that_has_died_already_is_no_surprise() -> None:
    machine = Machine(a=6, b=6)
    async with loading(machine) as loader:
        held = await holding(loader, "a")
        waiting = asyncio.create_task(used(loader, "b"))
        await until(lambda: about(loader, "b")["waiting"])
        machine.engine("a").die(9)  # it was to leave after its request
        await waiting
        await held.end()


async def test_one_that_dies_while_it_is_being_ended_is_no_surprise() -> None:
    machine = Machine(a=6, b=6)
    async with loading(machine) as loader:
        await used(loader, "a")
        engine = machine.engine("a")
        engine.may_end.clear()
        waiting = asyncio.create_task(used(loader, "b"))
        await until(lambda: engine.ends)
        engine.die(9)
        await waiting
        engine.may_end.set()
        await used(loader, "a")


async def test_a_busy_model_leaves_after_its_requests_and_who_comes_meanwhile_waits() -> None:
    machine = Machine(a=6, b=6)
    async with loading(machine) as loader:
        held = [await holding(loader, "a") for _ in range(2)]
        waiting = asyncio.create_task(used(loader, "b"))
        await until(lambda: about(loader, "b")["waiting"])
        late = asyncio.create_task(used(loader, "a"))
        await until(lambda: about(loader, "a")["waiting"])
        await held[0].end()
        assert machine.live.keys() == {"a"}
        assert not waiting.done()
        await held[1].end()
        await waiting
        await late
    assert machine.loads == {"a": 2, "b": 1}


async def test_a_busy_model_stays_if_who_wanted_its_room_has_left() -> None:
    machine = Machine(a=6, b=6)
    async with loading(machine) as loader:
        held = await holding(loader, "a")
        waiting = asyncio.create_task(used(loader, "b"))
        await until(lambda: about(loader, "b")["waiting"])
        late = asyncio.create_task(used(loader, "a"))
        await until(lambda: about(loader, "a")["waiting"])
        waiting.cancel()
        await late
        await used(loader, "a")
        await held.end()
        await used(loader, "a")
    assert machine.loads == {"a": 1}


async def test_a_busy_model_that_is_let_go_leaves_after_its_requests() -> None:
    machine = Machine(a=6)
    async with loading(machine) as loader:
        held = await holding(loader, "a")
        loader.keep("a", 0.0)
        await asyncio.sleep(0)
        assert machine.engine("a").ends == 0
        await held.end()
        await until(lambda: not machine.live)
        await until(lambda: state(loader, "a") == "unloaded")


async def test_a_model_that_nobody_asks_is_let_go_in_time() -> None:
    machine = Machine(a=4, b=4)
    async with loading(machine, keep_alive_s=0.05) as loader:
        await used(loader, "a", math.inf)
        await used(loader, "b")
        assert about(loader, "a")["expires_in_s"] is None
        await until(lambda: state(loader, "b") == "unloaded")
        await used(loader, "a", 0.0)
        await until(lambda: state(loader, "a") == "unloaded")


async def test_a_model_that_works_in_the_background_is_not_idle() -> None:
    machine = Machine(a=6, b=6)
    async with loading(machine, keep_alive_s=0.0) as loader:
        async with loader.use("a"):
            engine = machine.engine("a")
            engine.work = 1
        await until(lambda: machine.asked["a"] > 1)
        assert about(loader, "a")["expires_in_s"] is None
        await used(loader, "a")
        waiting = asyncio.create_task(used(loader, "b"))
        await until(lambda: about(loader, "b")["waiting"])
        asked = machine.asked["a"]
        await until(lambda: machine.asked["a"] > asked + 2)
        assert (machine.loads, engine.ends) == ({"a": 1}, 0)
        engine.work = 0
        await waiting
        assert engine.ends == 1


async def test_another_makes_room_before_one_that_works_in_the_background() -> None:
    machine = Machine(a=4, b=4, c=4)
    async with loading(machine) as loader:
        async with loader.use("a"):
            machine.engine("a").work = 1
        await used(loader, "b")
        await used(loader, "c")
        assert machine.live.keys() == {"a", "c"}


async def test_one_that_crashes_comes_back_with_the_next_request_and_harms_no_other() -> None:
    machine = Machine(a=4, b=4)
    async with loading(machine) as loader:
        held = await holding(loader, "b")
        await used(loader, "a")
        machine.engine("a").die(9)
        await until(lambda: state(loader, "a") == "unloaded")
        assert machine.urls["a"] is None
        assert about(loader, "a")["problem"] == "its process ended with code 9"
        await used(loader, "a")
        await held.end()
    assert machine.loads == {"a": 2, "b": 1}


async def test_who_had_a_model_that_crashed_gets_it_again_however_many_wait() -> None:
    machine = Machine(a=4, b=4)
    async with loading(machine, max_waiting=1) as loader:
        async with loader.use("a"):
            machine.engine("a").die(9)
            await until(lambda: state(loader, "a") == "unloaded")
            machine.gates["b"].clear()
            waiting = asyncio.create_task(used(loader, "b"))
            await until(lambda: about(loader, "b")["waiting"])
            with pytest.raises(QueueFullError):
                await used(loader, "a")
            async with loader.use("a", again=True):
                assert machine.loads["a"] == 2
        machine.gates["b"].set()
        await waiting
        assert about(loader, "a")["open"] == 0


async def test_a_pinned_model_is_there_at_once_and_comes_back_by_itself() -> None:
    machine = Machine(a=6, b=4, c=4)
    async with loading(machine, keep_alive_s=0.0, pinned=frozenset("a")) as loader:
        await until(lambda: state(loader, "a") == "loaded")
        for name in "bcb":
            await used(loader, name)
        loader.keep("a", 0.0)
        await used(loader, "a", 0.0)
        machine.engine("a").die(1)
        await until(lambda: machine.loads["a"] == 2 and state(loader, "a") == "loaded")
        machine.faults["a"] = EngineDeadError("again")
        machine.engine("a").die(1)
        await until(lambda: machine.loads["a"] == 4)
        del machine.faults["a"]
        await until(lambda: state(loader, "a") == "loaded")


async def test_one_that_ends_again_and_again_is_left_alone_twice_as_long_unless_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, day = Machine(a=6), 86400.0
    monkeypatch.setattr("infer_router.loader.MOST_BACKOFF_S", 6 * day)
    async with loading(machine, pinned=frozenset("a"), backoff_s=day) as loader:
        for number, days in enumerate((1, 2, 4, 6, 6), 1):
            await used(loader, "a")
            assert machine.loads["a"] == number
            assert about(loader, "a")["retry_in_s"] is None
            machine.engine("a").die(1)
            await until(lambda: state(loader, "a") == "unloaded")
            assert about(loader, "a")["retry_in_s"] == pytest.approx(days * day, abs=LIMIT_S)


async def test_a_process_that_does_not_answer_is_replaced() -> None:
    machine = Machine(a=4)
    async with loading(machine, stuck_timeout_s=0.05) as loader:
        await used(loader, "a")
        stuck = machine.engine("a")
        stuck.well = False
        await until(lambda: stuck.ends)
        await used(loader, "a")
        assert machine.engine("a") is not stuck


async def test_why_a_process_has_ended_is_told() -> None:
    machine = Machine(a=4)
    async with loading(machine, stuck_timeout_s=0.05, backoff_s=LIMIT_S) as loader, loader.use("a"):
        machine.engine("a").well = False
        await until(lambda: about(loader, "a")["problem"])
        assert about(loader, "a")["problem"] == "its process did not answer, and was killed"
        await used(loader, "a")
        machine.engine("a").die(1)
        await until(lambda: about(loader, "a")["problem"])
        assert about(loader, "a")["problem"] == "its process ended with code 1"


async def test_what_can_never_fit_is_refused() -> None:
    machine = Machine(a=MEMORY + 1, b=6, p=5)
    async with loading(machine, pinned=frozenset("p")) as loader:
        with pytest.raises(NeverFitsError, match=r"and models may have .* GiB beside the pinned models \(p"):
            await used(loader, "a")
        await until(lambda: state(loader, "p") == "loaded")
        with pytest.raises(NeverFitsError):
            await used(loader, "b")
        await used(loader, "p")
    assert machine.loads == {"p": 1}


async def test_only_so_many_wait() -> None:
    machine = Machine(a=4, b=4)
    machine.gates["a"].clear()
    async with loading(machine, max_waiting=2) as loader:
        waiting = [asyncio.create_task(used(loader, "a")) for _ in range(2)]
        await until(lambda: about(loader, "a")["waiting"] == 2)
        with pytest.raises(QueueFullError, match=r"would be number 3 of at most server\.router\.max_waiting = 2"):
            await used(loader, "b")
        waiting.pop().cancel()
        await until(lambda: about(loader, "a")["waiting"] == 1)
        machine.gates["a"].set()
        await asyncio.gather(*waiting)
        await used(loader, "b")


async def test_who_leaves_while_waiting_holds_nothing() -> None:
    machine = Machine(a=6, b=6)
    machine.gates["a"].clear()
    async with loading(machine) as loader:
        waiting = asyncio.create_task(used(loader, "a"))
        await until(lambda: "a" in machine.live)
        waiting.cancel()
        machine.gates["a"].set()
        await until(lambda: state(loader, "a") == "loaded")
        assert about(loader, "a")["open"] == 0
        await used(loader, "b")


async def test_when_the_task_fails_who_waits_is_told_and_it_is_not_silent() -> None:
    machine = Machine(a=4)
    rules = Rules(memory=MEMORY, keep_alive_s={"a": 1.0})

    def fail(name: str, url: str | None) -> None:
        raise ZeroDivisionError

    loader = Loader(machine, rules, fail, machine.working)
    owning = asyncio.create_task(loader.run())
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDeadError):
            await used(loader, "a")
        with pytest.raises(ZeroDivisionError):
            await owning
        with pytest.raises(EngineDeadError):
            await used(loader, "a")


@pytest.mark.parametrize(("spare_bytes", "rooms"), [(3, "110"), (6, "100"), (11, "000"), (math.inf, "000")])
async def test_a_process_waits_only_where_models_leave_room(spare_bytes: float, rooms: str) -> None:
    machine = Machine(a=5, b=3)
    machine.spare_bytes = spare_bytes
    found = ""
    async with loading(machine) as loader:
        for names in ("", "a", "b"):
            for name in names:
                await used(loader, name)
            await until(lambda: all(each["about"] for each in loader.status().values()))
            for _ in range(3):  # the task has seen what has happened
                await asyncio.sleep(0)
            found += str(int(machine.spare))
    assert found == rooms


async def test_no_more_is_reckoned_at_a_time_than_memory_has_room_for() -> None:
    machine = Machine(a=6, b=4, c=1, d=1, e=1)
    machine.sizing_bytes = 4
    for name in "cde":
        machine.sizing[name].clear()

    async def settled() -> tuple[int, int]:
        for _ in range(5):  # the task has seen what has happened
            await asyncio.sleep(0)
        return machine.reckoning, machine.loads["a"]

    async with loading(machine) as loader, asyncio.TaskGroup() as tasks:
        await used(loader, "b")  # 6 are left: for one process besides the first, or for a
        for name in "de":
            tasks.create_task(used(loader, name))
            await until(lambda name=name: about(loader, name)["waiting"])  # type: ignore[misc]
        assert await settled() == (2, 0)
        machine.sizing["c"].set()
        assert await settled() == (2, 0)
        tasks.create_task(used(loader, "a"))
        await until(lambda: about(loader, "a")["waiting"])
        assert await settled() == (2, 0)
        machine.sizing["d"].set()
        await until(lambda: machine.loads["a"])
        machine.sizing["e"].set()
    assert machine.loads == {"a": 1, "b": 1, "d": 1, "e": 1}


async def test_no_process_begins_to_wait_while_a_model_is_loaded() -> None:
    machine = Machine(a=3, b=3)
    machine.spare_bytes = 1
    machine.gates["a"].clear()
    async with loading(machine) as loader:
        waiting = asyncio.create_task(used(loader, "a"))
        await until(lambda: "a" in machine.live)
        await used(loader, "b")  # the task looks at all of them again
        assert not machine.spare
        machine.gates["a"].set()
        await waiting
        await until(lambda: machine.spare)


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    """Requests, crashes, failing loads and clients that leave, at random: all others are answered, and memory is never
    exceeded."""
    rng = random.Random(seed)
    machine = Machine(a=3, b=4, c=5, d=6, e=2)
    machine.spare_bytes = machine.sizing_bytes = 2
    names = "abcde"
    answered = Counter[str]()

    async def ask(name: str) -> None:
        try:
            async with loader.use(name, rng.choice((None, 0.0, 0.001, math.inf))):
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
                answered["done"] += 1
        except EngineDeadError:
            answered["failed"] += 1

    async with loading(machine, max_waiting=1000, keep_alive_s=0.01) as loader, AsyncExitStack() as stack:
        tasks = []
        for _ in range(300):
            leaves = rng.random() < 0.1
            task = asyncio.create_task(ask(rng.choice(names)))
            tasks.append(task)
            stack.callback(task.cancel)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if leaves:
                task.cancel()
            if rng.random() < 0.05 and (there := [each for each in machine.live.values() if each is not None]):
                rng.choice(there).die(9)
            if rng.random() < 0.05:
                name = rng.choice(names)
                machine.faults.pop(name) if name in machine.faults else machine.faults.update(
                    {name: EngineDeadError("x")}
                )
            if rng.random() < 0.05:
                loader.keep(rng.choice(names), rng.choice((0.0, 1.0)))
        machine.faults.clear()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        others = [each for each in results if isinstance(each, Exception)]
        assert not others
        assert sum(answered.values()) + sum(isinstance(each, asyncio.CancelledError) for each in results) >= 300
        await until(lambda: not any(each["open"] or each["waiting"] for each in loader.status().values()))
        for name in names:
            await used(loader, name)
