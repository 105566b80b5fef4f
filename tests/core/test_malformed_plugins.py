"""Malformed plugins of every kind that we could think of do no harm to others."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, EntryPoint, entry_points

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from infer.commands import cli
from infer.plugins import discovery
from infer.plugins.discovery import Plugins

HEAD = """
import sys
from unittest.mock import ANY, Mock
from pydantic import BaseModel, Field, RootModel, create_model
from infer import hookimpl
from infer.contracts.hooks import *
from infer.contracts.cache import CacheRegistration
from infer.contracts.kernels import KernelsRegistration
from infer.contracts.registration import Registration
from infer.contracts.model import ModelRegistration
from infer.contracts.proposer import ProposerRegistration
from infer.contracts.scheduler import SchedulerRegistration
from infer.contracts.weights import WeightFormatRegistration
class Odd(BaseException): ...
class Mute(Exception):
    def __str__(self): raise ValueError("mute")
class Awkward:
    def __getattr__(self, name): raise RuntimeError("awkward")
    def __eq__(self, other): raise RuntimeError("awkward")
    def __bool__(self): raise RuntimeError("awkward")
    def __repr__(self): raise RuntimeError("awkward")
    def __iter__(self): raise RuntimeError("awkward")
class Bomb(list):
    def __iter__(self): raise Odd("bomb")
def again(): again()
def pour(): yield 1; raise RuntimeError("dry")
class Needy(BaseModel): token: str
class Fussy(BaseModel):
    def model_post_init(self, context): sys.exit(3)
class Opaque(BaseModel): call: object = Field(default_factory=Awkward)
class Uncallable(BaseModel):
    call: type(again) = again
    model_config = dict(arbitrary_types_allowed=True)
