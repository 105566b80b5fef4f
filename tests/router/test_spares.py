"""Processes that wait for a model: who gets them, and what becomes of them."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.models.checkpoints import write_checkpoint
from tests.router.test_machine import MEMORY, SMALL, alive, until
from tests.serving import HANG_S

from infer.assemble.texts import beforehand
from infer.errors import EngineDeadError
from infer.plugins.discovery import Plugins
from infer_router import spares
from infer_router.machine import EngineProcess, LocalMachine
from infer_router.process import FAULT, TAKEN, WARM, Process, _prepared

PLAYED = (sys.executable, "-I", "-S", str(Path(__file__).with_name("played.py")))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "AFTER_S", 0.0)


class Machine(LocalMachine):
    """Notes which processes have begun."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.memory, self.begun = MEMORY, list[str]()

    async def _created(self, kind: str) -> Any:
        self.begun.append(kind)
        return await super()._created(kind)


@asynccontextmanager
async def played(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Machine]:
    monkeypatch.setattr("infer_router.machine.COMMAND", PLAYED)
    async with asyncio.timeout(HANG_S), Machine(settings) as machine:
        yield machine


async def waiting(machine: LocalMachine) -> int:
    """The process that waits, once there is one."""
    before = {*machine.pids}
    machine.may_spare(True)
    await until(lambda: {*machine.pids} - before)
    (pid,) = {*machine.pids} - before
    return pid


def said(engine: EngineProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.url)
    return found


async def test_a_model_gets_the_process_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={}, b={}) as machine:
        pids = []
        for name in "ab":
            pid = await waiting(machine)
            engine = await machine.start(name)
            assert engine.pid == pid
            pids.append(pid)
        machine.may_spare(False)
        assert machine.begun == ["spare", "spare"]
        assert {*machine.pids} == {*pids}
    assert not any(map(alive, pids))


async def test_two_models_at_once_and_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={}, b={}) as machine:
        await waiting(machine)
        engines = await asyncio.gather(machine.start("a"), machine.start("b"))
    assert sorted(said(engine)["kind"] for engine in engines) == ["engine", "spare"]


async def test_none_waits_unless_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "AFTER_S", 3600.0)
    async with played(monkeypatch, a={}) as machine:
        tasks = len(asyncio.all_tasks())
        machine.may_spare(True)  # it would begin in a while
        await asyncio.sleep(0)
        machine.may_spare(False)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == tasks, "nothing is left that would begin one"
        assert said(await machine.start("a"))["kind"] == "engine"
        assert machine.begun == ["engine"]
        machine.may_spare(True)
    assert machine.begun == ["engine"], "none begins when the machine ends"


async def test_one_that_is_killed_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with played(monkeypatch, a={}) as machine:
        first = await waiting(machine)
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(machine.begun) == 2 and machine.pids)
        (second,) = machine.pids
        assert second != first
        assert "the process that waits for a model was ended by signal 9" in caplog.text
        assert (await machine.start("a")).pid == second
        assert machine.begun == ["spare", "spare"]


async def test_one_that_is_killed_is_not_replaced_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={}) as machine:
        pid = await waiting(machine)
        machine.may_spare(False)
        assert machine.pids == [pid], "whoever takes the room takes the process"
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not machine.pids)
        assert said(await machine.start("a"))["kind"] == "engine"
        assert machine.begun == ["spare", "engine"]


@pytest.mark.parametrize("how", ["by itself", "killed before it is noticed"])
async def test_one_that_dies_over_its_orders_loses_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with played(monkeypatch, a={"dies": "orders"} if how == "by itself" else {}) as machine:
        pid = await waiting(machine)
        machine.may_spare(False)
        if how != "by itself":
            os.kill(pid, signal.SIGKILL)
        engine = await machine.start("a")
        assert said(engine)["kind"] == "engine"
        assert machine.pids == [engine.pid]
        assert "It gets a process that begins anew." in caplog.text


