"""What a server's process is like, besides what it answers."""

from __future__ import annotations

import signal
import sys

import pytest

from infer.contracts.sections import Settings
from infer.errors import SettingsError
from infer.plugins.discovery import Plugins
from infer_server import app


def test_a_thread_that_computes_holds_up_a_step_less_than_python_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(host: str, port: int) -> None:
        raise SettingsError("the address is taken")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(app, "bind", bind)
    before = sys.getswitchinterval()
    try:
        with pytest.raises(SettingsError, match="taken"):
            app.run(Settings(), Plugins.discover())
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(before)
