"""Plugins as users install them: real distributions on sys.path, valid and broken."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support import without
from torch import Tensor

from infer import LLM, PLUGIN_API, EngineDeadError, InferError, PluginError, SamplingParams, SettingsError, hookimpl
from infer.assemble.weights import Weights
from infer.commands import cli
from infer.contracts.cache import Allocation, CacheFactory
from infer.contracts.kernels import Draws
from infer.contracts.model import ModelRegistration
from infer.contracts.records import ObserverFactory, RequestRecord, StepRecord
from infer.contracts.registration import Registration
from infer.contracts.scheduler import Schedule, SchedulerRegistration
from infer.contracts.sections import Settings
from infer.engine.schedulers import ContinuousScheduler
from infer.errors import one_line
from infer.kernels.reference import ReferenceKernels
from infer.plugins import inspection
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_cache_slotted import SlottedPool

SOUND = """
from pydantic import BaseModel
from infer import hookimpl
from infer.contracts.registration import Registration
INFER_PLUGIN_API = {api}

class Size(BaseModel):
    size: int = 1

class Token(BaseModel):
    token: str

@hookimpl
def infer_cache_pools():
    pool = lambda context, settings: None
    return [Registration("{name}", pool, "a test's pool", priority={priority}, unavailable={why})]
"""

COMMANDS = """
from infer import hookimpl
from infer.contracts.command import CommandRegistration
INFER_PLUGIN_API = {api}

def arguments(parser):
    parser.add_argument("--who", default="nobody")

def run(args, context):
    print("hello", args.who, context.settings.server.port, context.sources["server.port"], *context.argv)
    return {code}

@hookimpl
def infer_commands():
    return [CommandRegistration("{name}", run, "100 % a test's", add_arguments=arguments)]
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
    assert {o.name for o in plugins.offers["model"]} >= {"llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2"}
    assert plugins.choose("weights", Settings(), [""]).distribution == "infer-core"
    assert "demo" in plugins.checkpoints
    assert not plugins.broken


def test_a_strangers_plugin_is_found_and_named(install: Install) -> None:
    install("stranger")
    offer = Plugins.discover().get("cache", "mine", "cache.backend")
    assert (offer.distribution, offer.version) == ("stranger", "1.0")


def test_a_plugin_that_is_installed_may_be_named_in_process_as_well(install: Install) -> None:
    install("stranger")
    importlib.invalidate_caches()
    plugins = Plugins.discover([importlib.import_module("stranger")])
    assert plugins.get("cache", "mine", "cache.backend").distribution == "stranger"