make = lambda *given: None
"""
HOOKS = {
    "infer_cache_pools": "CacheRegistration",
    "infer_models": "ModelRegistration",
    "infer_containers": "ContainerRegistration",
    "infer_weight_formats": "WeightFormatRegistration",
    "infer_tokenizers": "TokenizerRegistration",
    "infer_adapters": "AdapterRegistration",
    "infer_schedulers": "SchedulerRegistration",
    "infer_proposers": "ProposerRegistration",
    "infer_grammar_backends": "Registration",
    "infer_kernels": "KernelsRegistration",
    "infer_tool_formats": "ToolFormatRegistration",
    "infer_reasoning_formats": "Registration",
    "infer_observers": "Registration",
    "infer_routes": "Registration",
    "infer_commands": "CommandRegistration",
}
VALUES = (
    *(
        "None",
        "3",
        "-1.5",
        "True",
        "'text'",
        "b'bytes'",
        "''",
        "()",
        "[]",
        "{}",
        "object()",
        "object",
        "sys",
        "Awkward()",
    ),
    *("Mock()", "ANY", "pour()", "Bomb([1])", "Awkward", "again", "print", "[None]", "[3]", "[['x']]", "{'a': 1}"),
)
RAISES = (
    *(
        "raise RuntimeError('two\\nlines')",
        "raise SystemExit",
        "sys.exit(3)",
        "raise Odd('odd')",
        "raise Mute()",
        "again()",
    ),
    *(
        "raise GeneratorExit",
        "1 / 0",
        "import nowhere_to_be_found",
        "raise StopIteration",
        "assert False",
        "raise MemoryError",
    ),
)
NAMES = ("3", "Awkward()", "[3]", "'INFER_X'", "['PATH']", "['INFER_SETTINGS']", "['INFER_ENGINE__X']", "Bomb([1])")
"""For INFER_PLUGIN_ENV."""
FIELDS = {
    "name": ("'with-dash'", "'with.dot'", "'Upper'", "'_a'", "'a__b'", "'auto'", "'none'", "'a b'", "'ü'", "''"),
    "factory": ("None", "3", "'make'"),
    "description": ("'two\\nlines'", "None", "3"),
    "settings": ("int", "dict", "Needy", "Fussy", "Uncallable", "RootModel[dict]", "Needy.model_construct()", "Opaque"),
    "priority": ("'10'", "1.5", "True", "float('nan')", "None"),
    "unavailable": ("True", "''", "'two\\nlines'"),
}
MORE_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "ModelRegistration": {"architectures": ("'LlamaForCausalLM'", "[1]", "None")},
    "ContainerRegistration": {"suffixes": ("'.gguf'", "[1]", "None")},
    "TokenizerRegistration": {"files": ("'tekken.json'", "[1]", "None")},
    "AdapterRegistration": {"suffixes": ("'.gguf'", "[1]", "None")},
    "KernelsRegistration": {
        "devices": ("'cpu'", "[1]", "None", "3"),
        "kv_dtypes": ("'int8'", "[8]"),
        "about": ("None", "'a\\nb'"),
    },
    "SchedulerRegistration": {"chunks": ("None", "1", "'no'")},
    "ProposerRegistration": {"draft_head": ("None", "1", "'no'"), "head_path": ("1", "'no'", "[print]")},
    "ToolFormatRegistration": {"marks": ("'[CALL]'", "[1]", "None", "('a', b'b')")},
    "CommandRegistration": {
        "add_arguments": (
            *("3", "'--x'", "Awkward()", "lambda: None", "lambda parser: parser.add_argument('--settings')"),
            *("lambda parser: parser.error('no')", "lambda parser: parser.add_argument('--x', help='%(nowhere)s')"),
        ),
    },
    "CacheRegistration": {"longest": ("1", "'no'", "[print]"), "kv_dtypes": ("'int8'", "True")},
}
DEFS = {
    "unmarked": "def {hook}(): return []",
    "misspelled": "@hookimpl\ndef {hook}z(): return []",
    "argument": "@hookimpl\ndef {hook}(context): return []",
    "keyword": "@hookimpl\ndef {hook}(*, context): return []",
    "async": "@hookimpl\nasync def {hook}(): return []",
    "generator": "@hookimpl\ndef {hook}(): yield 1",
    "wrapper": "@hookimpl(wrapper=True)\ndef {hook}(): return (yield)",
    "old wrapper": "@hookimpl(hookwrapper=True)\ndef {hook}(): yield",
    "class": "@hookimpl\nclass {hook}: ...",
    "elsewhere": "@hookimpl(specname='{hook}z')\ndef other(): return []",
    "value": "{hook} = 3",
    "blind observer": "@hookimpl\ndef infer_step_finished(): ...",
    "two eyed observer": "@hookimpl\ndef infer_request_finished(record, more): ...",
    "renamed record": "@hookimpl\ndef infer_request_finished(rec): ...",
    "async observer": "@hookimpl\nasync def infer_step_finished(record): ...",
    "nothing": "",
}


def registration(kind: str, **given: str) -> str:
    keys = {"name": "'bad'", "factory": "make", "description": "'a bad one'"} | given
    return f"{kind}({', '.join(f'{key}={value}' for key, value in keys.items())})"


@st.composite
def malformed(draw: st.DrawFn) -> tuple[str, str]:
    """(source, what the entry point names in it)"""
    hook = draw(st.sampled_from(sorted(HOOKS)))
    kind, value, fails = HOOKS[hook], draw(st.sampled_from(VALUES)), draw(st.sampled_from(RAISES))
    sound = f"@hookimpl\ndef {hook}(): return [{registration(kind)}]"
    api, at = "INFER_PLUGIN_API = 2", ""
    match draw(
        st.sampled_from(
            ["import", "api", "api", "env", "module", "entry", "def", "def", "hook", "return", "item"] + ["field"] * 3
        )
    ):
        case "import":
            source = f"{fails}\n{sound}"
        case "api":
            source, api = (
                sound,
                draw(st.sampled_from(["", *(f"INFER_PLUGIN_API = {v}" for v in (*VALUES, "99", "'1'", "1.0"))])),
            )
        case "env":
            source = f"{sound}\nINFER_PLUGIN_ENV = {draw(st.sampled_from(NAMES))}"
        case "module":
            source = f"{sound}\ndef {draw(st.sampled_from(['__dir__', '__getattr__']))}(*names): {fails}"
            api = ""
        case "entry":
            source, at = f"{sound}\nit = {value}", draw(st.sampled_from([":it", ":nowhere", ":it.nowhere"]))
        case "def":
            source = draw(st.sampled_from(sorted(DEFS.values()))).format(hook=hook)
        case "hook":
            source = f"@hookimpl\ndef {draw(st.sampled_from([hook, 'infer_checkpoints']))}(): {fails}"
        case "return":
            which = draw(st.sampled_from([hook, "infer_checkpoints"]))
            harmless = {"()", "[]", "{}"}  # nothing is offered, or nothing is wrong with what is
            wrong = draw(
                st.sampled_from(
                    [v for v in VALUES if v not in harmless and not (which == "infer_checkpoints" and v == "{'a': 1}")]
                )
            )
            source = f"@hookimpl\ndef {which}(): return {wrong}"
        case "item":
            items = [f"[{v}]" for v in VALUES] + ["[Registration]", f"[{registration(kind)}] * 2"]
            if hook == "infer_models":
                items.append(f"[{registration('Registration')}]")
            source = f"@hookimpl\ndef {hook}(): return {draw(st.sampled_from(items))}"
        case _:
            fields = FIELDS | MORE_FIELDS.get(kind, {})
            name = draw(st.sampled_from(sorted(fields)))
            source = (
                f"@hookimpl\ndef {hook}(): return [{registration(kind, **{name: draw(st.sampled_from(fields[name]))})}]"
            )
    return f"{HEAD}\n{api}\n{source}\n", at


HEALTHY = f"""{HEAD}
INFER_PLUGIN_API = 2
class Own(BaseModel): size: int = 3
@hookimpl
def infer_cache_pools(): return [Registration("healthy", make, "sound", Own)]
"""

Broken = Callable[[str, str], list[EntryPoint]]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Install a plugin of this source; the entry points of all that is then installed, a healthy one among them."""
    ours = list(entry_points(group="infer"))
    numbers = itertools.count()

    def install(source: str, at: str) -> list[EntryPoint]:
        found = []
        for module, text, attribute in ((f"malformed_{next(numbers)}", source, at), ("healthy_one", HEALTHY, "")):
            folder = tmp_path_factory.mktemp(module)
            (folder / f"{module}.py").write_text(text)
            info = folder / f"{module}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.split('_')[0]}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[infer]\nit = {module}{attribute}\n")
            path.append(str(folder))
            found += [e for d in Distribution.discover(path=[str(folder)]) for e in d.entry_points]
        importlib.invalidate_caches()
        return [found[0], *ours, found[1]]

    path = sys.path
    before = list(path)
    yield install
    path[:] = before


