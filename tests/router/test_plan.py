"""The settings of several models: tables, names, secrets, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from infer.commands.cli import main
from infer.contracts.command import CommandContext
from infer.errors import SettingsError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_router.plan import Plan, several

FILE = """
[engine]
max_batch_size = 2
[server]
port = 0
api_keys = ["the server's"]
[server.router]
keep_alive_s = 60
[models."qwen-1.5"]
pinned = true
aliases = ["opus", "sonnet"]
[models."qwen-1.5".model]
path = "demo"
quantization = "int8"
[models.b]
keep_alive_s = -1
[models.b.model]
path = "demo"
[models.b.engine]
max_batch_size = 4
"""


def planned(text: str, tmp_path: Path, words: tuple[str, ...] = (), argv: tuple[str, ...] = ()) -> Plan:
    (tmp_path / "settings.toml").write_text(text)
    plugins = Plugins.discover()
    loaded = load_settings(plugins, file=str(tmp_path / "settings.toml"), argv=argv, env={})
    return several(CommandContext(loaded.settings, loaded.sources, plugins, argv), words)


def test_adapters_are_asked_for_by_name(tmp_path: Path) -> None:
    text = FILE + '[models.b.adapters]\nload = ["sql=adapters/sql", "tone=adapters/tone"]\n'
    plan = planned(text, tmp_path)
    expected = {
        "sql": "b",
        "tone:latest": "b",
        "b:sql": "b",
        "b:loaded later": "b",
        "qwen-1.5:sql": None,
        "c:sql": None,
    }
    assert {name: plan.meant(name) for name in expected} == expected
    with pytest.raises(SettingsError, match=r"models.b: the name 'opus' is that of 'qwen-1.5' already"):
        planned(text.replace("sql=", "opus="), tmp_path)


def test_each_table_overrides_what_is_common(tmp_path: Path) -> None:
    plan = planned(FILE, tmp_path, argv=('--models."qwen-1.5".engine.max_seq_len=64',))
    one, other = plan.engines["qwen-1.5"], plan.engines["b"]
    assert one["model"] == {"path": "demo", "quantization": "int8"}
    assert one["engine"] == {"max_batch_size": 2, "max_seq_len": "64"}
    assert other["engine"] == {"max_batch_size": 4}
    assert plan.names == {"qwen-1.5": "qwen-1.5", "opus": "qwen-1.5", "sonnet": "qwen-1.5", "b": "b"}
    assert plan.pinned == {"qwen-1.5"}
    assert plan.keep_alive_s == {"qwen-1.5": 60.0, "b": math.inf}
    for name, settings in plan.engines.items():
        assert settings["server"]["api_keys"] == [plan.key]
        assert settings["server"]["served_model_name"] == name
        assert "router" not in settings["server"]


def test_each_has_a_folder_of_its_own_in_one_that_a_single_process_may_use(tmp_path: Path) -> None:
    text = FILE + '[cache.paged]\ndisk = "kept"\ndisk_gib = 2\n[models."a/../b".model]\npath = "demo"\n'
    plan = planned(text + '[models.own.cache.paged]\ndisk = "mine"\n[models.own.model]\npath = "demo"\n', tmp_path)
    kept = {name: settings["cache"]["paged"]["disk"] for name, settings in plan.engines.items()}
    assert kept == {
        "qwen-1.5": "kept/model-qwen-1.5",
        "b": "kept/model-b",
        "a/../b": "kept/model-a%2F..%2Fb",
        "own": "mine",
    }
    assert all(settings["cache"]["paged"]["disk_gib"] == 2 for settings in plan.engines.values())


def test_models_are_named_by_words(tmp_path: Path) -> None:
    assert planned(FILE, tmp_path, ("b",)).engines.keys() == {"b"}
    (tmp_path / "Tiny-3.gguf").write_bytes(b"")
    plan = planned("", tmp_path, (str(tmp_path / "Tiny-3.gguf"), "org/name", "demo"))
    assert plan.engines.keys() == {"Tiny-3", "org/name", "demo"}
    assert plan.engines["org/name"]["model"]["path"] == "org/name"
    with pytest.raises(SettingsError, match="would be called 'Tiny-3', as another is"):
        planned("", tmp_path, ("Tiny-3", str(tmp_path / "Tiny-3.gguf")))
    with pytest.raises(SettingsError, match="The model 'demo' is given 2 times"):
        planned("", tmp_path, ("demo", "b", "demo"))
    with pytest.raises(SettingsError, match=r"--model\.path = 'x' is given besides 2 models"):
        planned("", tmp_path, ("a", "b"), ("--model.path=x",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.a]\npinned = true", r"models\.a\.model\.path is not set"),
        ("[models.a.model]\npath = 'demo'\ndtype = 'f'", r"models\.a: model\.dtype = 'f' .*"),
        ("[models.a.model]\npath = 'demo'\npaht = 'f'", r"models\.a: model\.paht .* is not a setting"),
        ("[models.a]\nkeep_alive_s = -2", r"models\.a\.keep_alive_s = -2: .*"),
        ("[models.a]\nkeepalive = 2", r"models\.a: keepalive .* is not a setting"),
        ("[models.a.server]\nport = 2", r"models\.a\.server\.port cannot differ by model"),
        ("[models.a.server]\nserved_model_name = 'x'", r"models\.a\.server\.served_model_name is not needed"),
        ("[models.'a b'.model]\npath = 'demo'", r"'a b' is no name of a model"),
        ("[server]\naliases = ['x']\n[models.a.model]\npath = 'demo'", r"server\.aliases = .* is about one model"),
        (
            "[models.a]\naliases = ['b']\nmodel = {path='demo'}\n[models.b.model]\npath='demo'",
            "the name 'b' is that of 'a'",
        ),
        ("[models]\na = 5", r"models\.a = 5"),
    ],
)
def test_what_is_wrong_is_said_with_the_model_s_name(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=said):
        planned(text, tmp_path)


SECRETS = """
[models."a.b".server]
api_keys = ["SECRET-1"]
api_key = "SECRET-2"
[models."a.b".observers.otel]
endpoint = "http://user:SECRET-3@collector"
[models.c]
api_keys = ["SECRET-4"]
token = "SECRET-5"
pinned = true
"""


def test_no_secret_of_a_model_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text(SECRETS)
    for more in ((), ("--json",)):
        assert main(["settings", "--settings", str(tmp_path / "settings.toml"), *more]) == 0
        said = capsys.readouterr().out
        assert "SECRET" not in said
        assert "collector" in said
        assert "models.c.pinned" in said
    for serving in (("serve",), ("serve", "a.b", "c")):
        assert main([*serving, "--settings", str(tmp_path / "settings.toml")]) == 2
        assert "SECRET" not in capsys.readouterr().err


def test_ray_serves_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text(FILE)
    assert main(["ray", "run", "demo", "--settings", str(tmp_path / "settings.toml")]) == 2
    assert "infer ray has one model" in capsys.readouterr().err
