"""Plugins as they come: real distributions on sys.path, sound and broken."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from infer import PLUGIN_API, PluginError, hookimpl
from infer.hookspecs import StepRecord
from infer.plugins import Plugins

SOUND = """
from infer import hookimpl
from infer.hookspecs import Registration
INFER_PLUGIN_API = {api}

@hookimpl
def infer_cache_pools():
    pool = lambda context, settings: None
    return [Registration("{name}", pool, "a test's pool", priority={priority}, unavailable={why})]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one module and one entry point on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, source: str = SOUND, entry: str = "", **values: object) -> None:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(
            source.format(**{"api": PLUGIN_API, "name": "mine", "priority": 0, "why": None} | values)
        )
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[infer]\n{entry or module} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_own_plugins_come_in_through_the_same_hooks() -> None:
    plugins = Plugins.discover()
    assert plugins.get("scheduler", "continuous", "engine.batching_mode").distribution == "infer-core"
    assert plugins.get("kernels", "reference", "kernels.backend").distribution == "infer-core"
    assert plugins.get("cache", "slotted", "cache.backend").distribution == "infer-cache-slotted"
    assert {o.name for o in plugins.offers["model"]} == {"llama", "qwen3", "gemma3"}
    assert "demo" in plugins.checkpoints
    assert not plugins.broken


def test_a_strangers_plugin_is_found_and_named(install: Install) -> None:
    install("stranger")
    offer = Plugins.discover().get("cache", "mine", "cache.backend")
    assert (offer.distribution, offer.version) == ("stranger", "1.0")


def test_missing_names_what_is_installed_and_what_helps() -> None:
    with pytest.raises(
        PluginError, match=r"cache.backend is 'paged'.*installed: slotted.*pip install infer-cache-paged"
    ):
        Plugins.discover(installed=[e for e in entry_points(group="infer") if e.name != "paged"]).get(
            "cache", "paged", "cache.backend"
        )
    with pytest.raises(PluginError, match="Did you mean 'slotted'"):
        Plugins.discover().get("cache", "slottet", "cache.backend")


def test_duplicate_names_both_distributions_and_the_setting(install: Install) -> None:
    """Also when both use one entry-point name, where pluggy's loader would skip the second in silence."""
    install("first-one", entry="same")
    install("second-one", entry="same")
    plugins = Plugins.discover()
    with pytest.raises(PluginError, match=r"first-one and second-one both offer 'mine' for cache.backend"):
        plugins.get("cache", "mine", "cache.backend")
    assert plugins.get("cache", "slotted", "cache.backend").name == "slotted", "others are not taken down"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no luck')", r"its import failed: RuntimeError: no luck"),
        (SOUND.replace("INFER_PLUGIN_API = {api}", ""), r"states no INFER_PLUGIN_API"),
        (SOUND.replace("{api}", "99"), rf"was made for API 99, but this infer-core speaks {PLUGIN_API}"),
        (
            SOUND.replace("infer_cache_pools", "infer_cache_pool"),
            r"'infer_cache_pool'.*mean 'infer_cache_pools'",
        ),
    ],
    ids=["import", "no version", "wrong version", "misspelt hook"],
)
def test_a_broken_plugin_is_reported_and_takes_nobody_down(install: Install, source: str, reason: str) -> None:
    install("broken-one", source)
    plugins = Plugins.discover()
    (broken,) = plugins.broken
    assert broken.distribution == "broken-one"
    assert plugins.get("cache", "slotted", "cache.backend")
    with pytest.raises(PluginError, match=rf"broken-one is broken: .*{reason}"):
        plugins.get("cache", "mine", "cache.backend")


def test_auto_takes_the_highest_priority_and_says_so(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("better", name="better", priority=15)
    with caplog.at_level(logging.INFO):
        assert Plugins.discover().auto("cache", "cache.backend").name == "better"
    assert "auto chose better of better over paged" in caplog.text


def test_auto_does_not_choose_between_equals(install: Install) -> None:
    install("equal", name="equal", priority=10)
    with pytest.raises(PluginError, match=r"'paged' \(infer-cache-paged\).*equal priority; name one"):
        Plugins.discover().auto("cache", "cache.backend")


def test_what_cannot_be_used_is_passed_over_with_its_reason(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("sick", name="sick", priority=99, why="'it has no legs'")
    with caplog.at_level(logging.INFO, logger="infer"):
        assert Plugins.discover().auto("cache", "cache.backend").name == "paged"
    assert "auto passes over sick of sick: it has no legs" in caplog.text
    with pytest.raises(PluginError, match=r"cache.backend is 'sick', but sick cannot be used here: it has no legs"):
        Plugins.discover().get("cache", "sick", "cache.backend")


def test_unknown_architecture_names_the_known() -> None:
    with pytest.raises(PluginError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        Plugins.discover().family(["MambaForCausalLM"], "auto")


class Observer:
    INFER_PLUGIN_API = PLUGIN_API

    def __init__(self, fails: bool) -> None:
        self.fails, self.seen = fails, 0

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self.seen += 1
        if self.fails:
            raise ValueError("bad observer")


def test_a_failing_observer_is_left_out_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Observer(False), Observer(True)
    plugins = Plugins.discover([good, bad])
    record = StepRecord(0, 0.0, 0.0, (), 1, 0, 0, 0, 0, 0, 0, 0)
    for _ in range(3):
        plugins.notify("infer_step_finished", record)
    assert (good.seen, bad.seen) == (3, 1)
    assert caplog.text.count("is left out") == 1


def test_an_object_given_by_hand_is_checked_too() -> None:
    with pytest.raises(PluginError, match="states no INFER_PLUGIN_API"):
        Plugins.discover([SimpleNamespace()])
