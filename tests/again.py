"""Slow tests that failed are run once more, alone: a browser, Ray or a compiler may lack what company takes.

A test that then passes is named as flaky and does not fail the run. It is to be mended all the same.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="run slow tests that failed once more, alone")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.again and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config))


class Again:
    """What the controller of the workers notes and does. A failure of a test that is not slow is final."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._failed: dict[str, bool] = {}
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = "slow" in report.keywords

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._failed or not all(self._failed.values()):
            return
        self._flaky = [test for test in self._failed if self._passes(test)]
        if len(self._flaky) == len(self._failed):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self._flaky:
            terminalreporter.write_line(f"flaky: {test} failed, and passed when it ran once more, alone")

    def _passes(self, test: str) -> bool:
        """Whether a test passes in a process of its own. What it prints is shown if not."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, cwd=self._root, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", flush=True)
        return done.returncode == 0
