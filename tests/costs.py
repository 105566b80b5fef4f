"""With ``--durations N``, what tests cost is listed, too: the N files that took longest, and the N with most memory.

Seconds are those of all workers together. Memory is what a test added at most to what its worker's process held before:
processes that the test starts are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PROCESS = Path("/proc/self")
MEMORY = "mebibytes"
HELD = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if config.option.durations:
        if PROCESS.exists():
            config.pluginmanager.register(Memory())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Costs(config.option.durations))


def mebibytes(key: str) -> int:
    """What this process holds (``VmRSS``), or held at most (``VmHWM``)."""
    return int((PROCESS / "status").read_text().split(f"{key}:")[1].split()[0]) >> 10


class Memory:
    """Adds to each test's report what its process held before it, at most and after it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        (PROCESS / "clear_refs").write_text("5")  # The peak starts again at what is held now: proc_pid_clear_refs(5).
        item.stash[HELD] = mebibytes("VmRSS")
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        item.user_properties.append((MEMORY, (item.stash[HELD], mebibytes("VmHWM"), mebibytes("VmRSS"))))


class Costs:
    """Adds up what each test's setup, call and teardown took. The controller of the workers hears of all tests."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds = Counter[str]()
        self._memory: dict[str, tuple[int, int, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration  # type: ignore[assignment]
        for name, value in report.user_properties:
            if name == MEMORY:
                self._memory[report.nodeid] = value  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"slowest {self._most} files of {self._seconds.total():.0f} s")
        for file, seconds in self._seconds.most_common(self._most):
            terminalreporter.write_line(f"{seconds:.2f}s {file}")
        memory = sorted(self._memory.items(), key=lambda each: each[1][0] - each[1][1])
        terminalreporter.section(f"memory of tests: {max((peak for _, (_, peak, _) in memory), default=0)} MiB at most")
        for test, (before, peak, after) in memory[: self._most]:
            terminalreporter.write_line(f"{before} MiB, {peak} at most, {after} after {test}")