def test_missing_names_what_is_installed_and_what_helps() -> None:
    with pytest.raises(
        PluginError, match=r"cache.backend is 'paged'.*installed: slotted.*pip install -r dist/infer-cache-paged.txt"
    ):
        without("paged").get("cache", "paged", "cache.backend")
    with pytest.raises(
        PluginError,
        match=r"engine.speculation is 'draft', but .* none is installed. .*pip install -r dist/infer-speculation.txt",
    ):
        without("speculation").get("proposer", "draft", "engine.speculation")
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
        (
            SOUND.replace("INFER_PLUGIN_API = {api}", ""),
            rf"states no INFER_PLUGIN_API.* write INFER_PLUGIN_API = {PLUGIN_API}",
        ),
        (SOUND.replace("{api}", "99"), rf"was made for API 99, but this infer-core speaks {PLUGIN_API}"),
        (
            SOUND.replace("{api}", "'1'"),
            rf"INFER_PLUGIN_API is '1', not a number; write INFER_PLUGIN_API = {PLUGIN_API}",
        ),
        (
            SOUND.replace("infer_cache_pools", "infer_cache_pool"),
            r"'infer_cache_pool'.*mean 'infer_cache_pools'",
        ),
        ("import sys; sys.exit(3)", r"its import failed: SystemExit: 3 \(broken_one.py:1\)"),
        (SOUND.replace("@hookimpl", ""), r"its infer_cache_pools is not marked as a hook: put @hookimpl"),
        (SOUND.replace("pools()", "pools(context)"), r"takes context, but is called as infer_cache_pools\(\)"),
        (
            SOUND + "@hookimpl\ndef infer_step_finished():\n    pass",
            r"its infer_step_finished takes nothing, but is called as infer_step_finished\(record\)",
        ),
        (SOUND.replace("return [", "yield ["), r"its infer_cache_pools is async or a generator"),
        (
            SOUND.replace("[Reg", "(Reg").replace("})]", "}))"),
            r"a Registration, not a list of CacheRegistrations",
        ),
        (SOUND.replace("infer_cache_pools", "infer_models"), r"lists a Registration, not a ModelRegistration"),
        (SOUND.replace("{name}", "my-pool"), r"offers the name 'my-pool'; a name has lower-case letters, digits"),
        (SOUND.replace("priority={priority}", "priority='10'"), r"offers 'mine', but its priority is '10'"),
        (SOUND.replace("priority={priority}", "settings=dict"), r"its settings is the type dict, not a class that ext"),
        (
            SOUND.replace('"{name}"', "'mro'").replace("priority={priority}", "settings=Size"),
            r"its settings cannot be a table of that name, which is infer's own",
        ),
        (
            SOUND.replace("priority={priority}", "settings=Token"),
            r"its settings have no value without.*token Field requ",
        ),
        (
            COMMANDS.replace("{code}", "0").replace('"--who"', '"--settings"'),
            r"offers 'mine', but its add_arguments failed: ArgumentError: .*conflicting option string: --settings",
        ),
        (SOUND + "INFER_PLUGIN_ENV = ['INFER_CACHE__TOKEN']", r"INFER_PLUGIN_ENV has 'INFER_CACHE__TOKEN'"),
    ],
)
def test_a_broken_plugin_is_reported_and_takes_nobody_down(install: Install, source: str, reason: str) -> None:
    install("broken-one", source)
    plugins = Plugins.discover()
    (broken,) = plugins.broken
    assert broken.distribution == "broken-one"
    assert "\n" not in broken.reason
    assert plugins.get("cache", "slotted", "cache.backend")
    with pytest.raises(PluginError, match=rf"broken-one is broken: .*{reason}"):
        plugins.get("cache", "mine", "cache.backend")