@pytest.mark.parametrize("hook", HOOKS)
def test_a_sound_registration_is_taken(beside: Broken, hook: str) -> None:
    """Otherwise the malformed ones below would be refused for this."""
    source = f"{HEAD}\nINFER_PLUGIN_API = 2\n@hookimpl\ndef {hook}(): return [{registration(HOOKS[hook])}]"
    assert Plugins.discover(installed=beside(source, "")).broken == []


@pytest.mark.parametrize(
    ("hook", "field", "value"),
    [
        (hook, field, value)
        for hook, kind in HOOKS.items()
        for field in MORE_FIELDS.get(kind, {})
        for value in MORE_FIELDS[kind][field]
    ],
)
def test_a_field_of_one_kind_of_registration_is_checked(beside: Broken, hook: str, field: str, value: str) -> None:
    made = registration(HOOKS[hook], **{field: value})
    source = f"{HEAD}\nINFER_PLUGIN_API = 2\n@hookimpl\ndef {hook}(): return [{made}]"
    (broken,) = Plugins.discover(installed=beside(source, "")).broken
    assert f"offers 'bad', but its {field}" in broken.reason


@given(malformed())
@settings(max_examples=examples(40, 12), suppress_health_check=list(HealthCheck))
def test_malformed_plugins_take_nobody_down(
    beside: Broken, capsys: pytest.CaptureFixture[str], plugin: tuple[str, str]
) -> None:
    installed = beside(*plugin)
    found = Plugins.discover(installed=installed)
    (broken,) = found.broken
    assert broken.distribution == "malformed"
    assert broken.reason.isprintable()
    assert broken.reason.endswith((".", "?")), broken.reason
    assert found.get("cache", "healthy", "cache.backend").distribution == "healthy"
    assert len(found.offers["cache"]) == 3, "nothing of the malformed one stays"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "entry_points", lambda group: installed)
        for argv in (["plugins", "--json", "--cache.healthy.size", "4"], ["settings", "--json"]):
            capsys.readouterr()
            assert cli.main(argv) == 0
            answer = json.loads(capsys.readouterr().out)
            if argv[0] == "plugins":
                (row,) = [row for row in answer["parts"] if row["chosen"] == "broken"]
                assert (row["distribution"], row["why"]) == ("malformed", broken.reason)
