"""Precedence and sources of settings, and one clear sentence for every error."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError

from infer import SettingsError, hookimpl
from infer.contracts import hooks as hookspecs
from infer.contracts.cache import CacheFactory
from infer.contracts.registration import Registration
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.sections import CacheSettings, EngineSettings, ModelSettings, Section, Settings
from infer.plugins import inspection
from infer.plugins.discovery import Plugins
from infer.settings import Loaded, compose, describe, describe_schema, load_settings, plugin_settings, schema

ROOT = Path(__file__).parents[2]
PLUGINS = Plugins.discover()


class PageSettings(Section):
    block_size: int = 16


class PagedPlugin:
    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_cache_pools(self) -> list[Registration[CacheFactory]]:
        return [Registration("pages", lambda context, settings: None, "test", PageSettings)]  # type: ignore[arg-type]


def load(*argv: str, env: dict[str, str] | None = None, plugins: Plugins = PLUGINS, **keys: Any) -> Loaded:
    return load_settings(plugins, argv=argv, env=env or {}, **keys)


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[engine]\nmax_batch_size = 3\nmax_waiting_requests = 3\nprefill_chunk_size = 3\n")
    env = {"INFER_ENGINE__MAX_BATCH_SIZE": "4", "INFER_ENGINE__MAX_WAITING_REQUESTS": "4"}
    loaded = load("--engine.max-batch-size=5", env=env, file=str(file))
    e = loaded.settings.engine
    assert (e.max_batch_size, e.max_waiting_requests, e.prefill_chunk_size, e.max_seq_len) == (5, 4, 3, None)
    names = ("max_batch_size", "max_waiting_requests", "prefill_chunk_size", "max_seq_len")
    assert [loaded.sources[f"engine.{n}"] for n in names] == [
        "--engine.max_batch_size",
        "INFER_ENGINE__MAX_WAITING_REQUESTS",
        str(file),
        "default",
    ]


def test_the_spec_examples() -> None:
    assert load(env={"INFER_CACHE__BACKEND": "slotted"}).settings.cache.backend == "slotted"
    assert load("--cache.backend", "slotted").settings.cache.backend == "slotted"


def test_a_plugin_owns_its_table() -> None:
    plugins = Plugins.discover([PagedPlugin()])
    settings = load("--cache.pages.block_size", "32", plugins=plugins).settings
    assert plugin_settings(settings, "cache", "pages") == PageSettings(block_size=32)
    with pytest.raises(SettingsError, match=r"cache.pages.blok_size \(from --cache.pages.blok_size\) is not a setting"):
        load("--cache.pages.blok_size", "32", plugins=plugins)
    assert "block_size" in str(schema(plugins).model_json_schema())


BAD: list[tuple[list[str], str]] = [
    (["--engine.max_batch_sise", "3"], r"engine.max_batch_sise .*Did you mean 'engine.max_batch_size'"),
    (["--engin.max_batch_size", "3"], r"engin.*not a setting.*Did you mean"),
    (["--engine.foo", "3"], r"engine.foo \(from --engine.foo\) is not a setting\.(?! Did you mean 'engine')"),
    (["--server.threads", "3"], r"server.threads.*not a setting.*Did you mean 'kernels.threads'"),
    (["--kernels.threads", "100000"], r"kernels.threads = '100000' .*less than or equal to 1024"),
    (["--cache.slotted.size", "3"], r"cache.slotted .*: the plugin 'slotted' has no settings; leave it out\."),
    (
        ["--cache.paged=demo"],
        r"cache.paged = 'demo' .*: cache.paged is a table of settings, such as cache.paged.block_s",
    ),
    (["--engine.max_batch_size", "many"], r"engine.max_batch_size = 'many' \(from --engine.max_batch_size\).*integer"),
    (["--engine.max_batch_size", "0"], r"engine.max_batch_size = '0'.*greater than or equal to 1"),
    (["--engine.prefill_chunk_size", "0"], r"engine.prefill_chunk_size = '0'"),
    (["--engine.max_prefill_chunks_per_step", "0"], r"engine.max_prefill_chunks_per_step = '0'"),
    (["--engine.max_num_partial_prefills", "0"], r"engine.max_num_partial_prefills = '0'"),
    (["--engine.max_batch_size"], r"needs a value"),
    (["serve"], r"'serve' is not understood"),
    (["--cache.paged.block_size", "0"], r"cache.paged.block_size = '0'.*greater than 0"),
    (
        ["--engine.batching_mode", "static", "--engine.use_chunked_prefill", "true"],
        r"engine.use_chunked_prefill = true.*engine.batching_mode = \"static\"",
    ),
    (["--engine.max_tokens_per_step", "8"], r"engine.max_tokens_per_step = 8 is below engine.max_batch_size = 16"),
    (
        ["--engine.max_tokens_per_step", "64", "--engine.use_chunked_prefill", "false"],
        r"engine.max_tokens_per_step = 64 with engine.use_chunked_prefill = false needs engine.max_seq_len",
    ),
    (
        ["--engine.use_chunked_prefill", "false", "--engine.prefill_chunk_size", "64"],
        r"engine.prefill_chunk_size = 64 .*has no effect",
    ),
    (
        ["--engine.batching_mode", "static", "--engine.max_prefill_chunks_per_step", "2"],
        r"engine.max_prefill_chunks_per_step = 2 .*has no effect",
    ),
    (
        ["--engine.use_chunked_prefill", "false", "--engine.max_num_partial_prefills", "2"],
        r"engine.max_num_partial_prefills = 2 .*has no effect",
    ),
    (["--model.dtype", "float16", "--model.device", "cpu"], r'model.dtype = "float16" is slow'),
    (["--engine.graphs", "maybe"], r"engine.graphs = 'maybe'"),
    (["--model.dtype", "int8"], r"model.dtype = 'int8'"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_one_sentence_for_what_is_wrong(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load(*argv, read_file=False)
    assert "\n" not in str(caught.value)


def test_the_table_of_a_plugin_that_is_not_installed() -> None:
    lacking = "is not installed: pip install -r dist/"
    without = Plugins.discover(installed=[e for e in entry_points(group="infer") if e.name != "paged"])
    with pytest.raises(SettingsError, match=rf"plugin 'paged' {lacking}infer-cache-paged\.txt"):
        load("--cache.paged.block_size", "8", plugins=without, read_file=False)
    without = Plugins.discover(installed=[e for e in entry_points(group="infer") if e.name != "console"])
    with pytest.raises(SettingsError, match=rf"plugin 'timeline' {lacking}infer-console\.txt"):
        load("--observers.timeline.file", "steps.html", plugins=without, read_file=False)


def test_a_table_where_a_file_has_a_value(tmp_path: Path) -> None:
    """The sentence names the file, whether or not another source has a setting of that table."""
    file = tmp_path / "settings.toml"
    file.write_text('model = "demo"\n')
    for argv in ([], ["--model.path", "demo"]):
        with pytest.raises(
            SettingsError, match=r"model = 'demo' \(from \S*settings.toml\): model is a table .*model.path"
        ):
            load(*argv, file=str(file))
    file.write_text("port = 1\n")
    with pytest.raises(SettingsError, match=r"port \(from .*Did you mean 'server.port'"):
        load(file=str(file))
    file.write_text("[server]\napi_keys = [1]\n")
    with pytest.raises(SettingsError, match=r"server.api_keys.0 \(from \S*settings.toml\): "):
        load(file=str(file))


def test_keys_are_those_that_a_header_can_carry(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[server]\napi_keys = [" one\\n", "two three"]\n')
    keys = load(file=str(file)).settings.server.api_keys
    assert [key.get_secret_value() for key in keys] == ["one", "two three"]
    file.write_text('[server]\napi_keys = [" "]\n')
    with pytest.raises(SettingsError, match="a key is empty"):
        load(file=str(file))


@pytest.mark.parametrize("keys", ["sesame,,b", '["sesame", "b"]', "[sesame]"])
def test_no_message_has_a_key(keys: str) -> None:
    for ask in (
        lambda: load(env={"INFER_SERVER__API_KEYS": keys}, read_file=False),
        lambda: load("--server.api_keys", keys, read_file=False),
        lambda: load(overrides={"server": {"api_keys": keys}}, read_file=False),
        lambda: Settings.model_validate({"server": {"api_keys": keys}}),
    ):
        with pytest.raises((SettingsError, ValidationError)) as found:
            ask()
        assert "server.api_keys" in str(found.value)
        assert "sesame" not in str(found.value)
        assert ("a key is empty" if ",," in keys else "without brackets") in str(found.value)


def test_secrets_of_plugins_are_in_no_message() -> None:
    class Inner(BaseModel):
        tokens: dict[str, SecretStr] | None = None

    class Secretive(BaseModel, extra="forbid"):
        token: SecretStr | None = Field(None, min_length=20)
        many: Inner = Inner()

    class Plugin:
        INFER_PLUGIN_API = 2

        @hookimpl
        def infer_observers(self) -> Any:
            return [Registration("teller", lambda settings: None, "", Secretive)]

    plugins = Plugins.discover([Plugin()])
    for given in ({"token": "sesame"}, {"many": {"tokens": "sesame"}}, {"many": {"tokens": {"a": ["sesame"]}}}):
        with pytest.raises(SettingsError, match=r"observers\.teller\.(token|many\.tokens)") as found:
            load_settings(plugins, overrides={"observers": {"teller": given}}, env={}, read_file=False)
        assert "sesame" not in str(found.value)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cache.paged.block_sizes", "is not a setting of paged; did you mean block_size?"),
        ("cache.paged.zzz", "is not a setting of paged; it has block_size, "),
        ("engine.draft.pth", "is not a setting of draft; did you mean path?"),
        ("observers.otel.endpont", "is not a setting of otel; did you mean endpoint?"),
        ("ray.replica", "is not a setting of ray; did you mean replicas?"),
        ("cache.slotted.size", "the plugin 'slotted' has no settings; leave it out."),
    ],
)
def test_a_plugins_own_setting_may_be_misspelled(key: str, hint: str) -> None:
    variable = f"INFER_{key.replace('.', '__').upper()}"
    for argv, env in (((f"--{key}", "3"), {}), ((), {variable: "3"})):
        with pytest.raises(SettingsError) as found:
            load(*argv, env=env, read_file=False)
        assert hint in str(found.value)
        assert "not installed" not in str(found.value)


def test_the_environment_is_checked_too() -> None:
    with pytest.raises(
        SettingsError, match=r"from INFER_ENGIN__MAX_BATCH_SIZE.*Did you mean INFER_ENGINE__MAX_BATCH_SIZE\?"
    ):
        load(env={"INFER_ENGIN__MAX_BATCH_SIZE": "3"}, read_file=False)
    with pytest.raises(SettingsError, match="from INFER_NONSENSE"):
        load(env={"INFER_NONSENSE": "3"}, read_file=False)


def test_what_kubernetes_says_of_services_is_none_of_ours() -> None:
    """Of a Service ``infer`` and one ``infer-canary`` with a port that has a name."""
    links = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
    }
    links |= {"PORT_8000_TCP": "tcp://10.0.0.1:8000", "PORT_8000_TCP_PROTO": "tcp", "PORT_8000_TCP_PORT": "8000"}
    links |= {"PORT_8000_TCP_ADDR": "10.0.0.1"}
    env = {f"INFER_{service}{name}": value for service in ("", "CANARY_") for name, value in links.items()}
    assert load(env=env, read_file=False).settings.model_dump() == load(read_file=False).settings.model_dump()
    for wrong in (
        "INFER_SERVER_PORT_8000",
        "INFER_SERVICE",
        "INFER_PORTS",
        "INFER_PORT_TCP",
        "INFER_SERVER__SERVICE_PORT",
    ):
        with pytest.raises(SettingsError, match=f"from {wrong}"):
            load(env={wrong: "8000"}, read_file=False)
    assert load(env={"INFER_SERVER__PORT": "9000"}, read_file=False).settings.server.port == 9000
    for near in ("INFER_SERVER_PORT", "INFER_PORT"):
        with pytest.raises(SettingsError, match=rf"from {near}\) is not a setting. Did you mean INFER_SERVER__PORT\?"):
            load(env={near: "9000"}, read_file=False)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere.toml \(from --settings\) does not exist"):
        load(file="nowhere.toml")
    with pytest.raises(SettingsError, match=r"elsewhere.toml \(from INFER_SETTINGS\) does not exist"):
        load(env={"INFER_SETTINGS": "elsewhere.toml"})
    with pytest.raises(SettingsError, match=r"a+ cannot be read: .*too long"):
        load(file="a" * 300)
    bad = tmp_path / "bad.toml"
    bad.write_text("[engine\n")
    with pytest.raises(SettingsError, match=r"bad.toml cannot be read: .*line 1"):
        load(file=str(bad))
    with pytest.raises(SettingsError, match=r"is no file"):
        load(file=str(tmp_path))
    bad.write_text("engine = 3\n")
    with pytest.raises(SettingsError, match="engine = 3"):
        load(file=str(bad))


def test_a_settings_file_as_editors_on_windows_save_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 9001\r\n")
    assert load(file=str(file)).settings.server.port == 9001


def test_static_turns_chunking_off_unless_it_was_asked_for() -> None:
    loaded = load("--engine.batching_mode", "static", read_file=False)
    assert not loaded.settings.engine.use_chunked_prefill
    assert loaded.sources["engine.use_chunked_prefill"] == "default for static"


class Inner(BaseModel):
    depth: int = 1


class LooseSettings(BaseModel):
    """As who has not read that unknown keys are to be forbidden writes it."""

    size: int = 1
    inner: Inner = Inner()


class LoosePlugin:
    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_cache_pools(self) -> list[Registration[CacheFactory]]:
        return [Registration("loose", lambda context, settings: None, "test", LooseSettings)]  # type: ignore[arg-type]

    @hookimpl
    def infer_schedulers(self) -> list[SchedulerRegistration]:
        return [SchedulerRegistration("whole", lambda context, settings: None, "test", chunks=False)]  # type: ignore[arg-type]


def test_core_forbids_unknown_keys_for_plugins() -> None:
    plugins = Plugins.discover([LoosePlugin()])
    settings = load("--cache.loose.size", "3", "--cache.loose.inner.depth", "2", plugins=plugins).settings
    own = plugin_settings(settings, "cache", "loose")
    assert isinstance(own, LooseSettings)
    assert (own.size, own.inner.depth) == (3, 2)
    for key, meant in (("cache.loose.sise", "size"), ("cache.loose.inner.dept", "inner.depth")):
        with pytest.raises(
            SettingsError, match=rf"{key} \(from --{key}\) is not a setting of loose; did you mean {meant}"
        ):
            load(f"--{key}", "3", plugins=plugins)


def test_a_scheduler_says_itself_whether_it_chunks() -> None:
    plugins = Plugins.discover([LoosePlugin()])
    loaded = load("--engine.batching_mode", "whole", plugins=plugins, read_file=False)
    assert not loaded.settings.engine.use_chunked_prefill
    assert loaded.sources["engine.use_chunked_prefill"] == "default for whole"
    with pytest.raises(SettingsError, match=r'use_chunked_prefill = true cannot work with .*batching_mode = "whole"'):
        load("--engine.batching_mode", "whole", "--engine.use_chunked_prefill", "true", plugins=plugins)
    argv = ["--engine.batching_mode", "whole", "--engine.prefill_chunk_size", "64"]
    with pytest.raises(SettingsError, match=r"= 64 \(from --engine.prefill_chunk_size\) has no effect while"):
        load(*argv, plugins=plugins, read_file=False)


DIRECT: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"max_tokens_per_step": 8}}, "is below engine.max_batch_size = 16"),
    ({"engine": {"use_chunked_prefill": False, "prefill_chunk_size": 64}}, "prefill_chunk_size = 64 has no effect"),
    ({"engine": {"use_chunked_prefill": False, "max_tokens_per_step": 64}}, "needs engine.max_seq_len set"),
    ({"model": {"dtype": "float16", "device": "cpu"}}, "is slow with"),
    ({"engin": {}}, "Extra inputs are not permitted"),
    ({"Engine": {}}, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("sections", "message"), DIRECT, ids=lambda v: str(v))
def test_settings_built_directly_are_checked_too(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings(**sections)


def test_settings_built_directly_read_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_ENGINE__MAX_BATCH_SIZE", "3")
    monkeypatch.setenv("engine", '{"max_batch_size": 4}')
    assert Settings() == Settings(engine=EngineSettings(max_batch_size=16))


def test_settings_built_directly_meet_what_is_installed() -> None:
    """The plain class does not know of plugins; whoever makes an engine asks them."""
    with pytest.raises(ValidationError, match="use_chunked_prefill = true cannot work"):
        Settings.model_validate({"engine": {"batching_mode": "static", "use_chunked_prefill": True}})
    static = Settings(engine=EngineSettings(batching_mode="static"), model=ModelSettings(path="demo"))
    assert not compose(static, PLUGINS).engine.use_chunked_prefill
    composed = compose(Settings(cache=CacheSettings(backend="paged")), PLUGINS)
    assert plugin_settings(composed, "cache", "paged").model_dump()["block_size"] == 16
    assert compose(composed, PLUGINS) is composed


def test_a_value_in_one_place_is_no_table_in_another(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("engine = 3\n")
    with pytest.raises(SettingsError, match=r"engine = 3 \(from \S*s.toml\): engine is a table of settings"):
        load("--engine.max_batch_size", "3", file=str(file))
    file.write_text("nonsense = 3\n")
    with pytest.raises(SettingsError, match=r"nonsense.size \(from --nonsense.*'nonsense' is a value, not a table"):
        load("--nonsense.size", "3", file=str(file))


@pytest.mark.parametrize("key", ["tool_format", "reasoning", "generation_config"])
def test_none_is_a_choice_where_it_is_one(key: str, tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(f'[model]\n{key} = "none"\n')
    assert getattr(load(file=str(file)).settings.model, key) == "none"
    assert getattr(load(f"--model.{key}", "none").settings.model, key) == "none"


def test_a_list_may_come_from_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[model]\nplain_layers = ["*.a", "b"]\n')
    told = [
        load(file=str(file)),
        load("--model.plain_layers", "*.a, b", read_file=False),
        load(env={"INFER_MODEL__PLAIN_LAYERS": "*.a,b"}, read_file=False),
    ]
    assert [each.settings.model.plain_layers for each in told] == [["*.a", "b"]] * 3
    assert load("--model.plain_layers", "none", file=str(file)).settings.model.plain_layers == []


def test_an_empty_variable_takes_nothing_away(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[server]\napi_keys = ["sesame"]\n')
    for empty in ("INFER_SERVER__API_KEYS", "INFER_SERVER__PORT", "INFER_UNKNOWN"):
        loaded = load(env={empty: ""}, file=str(file)).settings.server
        assert [key.get_secret_value() for key in loaded.api_keys] == ["sesame"]


def test_none_is_said_alike_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[engine]\nmax_seq_len = "none"\n')
    assert load(file=str(file)).settings.engine.max_seq_len is None
    assert load("--engine.max_seq_len", "null", file=str(file)).settings.engine.max_seq_len is None
    by_a_program = load(overrides={"model": {"quantization": "none"}}, read_file=False)
    assert by_a_program.settings.model.quantization is None


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_settings_toml_holds_every_key_at_its_default() -> None:
    text = (ROOT / "settings.toml").read_text()
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    shown = {key: None if value == "none" else value for key, value in flat(tomllib.loads(uncommented))}
    defaults = {key: default for key, _, default in describe_schema(schema(PLUGINS))}
    assert shown == defaults | {"model.path": "demo"}


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    missing = [key for key, _ in describe(load(read_file=False).settings) if f"`{key}`" not in text]
    assert not missing


def test_every_hook_is_documented_with_an_example() -> None:
    """The page's examples, one after the other, are a plugin that implements every hook."""
    text = (ROOT / "docs" / "plugins.md").read_text()
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", text, flags=re.MULTILINE | re.DOTALL)
    page = ModuleType("page")
    page.__file__ = str(ROOT / "docs" / "page.py")
    exec("\n".join(textwrap.dedent(block) for _, block in blocks), vars(page))
    found = Plugins.discover([page])
    hooks = [name for name in vars(hookspecs) if name.startswith("infer_")]
    assert [hook for _, hook, _ in inspection.hooks(page)] == sorted(hooks)
    assert not [name for name in hooks if f"`{name}`" not in text]
    assert not [slot for slot, offers in found.offers.items() if offers[-1].distribution != "page"]
