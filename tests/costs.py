"""With ``--durations N``, the N files whose tests took longest are listed, too: in all workers together, in seconds."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.option.durations))


class Costs:
    """Adds up what each test's setup, call and teardown took. The controller of the workers hears of all tests."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"slowest {self._most} files of {self._seconds.total():.0f} s")
        for file, seconds in self._seconds.most_common(self._most):
            terminalreporter.write_line(f"{seconds:.2f}s {file}")