@pytest.mark.parametrize("hangs", ["imports", "orders"])
async def test_a_load_goes_on_without_one_that_hangs(
    hangs: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"infer_router.machine.{'WARM_S' if hangs == 'imports' else 'ORDERS_S'}", 0.1)
    async with played(monkeypatch, a={"hangs": hangs == "orders"}) as machine:
        machine._learn(["hangs"] if hangs == "imports" else [])
        pid = await waiting(machine)
        machine.may_spare(False)
        engine = await machine.start("a")
        assert said(engine)["kind"] == "engine"
        assert machine.pids == [engine.pid]
    assert not alive(pid)
    assert "does not answer. It gets a process that begins anew." in caplog.text


async def test_one_that_reads_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_router.machine.COMMAND", ("sh", "-c", "exec sleep 1000"))
    async with asyncio.timeout(HANG_S), Machine({}) as machine:
        machine._learn([f"{i}{'x' * 1000}" for i in range(4096)])  # more than any pipe takes
        pid = await waiting(machine)
        taken = await machine._spares.take()
        assert taken is not None
        assert taken[0].pid == pid


async def test_one_that_is_told_beforehand_is_told_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={}, b={}, new={}) as machine:
        machine._served = {"a", "b"}
        machine.expect("a")  # nobody waits yet
        pid = await waiting(machine)
        machine.expect("new")  # has not been served yet
        machine.expect("a")
        machine.expect("b")  # one process has orders for one model
        machine.may_spare(False)
        engine = await machine.start("a")
        assert engine.pid == pid
        assert said(engine)["orders"]["room"] is False
        assert said(engine)["then"] == "room\n"
        await waiting(machine)
        machine.may_spare(False)
        assert said(await machine.start("b"))["orders"]["room"] is True, (
            "the next process knows nothing of the last one"
        )


async def test_the_next_process_reads_the_tokenizer_of_the_model_before_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    async with played(monkeypatch, a={}, b={}) as machine:
        machine._tokenizers = {"a": "of a", "b": "of b"}
        for name in "aba":
            await waiting(machine)
            found.append(said(await machine.start(name))["tokenizer"])
    assert found == [None, "of a", "of a"]


@pytest.mark.parametrize("why", ["another model", "long ago"])
async def test_what_was_read_for_another_model_or_long_ago_is_not_used(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with played(monkeypatch, a={}, b={}) as machine:
        machine._served = {"a", "b"}
        pid = await waiting(machine)
        machine.expect("a" if why == "long ago" else "b")
        machine.may_spare(False)
        if why == "long ago":
            monkeypatch.setattr("infer_router.machine.HOLDS_S", -1.0)
        engine = await machine.start("a")
        assert said(engine)["kind"] == "engine"
        assert machine.pids == [engine.pid]
    assert not alive(pid)
    assert "was told of another model, or long ago. It gets a process that begins anew." in caplog.text


def test_what_is_learned_is_bounded_and_the_latest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_router.machine.MOST_MODULES", 5)
    machine = LocalMachine({})
    for names in (["a", "b", "c"], ["d", "a"], ["e", "f"], ["f", "e"]):
        machine._learn(names)
        assert len(machine._modules) <= 5
    assert [*machine._modules] == ["f", "e", "d", "a", "b"]


async def test_one_that_dies_later_is_a_load_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={"dies": "load"}) as machine:
        await waiting(machine)
        machine.may_spare(False)
        with pytest.raises(EngineDeadError, match="ended with code 8 before it served"):
            await machine.start("a")
        assert not machine.pids
        assert machine.begun == ["spare"]


async def test_orders_that_are_canceled_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={}) as machine:
        os.kill(pid := await waiting(machine), signal.SIGSTOP)
        machine.may_spare(False)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(machine.start("a"), 0.1)
        assert not alive(pid)


async def test_a_machine_that_ends_while_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(monkeypatch, a={}) as machine:
        machine.may_spare(True)
        await until(lambda: machine.begun)
    assert not machine.pids