def test_auto_takes_the_highest_priority_and_says_so(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("better", name="better", priority=15)
    with caplog.at_level(logging.INFO):
        assert Plugins.discover().choose("cache", Settings()).name == "better"
    assert "auto chose better of better, over paged" in caplog.text


def test_auto_does_not_choose_between_equals(install: Install) -> None:
    install("equal", name="equal", priority=10)
    with pytest.raises(PluginError, match=r"'paged' \(infer-cache-paged\).*equal priority; name one"):
        Plugins.discover().choose("cache", Settings())


def test_what_cannot_be_used_is_passed_over_with_its_reason(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("sick", name="sick", priority=99, why="'it has no legs'")
    with caplog.at_level(logging.INFO, logger="infer"):
        assert Plugins.discover().choose("cache", Settings()).name == "paged"
    assert "auto passes over sick of sick: it has no legs" in caplog.text
    with pytest.raises(PluginError, match=r"cache.backend is 'sick', but sick cannot be used here: it has no legs"):
        Plugins.discover().get("cache", "sick", "cache.backend")


def test_unknown_architecture_names_the_known() -> None:
    """A family that knows all comes after those that name it."""
    assert Plugins.discover().choose("model", Settings(), ["MambaForCausalLM"]).name == "transformers"
    assert Plugins.discover().choose("model", Settings(), ["LlamaForCausalLM"]).name == "llama"
    with pytest.raises(PluginError, match=r"MambaForCausalLM.*LlamaForCausalLM.*infer-models-transformers runs") as why:
        without("models_transformers").choose("model", Settings(), ["MambaForCausalLM"])
    assert "*" not in str(why.value)


def test_unknown_ways_to_store_weights_name_the_package_that_reads_them() -> None:
    plugins = Plugins.discover()
    for method in ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4"):
        assert plugins.choose("weights", Settings(), [method]).distribution == "infer-formats"
    with pytest.raises(PluginError, match=r"'exl2', which no installed plugin reads; infer loads f.*, gptq, mxfp4\."):
        plugins.choose("weights", Settings(), ["exl2"])
    plugins = without("formats")
    with pytest.raises(
        PluginError, match=r"'awq', which no .* reads; pip install -r dist/infer-formats.txt brings one; infer loads"
    ):
        plugins.choose("weights", Settings(), ["awq"])
    with pytest.raises(
        PluginError, match=r"'exl2', which no installed plugin reads; infer loads .* bfloat16 weights\."
    ):
        plugins.choose("weights", Settings(), ["exl2"])
    with pytest.raises(PluginError, match=r"'xx+…x+.*', which no installed plugin reads") as refused:
        plugins.choose("weights", Settings(), [f"{'x' * 5000}\n"])
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


FAMILIES = """
from infer import hookimpl
from infer.contracts.model import ModelRegistration
INFER_PLUGIN_API = {api}

@hookimpl
def infer_models():
    model = lambda config, context, settings: None
    known = ("LlamaForCausalLM",) if {priority} else ()
    return [ModelRegistration("{name}", model, "a test's family", priority={priority}, architectures=known)]
"""


def test_a_family_that_names_no_architecture_is_not_chosen_by_auto(install: Install) -> None:
    """And of two that know one, the higher priority is."""
    install("modest", FAMILIES, name="modest", priority=0)
    assert Plugins.discover().choose("model", Settings(), ["LlamaForCausalLM"]).name == "llama"
    with pytest.raises(PluginError, match=r"architecture is not stated, which no installed plugin knows"):
        without("models_transformers").choose("model", Settings(), [])
    install("proud", FAMILIES, name="proud", priority=5)
    assert Plugins.discover().choose("model", Settings(), ["LlamaForCausalLM"]).name == "proud"


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


def test_an_observer_may_leave_while_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving:
        def infer_step_finished(self, record: StepRecord) -> None:
            leave()
            raise ValueError("bad observer")

    plugins = Plugins.discover()
    leave = plugins.subscribe("A test's", Leaving())
    plugins.notify("infer_step_finished", StepRecord(0, 0.0, 0.0, (), 1, 0, 0, 0, 0, 0, 0, 0))
    assert caplog.messages == ["A test's failed in infer_step_finished and is left out"]


def test_an_object_given_by_hand_is_checked_too() -> None:
    with pytest.raises(PluginError, match="states no INFER_PLUGIN_API"):
        Plugins.discover([SimpleNamespace()])


def test_two_that_bring_one_checkpoint_are_in_nobody_elses_way(install: Install, tmp_path: Path) -> None:
    source = """
from infer import hookimpl
INFER_PLUGIN_API = {api}
@hookimpl
def infer_checkpoints():
    return {{"mine": "/nowhere"}}
"""
    install("first-one", source)
    install("second-one", source)
    plugins = Plugins.discover()
    plugins.check_bundled("demo")
    with pytest.raises(PluginError, match="first-one and second-one both bring a checkpoint 'mine'"):
        plugins.check_bundled("mine")


def test_a_variable_of_a_plugins_own_is_no_setting(install: Install) -> None:
    env = {"INFER_MINE_TOKEN": "secret"}
    with pytest.raises(SettingsError, match="from INFER_MINE_TOKEN"):
        load_settings(Plugins.discover(), env=env, read_file=False)
    install("with-token", SOUND + "INFER_PLUGIN_ENV = ['INFER_MINE_TOKEN']\n")
    plugins = Plugins.discover()
    assert load_settings(plugins, env=env, read_file=False)
    with pytest.raises(SettingsError, match="from INFER_MINE_TOKENS"):
        load_settings(plugins, env=env | {"INFER_MINE_TOKENS": "x"}, read_file=False)


def test_a_table_of_a_broken_plugin_leads_to_the_reason(install: Install) -> None:
    install("broken-one", "raise RuntimeError('no luck')")
    with pytest.raises(SettingsError, match=r"cache.mine.size.*broken-one is broken: its import failed.*no luck"):
        load_settings(Plugins.discover(), argv=["--cache.mine.size", "3"], env={}, read_file=False)


def test_infer_plugins_chooses_as_serve_does(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--kernels.backend", "triton", "--model.device", "cpu"]
    assert cli.main(["plugins", *argv]) == 2
    listed = capsys.readouterr()
    assert "kernels.backend 'triton' runs on cuda, but the model is on cpu" in listed.err
    (row,) = [line for line in listed.out.splitlines() if line.startswith("kernels") and " triton " in line]
    assert " no " in row
    with pytest.raises(SettingsError, match="runs on cuda, but the model is on cpu"):
        LLM("demo", kernels={"backend": "triton"}, model={"device": "cpu"})


def test_a_plugins_command_gets_its_arguments_and_settings(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    install("greeter", COMMANDS, name="hello", code=1)
    assert cli.main(["hello", "--who", "you", "--server.port", "9"]) == 1
    assert capsys.readouterr().out == "hello you 9 --server.port --server.port 9\n"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["hello", "--help"])
    listed = capsys.readouterr().out
    assert "100 % a test's" in listed
    assert "--who" in listed
    assert "--settings FILE" in listed
    assert cli.main(["hello", "--server.prot", "9"]) == 2
    assert "mean 'server.port'" in capsys.readouterr().err
    assert cli.main(["plugins", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["parts"] if row["slot"] == "command"]
    assert [row["name"] for row in rows if row["distribution"] == "greeter"] == ["hello"]
    assert {row["name"] for row in rows} > {"serve", "generate", "chat", "demo", "bench", "plugins", "settings"}


@pytest.mark.parametrize(
    ("name", "package"), [("check", "testing"), ("new", "testing"), ("bench", "bench"), ("demo", "bench")]
)
def test_a_command_of_a_package_that_is_not_installed_names_the_package(name: str, package: str) -> None:
    says = rf"There is no command '{name}'; .* Install it: pip install -r dist/infer-{package}.txt\.$"
    with pytest.raises(InferError, match=says):
        cli._command(without(package), name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["helo"], "There is no command 'helo'; there are bench, .*mean 'hello'"),
        (["hello"], "first and second both offer 'hello' for the command line; uninstall one"),
        (["settings"], "infer-core and third both offer 'settings' for the command line; uninstall one"),
        (["odd"], "The command plugin 'odd' of fourth returned a str, not an exit code"),
        (["raises"], r"^infer: The command plugin 'raises' of fifth failed: ZeroDivisionError: .*py:\d+\); --log"),
    ],
)
def test_a_command_has_one_owner(
    install: Install,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: list[str],
    says: str,
) -> None:
    """Whoever else clashes."""
    monkeypatch.chdir(tmp_path)
    for distribution, name in (("first", "hello"), ("second", "hello"), ("third", "settings"), ("fourth", "odd")):
        install(distribution, COMMANDS, name=name, code="'fine'")
    install("fifth", COMMANDS, name="raises", code="1 / 0")
    assert cli.main(argv) == 2
    assert re.search(says, capsys.readouterr().err)
    assert cli.main(["plugins"]) == 0


@pytest.mark.parametrize("key", ["batching_mode", "speculation"])
def test_names_are_checked_before_weights_are_loaded(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "load", lambda *given: pytest.fail("they are loaded"))
    with pytest.raises(PluginError, match=f"engine.{key} is 'nope', but no such plugin is installed"):
        LLM("demo", engine={key: "nope"})


class Making:
    """A plugin whose factories are given."""

    INFER_PLUGIN_API = PLUGIN_API

    def __init__(self, factory: Callable[..., object]) -> None:
        self.factory: Any = factory

    @hookimpl
    def infer_cache_pools(self) -> list[Registration[CacheFactory]]:
        return [Registration("mine", self.factory, "a test's")]

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        return [ModelRegistration("mine", self.factory, "a test's")]

    @hookimpl
    def infer_kernels(self) -> list[Registration[Any]]:
        return [Registration("mine", self.factory, "a test's")]

    @hookimpl
    def infer_schedulers(self) -> list[SchedulerRegistration]:
        return [SchedulerRegistration("mine", self.factory, "a test's")]


def wrong(*given: object) -> object:
    raise KeyError("hidden_size")


@pytest.mark.parametrize(
    ("sections", "lacks"),
    [
        ({"cache": {"backend": "mine"}}, r"allocate, .* of CachePoolProtocol"),
        ({"model": {"family": "mine"}}, r"attention, expected, .* of ModelProtocol"),
        ({"kernels": {"backend": "mine"}}, r"adapter_table, .* of KernelsProtocol"),
        ({"engine": {"batching_mode": "mine"}}, r"add, .* of SchedulerProtocol"),
    ],
    ids=["cache", "model", "kernels", "scheduler"],
)
def test_a_factory_that_fails_is_named_with_what_lacks(sections: dict[str, Any], lacks: str) -> None:
    whose = r"The \w+ plugin 'mine' of Making cannot be"
    for factory, why in (
        (wrong, r"made: KeyError: 'hidden_size' \(test_plugins.py:\d+\)\.$"),
        (lambda *given: None, r"made: its factory returned None\.$"),
        (lambda *given: sys.exit(3), r"made: SystemExit: 3"),
        (lambda *given: object(), rf"used: its factory made one of type object, which lacks {lacks}\.$"),
    ):
        with pytest.raises(PluginError, match=f"{whose} {why}"):
            LLM("demo", plugins=[Making(factory)], **sections)


def test_kernels_that_draw_a_token_of_no_model_are_named_with_who_brings_them() -> None:
    class Wild(ReferenceKernels):
        wild = False

        def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
            return super().sample(logits_NV, draws) + self.wild * 10**7

    kernels = Wild()
    with LLM("demo", plugins=[Making(lambda *given: kernels)], kernels={"backend": "mine"}) as llm:
        kernels.wild = True
        with pytest.raises(InferError, match=r"The kernels plugin 'mine' of Making drew token 1\d{7}, but"):
            llm.generate("a", SamplingParams(max_tokens=2))


def scheduler(**methods: Callable[..., object]) -> Making:
    """A plugin with a scheduler some of whose methods are others."""
    return Making(lambda context, settings: type("Odd", (ContinuousScheduler,), methods)(context, settings))


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (
            Making(lambda *given: ContinuousScheduler),
            "made: its factory returned the class ContinuousScheduler, not",
        ),
        (scheduler(add=lambda self: None), r"its Odd.add\(\) cannot take \(sequence\): too many positional arguments"),
        (scheduler(finish=lambda self, one, why: None), r"Odd.finish\(one, why\) .* argument: 'why'\.$"),
    ],
    ids=["a class", "too few", "too many"],
)
def test_what_cannot_be_called_as_the_contract_says_is_refused_at_the_start(plugin: Making, says: str) -> None:
    with pytest.raises(PluginError, match=f"The scheduler plugin 'mine' of Making cannot be .*{says}"):
        LLM("demo", plugins=[plugin], engine={"batching_mode": "mine"})


