"""The commands of the documentation work, page by page, or a list says why no test runs them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy import requirements
from tests.docs.pages import PAGES, ROOT, commands
from tests.docs.running import BIN, Shell, environment, follow, hub
from tests.forking import Forks
from tests.test_examples import build
from tests.test_examples import environment as fresh

pytestmark = pytest.mark.long

MAKEFILE = (ROOT / "Makefile").read_text()
TUTORIAL = "docs/tutorial.md"
NOT_RUN = {
    r".*: make (?!serve$).*|.*: pip install .*infer-(engine|kernels-triton|ray)\..*": "they install, test or measure",
    r"docs/install.md: (python3 -m venv env|env/bin/.*|curl .*)": "tests/test_dist.py does so with wheels of its own",
    r"README.md: infer .*": "tests/test_dist.py does so with what the page installs",
    r"docs/install.md: (docker|MODEL=|sudo).*": "they need Docker, or root",
    r"plugins/ray/README.md: infer ray run .*": "tests/ray does so",
    r"docs/several-models.md: infer (serve|models).*": "tests/router serves several models",
    r"docs/several-models.md: infer (pull|rm) .*": "tests/router has a hub and a cache for them",
    r"examples/.*": "tests/test_examples.py installs, tests and checks the examples in an environment of their own",
    r"docs/agents.md: infer launch (?!.*--print).*": "they start agents, which have to be installed",
    r"docs/simulation.md: infer tune .*": "it searches for a minute",
    r"docs/conformance.md: .*": "they fetch other engines, and run their tests for minutes",
    r"docs/testing.md: infer check .*": "of plugins that the page imagines",
    r"benchmarks/README.md: (\.venv/bin/python -m benchmarks|infer bench).*": "they measure for minutes",
    r"benchmarks/README.md: (\.venv/bin/python -m pytest tests/gpu|OUT=results python3 \.gpu-box/).*": "on a GPU",
    r"docs/start.md: infer serve .* --model.device cuda": "on a GPU",
    r"plugins/demo/train/README.md: .*": "trains for an hour, on a text that the system's packages bring",
}
"""Commands that no test runs, as regular expressions of page and command, and why. That the options, settings and
targets are there is tested anyway."""


SHOWN = {
    path: [command for block in page.blocks if block.language == "console" for command, _ in commands(block.text)]
    for path, page in PAGES.items()
}


def excused(path: str, command: str) -> set[str]:
    """The reasons for which a command is not run."""
    return {why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, f"{path}: {command}", re.DOTALL)}


RUN = [path for path, shown in SHOWN.items() if path != TUTORIAL and not all(excused(path, each) for each in shown)]


def test_no_reason_is_given_for_a_command_that_nobody_shows() -> None:
    given = {why for path, shown in SHOWN.items() for command in shown for why in excused(path, command)}
    assert given == {*NOT_RUN.values()}


def test_targets_of_make_that_are_shown_are_there() -> None:
    (known,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    shown = {
        word
        for page in PAGES.values()
        for text in (*SHOWN[page.path], *(code for _, code in page.code))
        for word in re.findall(r"(?:^|&& )make ([a-z-]+)", text)
    }
    assert shown
    assert shown <= {*known.split()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(Path(sys.executable), environment(), "torch", "infer")
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN)
def test_the_commands_of_a_page(path: str, forks: Forks, cache: Path, tmp_path: Path) -> None:
    folder, home = tmp_path / "empty", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (home / "hub").symlink_to(cache / "hub")
    shell = Shell(folder, environment() | {"HF_HOME": str(home)}, free_port(), forks)
    follow(PAGES[path], shell, lambda command: not excused(path, command))


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path) -> None:
    """In a fresh environment."""
    packages = [ROOT / "core", *(ROOT / "plugins" / name for name in ("cache_slotted", "layers", "testing"))]
    wheels = build(tmp_path / "dist", packages)
    for name, text in requirements.written(wheels, packages, ROOT / "constraints.txt").items():
        (wheels / name).write_text(text)
    bin = fresh(tmp_path / "made", wheels)
    (bin / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {bin.parent} "$@"\n')
    options = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    (bin / "pytest").write_text(
        f"#!{bin}/python\nimport sys, pytest\nsys.exit(pytest.main([*{options}, *sys.argv[1:]]))\n"
    )
    for name in ("pip", "pytest"):
        (bin / name).chmod(0o755)
    variables = environment()
    variables |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
    variables |= {"PATH": f"{bin}:{variables['PATH']}"}
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "dist").symlink_to(wheels)
    forks = Forks(bin / "python", variables, "torch", "transformers", "pytest")
    assert follow(PAGES[TUTORIAL], Shell(folder, variables, 0, forks)) > 10
    forks.close()


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """As `make docs` builds it: a warning is an error. Every page has copy buttons, and the rules for its tables."""
    (recipe,) = re.findall(r"^docs: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    script = recipe.replace("$(BIN)", str(BIN)).replace("build/", f"{tmp_path}/")
    done = subprocess.run(
        ["bash", "-ec", script], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    for path in PAGES:
        shown = (site / path).with_suffix(".html").read_text(encoding="utf-8")
        for name in ("copybutton.js", "copybutton.css", "site.css"):
            assert f"_static/{name}" in shown, (path, name)
    rules = (site / "_static/site.css").read_text(encoding="utf-8")
    assert re.search(r"^td\b.* code \{[^}]*overflow-wrap: break-word;", rules, re.M), (
        "long values squeeze a table's text"
    )
    loaded = re.compile(
        r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["'](?:https?:)?//|@import|url\(["']?(?:https?:)?//"""
    )
    files = [file for end in ("html", "css") for file in site.rglob(f"*.{end}")]
    assert [file for file in files if loaded.search(file.read_text(encoding="utf-8"))] == []