async def test_a_process_hears_of_its_own_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model says what it imports, which the next process may do sooner, and nothing else goes on to it."""
    settings = {
        "a": {"log": {"level": "debug"}, "model": {"path": "private"}, "modules": ["one", "two"]},
        "b": {"model": {"path": "b"}},
    }
    async with played(monkeypatch, **settings) as machine:
        await waiting(machine)
        first = said(await machine.start("a"))
        await until(lambda: machine._modules)
        await waiting(machine)
        second = said(await machine.start("b"))
        again = said(await machine.start("b"))
    assert (first["modules"], second["modules"]) == ([], ["one", "two"])
    assert second["orders"] == {"settings": settings["b"], "memory": MEMORY, "again": False, "room": True}
    assert again["orders"] == second["orders"] | {"again": True}
    assert again["kind"] == "engine"
    assert second["environment"] == again["environment"] == first["environment"]
    assert second["folder"] == again["folder"] == os.getcwd()


@pytest.mark.slow
async def test_models_that_follow_each_other_share_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Processes as they are: the second one's log has its own level, and it has imported beforehand what the first one
    came to import."""
    loud = SMALL | {"log": {"level": "debug"}}
    async with asyncio.timeout(HANG_S), Machine({"a": loud, "b": SMALL}) as machine:
        said = []
        for name in "ab":
            pid = await waiting(machine)
            engine = await machine.start(name)
            assert engine.pid == pid
            assert await engine.healthy()
            said.append(capfd.readouterr().err)
            await until(lambda: machine._modules)
        later = {*machine._modules}
        assert "infer_server.endpoints.chat_completions" in later
    assert [" DEBUG " in text for text in said] == [True, False]
    assert all(" INFO " in text for text in said)
    assert machine.begun == ["spare", "spare"]


@pytest.mark.slow
async def test_what_a_model_is_is_read_while_another_one_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process as it is: without room, it has read the tokenizer, once, and has no cache."""
    write_checkpoint(tmp_path, "llama")
    model = SMALL | {"model": {"path": str(tmp_path)}, "log": {"level": "info"}}
    async with asyncio.timeout(HANG_S), Machine({"a": model}) as machine:
        machine._served = {"a"}
        pid = await waiting(machine)
        machine.expect("a")
        err = ""
        while "INFO tokenizer: " not in err:
            await asyncio.sleep(0.01)
            err += capfd.readouterr().err
        (tmp_path / "tokenizer.json").unlink()
        machine.may_spare(False)
        engine = await machine.start("a")
        assert engine.pid == pid
        assert await engine.healthy()
        assert "INFO cache " not in err
        assert "INFO cache " in capfd.readouterr().err


@pytest.mark.slow
def test_one_whose_import_hangs_is_ended_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.chdir(tmp_path)
    process = Process("spare", {"modules": ["hangs"], "tokenizer": None, "within_s": 1.0})
    assert process._process.wait(HANG_S) == -signal.SIGALRM
    process._process.communicate()


def test_it_has_a_limit_while_it_imports_and_none_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timed.py").write_text("import signal\nLEFT = signal.getitimer(signal.ITIMER_REAL)")
    monkeypatch.syspath_prepend(tmp_path)
    left = []
    monkeypatch.setattr(gc, "freeze", lambda: left.append(signal.getitimer(signal.ITIMER_REAL)))
    tokenizer = str(Plugins.discover().checkpoints["demo"] / "tokenizer.json")
    told = {"modules": ["timed"], "tokenizer": tokenizer, "within_s": 600.0}
    assert _prepared(io.StringIO(json.dumps(told) + "\n")) is not None
    assert len(beforehand) == 1
    beforehand.clear()
    assert 0 < sys.modules.pop("timed").LEFT[0] <= 600
    assert left == [(0.0, 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_it_imports_what_it_is_told_and_ends_with_its_parent(
    ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text("print('imported', flush=True)")
    (tmp_path / "broken.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    told = {"modules": ["broken", "nosuch", "told"], "tokenizer": "nosuch", "within_s": HANG_S}
    process = Process("spare", told)
    pipes = process._process
    assert pipes.stdin is not None
    assert pipes.stdout is not None
    assert pipes.stdout.readline() == "imported\n"
    assert pipes.stdout.readline() == WARM + "\n"
    if ordered:
        process.send({"settings": {"model": {"path": "nosuch"}, "server": {"port": 0}}, "memory": MEMORY})
        assert pipes.stdout.readline() == TAKEN + "\n"
        with pytest.raises(RuntimeError, match=f"{FAULT}'nosuch' is neither a folder or file"):
            process.ready()
    else:
        pipes.stdin.close()
    assert pipes.wait(HANG_S) == (2 if ordered else 0)
    pipes.stdin.close()
    assert not pipes.stdout.read()
    pipes.stdout.close()