@pytest.mark.parametrize(
    ("method", "fits"),
    [
        (lambda first, second, *, rows=None: None, True),
        (lambda *given, rows: None, False),
        (lambda *given, **named: None, True),
        (lambda one, two, three=None: None, True),
        (lambda one, two: None, False),
        (lambda one, two, three: None, False),
        (print, True),
        (SimpleNamespace(__signature__=3), True),
    ],
)
def test_which_parameters_fit(method: Any, fits: bool) -> None:
    """Those of a method that takes what is required by position, and the rest by position or by name."""

    def promised(self: Any, first: int, second: int, rows: int | None = None) -> None: ...

    assert (inspection._misfit(method, promised) == "") is fits


class Unloadable:
    """All that a model has, but it does not know its tensors."""

    attention = ()
    vocab_size = 9
    forward = logits = load = expected = wrong


def test_a_model_that_cannot_be_loaded_is_named_too() -> None:
    plugin = Making(lambda config, context, settings: Unloadable())
    with pytest.raises(
        PluginError, match=r"The model plugin 'mine' of Making cannot be loaded: KeyError: 'hidden_size'"
    ):
        LLM("demo", plugins=[plugin], model={"family": "mine"})


class Unsound(ReferenceKernels):
    def rms_norm(self, *given: Any, **named: Any) -> Any:
        raise KeyError("eps")


