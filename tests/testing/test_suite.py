"""What all suites have in common: replays, the command line, the documentation, and how many planted bugs they find."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.testing import (
    test_formats,
    test_kernels,
    test_models,
    test_pools,
    test_proposers,
    test_routes,
    test_schedulers,
    test_tool_formats,
)
from tests.testing.test_tool_formats import ARGUMENTS, NAME, SCHEMA, WRITTEN
from torch import Tensor

from infer import hookimpl
from infer.commands.cli import _parser, main
from infer.contracts.command import CommandContext
from infer.contracts.kernels import KernelsRegistration
from infer.errors import InferError
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_testing import ConformanceError, check, check_kernels, tiny_checkpoint

DOCS = Path(__file__).parents[2] / "docs/testing.md"
LISTS = (
    test_formats,
    test_kernels,
    test_models,
    test_pools,
    test_proposers,
    test_routes,
    test_schedulers,
    test_tool_formats,
)


def test_many_bugs_are_planted_each_under_its_own_name() -> None:
    names = [bug.name for module in LISTS for bug in module.planted.found]
    assert len(set(names)) == len(names) >= 100
    for module in LISTS:
        assert len({bug.check for bug in module.planted.found}) > 1, "in several checks of each suite"


MY_ROUTES = """
from tests.testing.test_tool_formats import ARGUMENTS, NAME, SCHEMA, WRITTEN

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route

INFER_PLUGIN_API = 2


@hookimpl
def infer_routes():
    def routes(service, settings):
        async def mine(http):
            return await service.answer(http, {"mine": True})

        return [Route("GET", "/mine", mine, "Mine.", dict[str, bool])]

    return [Registration("mine", routes, "GET /mine")]
"""


@pytest.mark.slow
def test_the_documented_tests_and_the_failure_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCS.read_text()
    tests, plugin, family, route = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    module = ModuleType("my_plugin")
    exec(plugin, vars(module))
    monkeypatch.setitem(sys.modules, "my_plugin", module)
    names: dict[str, Any] = {}
    exec(tests, names)
    with pytest.raises(ConformanceError) as failure:
        names["test_my_kernels"]()
    assert f"{failure.value}\n" == shown
    exec(family, names)
    names["test_my_family"]()
    module = ModuleType("my_routes")
    exec(MY_ROUTES, vars(module))
    monkeypatch.setitem(sys.modules, "my_routes", module)
    exec(route, names)
    names["test_my_route"]()


class Blind(ReferenceKernels):
    def rms_norm(self, x_TD: Any, weight_D: Any, eps: float, unit_offset: bool = False) -> Any:
        return super().rms_norm(x_TD, weight_D, 10 * eps, unit_offset)


def run(*words: str) -> int:
    """`infer check` with a plugin of kernels."""
    registered = lambda: [KernelsRegistration("mine", lambda device, settings: Blind(), "mine")]  # noqa: E731
    plugins = Plugins.discover([SimpleNamespace(INFER_PLUGIN_API=2, infer_kernels=hookimpl(registered))])
    loaded = load_settings(plugins, env={}, read_file=False)
    args = _parser([check.COMMAND], {}).parse_args(["check", *words])
    return check.run(args, CommandContext(loaded.settings, loaded.sources, plugins, ()))


def test_one_error_in_several_checks_is_told_once() -> None:
    class Broken(ReferenceKernels):
        def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
            raise NotImplementedError("write it")

    with pytest.raises(ConformanceError) as caught:
        check_kernels(Broken(), only=["rms_norm", "rows_of_elementwise", "embedding"])
    text = str(caught.value)
    assert text.count("raised NotImplementedError: write it (test_suite.py:") == 1
    assert text.count("contract:") == 1
    assert text.endswith("\n    the same: rows_of_elementwise")
    assert [outcome.name for outcome in caught.value.outcomes] == ["rms_norm", "rows_of_elementwise"]


def test_a_failure_is_printed_with_the_command_that_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels:mine", "--only", "rms_norm", "--only", "embedding", "--only", "store_kv_int8") == 1
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"    replay: (infer check kernels:mine --only rms_norm --seed 0 --case (\d+))", lines[2])
    assert found, lines
    assert lines[0].startswith("rms_norm: rms_norm of")
    assert lines[3:] == [
        "store_kv_int8: skipped: the registration's kv_dtypes do not name int8",
        "embedding: ok (4 cases)",
        "The kernels plugin 'mine' of SimpleNamespace: 1 ok, 1 skipped, 1 failed",
    ]
    assert run(*found[1].split()[2:]) == 1
    assert capsys.readouterr().out.splitlines()[0] == lines[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["kernels"], "'kernels' names no part; write SLOT:NAME"),
        (["observer:mine"], "'observer:mine' names no part"),
        (["kernels:yours"], "'yours', but no such plugin is installed"),
        (["kernels:mine", "--only", "rms_nrom"], "There is no check 'rms_nrom'; there are extend_attention, "),
        (["model:llama"], "give --checkpoint DIR"),
        (["tool_format:tags"], "give --call FILE, a JSON object"),
        (["tool_format:tags", "--call", "/dev/null"], "--call /dev/null cannot be read"),
        (["tool_format:tags", "--call", __file__], "cannot be read"),
        (["model:llama", "--against", "vllm"], "--against vllm: a model is compared with auto, transformers or none"),
    ],
)
def test_what_cannot_be_checked_is_said(words: list[str], says: str) -> None:
    with pytest.raises(InferError, match=re.escape(says)):
        run(*words)


@pytest.mark.parametrize(
    ("part", "only", "more"),
    [
        ("cache:paged", "slots", ["--cache.paged.block-size=4"]),
        ("model:qwen3", "shapes", ["--checkpoint", "{folder}"]),
        ("tool_format:xml", "reads", ["--call", "{folder}/call.json"]),
        pytest.param("scheduler:static", "drains", [], marks=pytest.mark.slow),
        pytest.param("proposer:ngram", "ends", [], marks=pytest.mark.slow),
        pytest.param(
            *("weights:safetensors", "near_plain", ["--checkpoint", "{folder}", "--against", "{folder}"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_parts_are_checked_by_name(
    part: str, only: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint("Qwen3ForCausalLM", tmp_path)
    call = {"text": WRITTEN["xml"], "name": NAME, "arguments": ARGUMENTS, "schema": SCHEMA}
    (folder / "call.json").write_text(json.dumps(call))
    assert main(["check", part, "--only", only, *(word.format(folder=folder) for word in more)]) == 0
    assert f"{only}: ok" in capsys.readouterr().out


def test_another_seed_draws_other_cases() -> None:
    drawn: list[list[int]] = []

    class Watching(ReferenceKernels):
        def rms_norm(self, x_TD: Any, weight_D: Any, eps: float, unit_offset: bool = False) -> Any:
            drawn[-1].append(x_TD.numel())
            return super().rms_norm(x_TD, weight_D, eps, unit_offset)

    for seed in (0, 0, 1):
        drawn.append([])
        check_kernels(Watching(), only=["rms_norm"], seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]
