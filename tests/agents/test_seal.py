"""What clients send back is taken only if it is unaltered."""

from __future__ import annotations

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer_agents.seal import Seal, make_seal

ALTERED = r"altered|not a sealed text"
TEXTS = ("", "hm", "ein Gedanke\n" * 1000, "\0")


@pytest.mark.parametrize("text", TEXTS)
def test_a_sealed_text_opens_with_its_own_key_alone(text: str) -> None:
    seal, other = Seal(b"a" * 32), Seal(b"b" * 32)
    assert seal.opened(seal.seal(text)) == text
    assert seal.signed(text, seal.signature(text))
    assert not seal.signed(text + " ", seal.signature(text))
    assert not other.signed(text, seal.signature(text))
    with pytest.raises(ValueError, match=r"server\.agents\.key"):
        other.opened(seal.seal(text))


def test_no_altered_text_opens() -> None:
    seal = Seal(b"a" * 32)
    data = base64.b64decode(seal.seal("hm"))
    for i in range(len(data)):
        for bit in range(8):
            altered = data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :]
            with pytest.raises(ValueError, match=ALTERED):
                seal.opened(base64.b64encode(altered).decode())
    for word in ("", "no base64!", "aG0=", seal.seal("hm") + "\n", seal.seal("hm")[:-4], "\ud800"):
        with pytest.raises(ValueError, match=ALTERED):
            seal.opened(word)


def test_a_text_that_is_no_unicode_can_be_sealed_but_not_sent_back() -> None:
    """JSON cannot hold it."""
    seal = Seal(b"a" * 32)
    assert seal.signed("\ud800", seal.signature("\ud800"))
    for sealed in (seal.seal("\ud800"), base64.b64encode(bytes(32) + b"\xed\xa0\x80").decode()):
        with pytest.raises(ValueError, match="not a sealed text"):
            seal.opened(sealed)


def test_the_key_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    """Of many that start at once, all get the same one."""
    folder = tmp_path / "a" / "b"
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make_seal(None, folder).signature("hm"), range(32)))
    assert len({*made, make_seal(None, folder).signature("hm")}) == 1
    assert [path.name for path in folder.iterdir()] == ["agents.key"]
    assert stat.S_IMODE((folder / "agents.key").stat().st_mode) == 0o600
    assert make_seal(None, tmp_path).signature("hm") != made[0]
    assert make_seal("k", folder).signature("hm") == make_seal("k", tmp_path).signature("hm") != made[0]


def test_a_key_that_cannot_be_kept_lasts_as_long_as_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path):
        (tmp_path / "agents.key").write_bytes(b"short")
        seal = make_seal(None, folder)
        assert seal.signed("hm", seal.signature("hm"))
        assert "after a restart" in caplog.text
        caplog.clear()


def test_without_a_home_the_key_lasts_as_long_as_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as if the user had no entry and HOME were not set
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    seal = make_seal(None)
    assert seal.signed("hm", seal.signature("hm"))
    assert "~/.local/state/infer/agents.key cannot be kept (Could not determine home directory.)" in caplog.text