def test_a_part_that_fails_in_the_check_at_the_start_is_one_sentence() -> None:
    with pytest.raises(
        PluginError, match=r"^The check at the start failed: KeyError: 'eps' \(test_plugins.py:\d+\)\.$"
    ):
        LLM("demo", plugins=[Making(lambda device, settings: Unsound())], kernels={"backend": "mine"})


def test_the_place_of_a_fault_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages have a file __init__.py."""
    (tmp_path / "somebodys").mkdir()
    (tmp_path / "somebodys" / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ZeroDivisionError) as caught:
        importlib.import_module("somebodys")
    assert one_line(caught.value) == "ZeroDivisionError: division by zero (somebodys/__init__.py:1)"


class Watch(BaseModel):
    prefix: str = "a"


class Watching:
    """A plugin that offers observers."""

    INFER_PLUGIN_API = PLUGIN_API

    def __init__(self) -> None:
        self.told: list[str] = []

    @hookimpl
    def infer_observers(self) -> list[Registration[ObserverFactory]]:
        plugin = self

        class Observer:
            def __init__(self, settings: Watch) -> None:
                self.prefix = settings.prefix

            def infer_request_finished(self, record: RequestRecord) -> None:
                plugin.told.append(f"{self.prefix} {record.num_generated}")

            def close(self) -> None:
                plugin.told.append("closed")
                raise ValueError("too late")

        class Blind:
            async def infer_step_finished(self, record: StepRecord) -> None: ...

        made: Any = Observer
        blind: Any = lambda settings: Blind()  # noqa: E731
        fails: Any = wrong
        return [
            Registration("watch", made, "a test's", Watch),
            Registration("fails", fails, "fails"),
            Registration("blind", blind, "sees nothing"),
        ]


def test_an_observer_has_settings_and_is_closed_once(caplog: pytest.LogCaptureFixture) -> None:
    plugin = Watching()
    with LLM("demo", plugins=[plugin], observers={"watch": {"prefix": "b"}}, kernels={"threads": 1}) as llm:
        llm.generate("def ", SamplingParams(max_tokens=3, ignore_eos=True))
        llm.close()
    assert plugin.told == ["b 3", "closed"]
    for why in (
        r"'fails' of Watching cannot be made: KeyError: 'hidden_size'",
        r"'blind' of Watching cannot be used: its infer_step_finished is async",
        r"'watch' of Watching failed when it was closed: ValueError: too late",
    ):
        assert why in caplog.text


def test_observers_are_closed_where_no_engine_comes_to_be() -> None:
    plugin = Watching()
    with pytest.raises(SettingsError):
        LLM("demo", plugins=[plugin], engine={"max_seq_len": 10**9})
    assert plugin.told == ["closed"]


def test_infer_plugins_lists_observers() -> None:
    assert {o.name for o in Plugins.discover().offers["observer"]} == {"otel", "timeline"}


class Hasty:
    """Schedulers that no engine should believe."""

    INFER_PLUGIN_API = PLUGIN_API

    @hookimpl
    def infer_schedulers(self) -> list[SchedulerRegistration]:
        factory: Any = lambda context, settings: Twice(context.pool, context.engine)  # noqa: E731
        return [SchedulerRegistration("hasty", factory, "plans everything twice")]


class Twice(ContinuousScheduler):
    def schedule(self) -> Schedule:
        plan = super().schedule()
        return replace(plan, prefills=plan.prefills * 2)


def test_the_engine_asks_a_plugins_plan_before_it_follows_it(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("demo", plugins=[Hasty()], engine={"batching_mode": "hasty"}, kernels={"threads": 1})
    with llm, pytest.raises(EngineDeadError, match="The scheduler plugin 'hasty' of Hasty planned"):
        llm.generate("def ", SamplingParams(max_tokens=3))


def test_a_pool_that_fails_is_named_and_not_the_scheduler_that_asks_it() -> None:
    class Leaky(SlottedPool):
        def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
            if reuse:  # the check at the start asks without
                raise ValueError("lost")
            return super().allocate(token_ids, reuse=reuse, salt=salt)

    plugin = Making(lambda context, settings: Leaky(context))
    says = r"The cache plugin 'mine' of Making failed: ValueError: lost \(test_plugins.py:\d+\)"
    llm = LLM("demo", plugins=[plugin], cache={"backend": "mine"}, kernels={"threads": 1})
    with llm, pytest.raises(EngineDeadError, match=says) as failed:
        llm.generate("def ", SamplingParams(max_tokens=1))
    assert "scheduler" not in str(failed.value)


@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_while_plugins_are_imported(before: bool) -> None:
    collected = list[str]()

    def note(phase: str, info: object) -> None:
        collected.append(phase)

    class Entry:
        dist = None
        name = value = "many"

        def load(self) -> object:
            gc.callbacks.append(note)
            many = [list[int]() for _ in range(2 * gc.get_threshold()[0])]
            gc.callbacks.remove(note)
            return SimpleNamespace(many=many)

    (gc.enable if before else gc.disable)()
    try:
        Plugins.discover(installed=[Entry()])  # type: ignore[list-item]
        assert gc.isenabled() == before
    finally:
        gc.enable()
    assert collected == []
