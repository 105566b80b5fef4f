"""Progress bars appear on a terminal and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from infer import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert list(progress.track("abc", "letters", 3)) == ["a", "b", "c"]
    assert "letters" in shown.getvalue()
    assert "3/3" in shown.getvalue()


def test_a_file_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track("abc", "letters", 3)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_no_standard_error_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.track("abc", "letters", 3)) == ["a", "b", "c"]
