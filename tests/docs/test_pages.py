"""The documentation's links, navigation, keys, options and quotations are those of what they speak of."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import runpy
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import PAGES, REFERENCE, RESULTS, ROOT, TIMELINE, Page, commands

from infer.commands.cli import _parser
from infer.contracts.sections import Settings
from infer.errors import InferError
from infer.plugins.discovery import Plugins
from infer.settings import describe, load_settings, split_arguments

CONF: dict[str, Any] = runpy.run_path(str(ROOT / "docs/conf.py"))
each = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


@each
def test_links_lead_to_files_and_headings(page: Page) -> None:
    broken = []
    for line, target in page.links:
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        place = (ROOT / page.path).parent / path if path else ROOT / page.path
        name = place.resolve().relative_to(ROOT).as_posix()
        there = name in (REFERENCE, TIMELINE) or place.is_file()
        if not there or (anchor and (name not in PAGES or anchor not in PAGES[name].anchors)):
            broken.append(f"{page.path}:{line}: {target}")
    assert broken == []


def test_each_page_is_in_the_navigation_once() -> None:
    listed = [f"{path}.md" for _, paths in CONF["chapters"](PAGES["docs/README.md"].text) for path in paths]
    assert sorted(listed) == sorted(path for path in PAGES if path != "docs/README.md"), "docs/README.md lists them"


def test_files_that_the_code_speaks_of_are_there() -> None:
    sources = [file for where in ("core/src", "plugins", "docs") for file in ROOT.glob(f"{where}/**/*.py")]
    named = {(file, name) for file in sources for name in re.findall(r"\bdocs/[\w/]+\.(?:md|json)\b", file.read_text())}
    assert named
    assert [f"{file}: {name}" for file, name in named if name != REFERENCE and not (ROOT / name).exists()] == []


def test_the_newest_results_of_each_machine_and_kind_are_kept() -> None:
    kinds = Counter(file.name[len("2026-01-01-") :] for file in (ROOT / RESULTS).iterdir())
    assert kinds
    assert [kind for kind, dates in kinds.items() if dates > 1] == [], "git has the older ones"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    """The installed ones, and those of the examples."""
    names = [path.name for path in ROOT.glob("examples/*/src/*") if (path / "__init__.py").exists()]
    return Plugins.discover([importlib.import_module(name) for name in names])


KEY = rf"(?:{'|'.join(Settings.model_fields)})(?:\.[a-z]\w*)+"


def test_keys_between_backticks_are_settings(plugins: Plugins) -> None:
    """Also those that are followed by a value: `engine.graphs = "on"`."""
    settings = load_settings(plugins, env={}, read_file=False).settings
    keys = {key for key, _ in describe(settings)}
    known = keys | {key.rpartition(".")[0] for key in keys}
    unknown = []
    for page in PAGES.values():
        for line, code in page.code:
            key = re.fullmatch(rf"({KEY})(?: = .*)?", code)
            if key and key[1] not in known:
                unknown.append(f"{page.path}:{line}: {code}")
    assert unknown == []


MADE_UP = ("engine.brief", "cache.mine")
"""Tables of plugins that pages only imagine, or build first."""


def imagined(error: InferError) -> bool:
    return str(error).startswith(MADE_UP)


def test_commands_have_the_options_and_settings_that_are_shown(plugins: Plugins) -> None:
    """Of every page, whether a test runs its commands or not."""
    registrations: list[Any] = [offer.registration for offer in plugins.offers["command"]]
    parser = _parser(registrations, {})
    wrong, seen = [], set()
    for page in PAGES.values():
        for block in page.blocks:
            for command, _ in commands(block.text) if block.language == "console" else ():
                for part in re.split(r"&&|\|", command.replace("\\\n", " ")):
                    words = [word for word in shlex.split(part, comments=True) if not re.match(r"[A-Z_0-9]+=", word)]
                    if words[:1] != ["infer"]:
                        continue
                    given, rest = split_arguments([word for word in words[1:] if word not in ("&", ">", "<")])
                    try:
                        args = parser.parse_args([*itertools.takewhile(lambda word: word != "--", rest)])
                        load_settings(
                            plugins, env={}, argv=(*given, *getattr(args, "plain_settings", ())), read_file=False
                        )
                        seen.add(args.command)
                    except (SystemExit, InferError) as error:
                        if not (isinstance(error, InferError) and imagined(error)):
                            wrong.append(f"{page.path}:{block.line}: {part.strip()}: {error}")
    assert wrong == []
    assert seen >= {registration.name for registration in registrations}, "each command is shown somewhere"


def test_tables_of_settings_can_be_read(plugins: Plugins, tmp_path: Path) -> None:
    for page in PAGES.values():
        for block in page.blocks:
            if block.language == "toml" and set(tomllib.loads(block.text)) <= set(Settings.model_fields):
                file = tmp_path / "settings.toml"
                file.write_text(block.text)
                try:
                    load_settings(plugins, env={}, file=str(file))
                except InferError as error:
                    if not imagined(error):
                        raise


@each
def test_nothing_is_lost_to_html(page: Page) -> None:
    """Browsers show nothing of a tag that they do not know, such as <think>."""
    found = [(line, token.content) for line, token in page.inline if token.type == "html_inline"]
    assert [each for each in found if not re.fullmatch(r"<br>|<!--.*-->", each[1], re.DOTALL)] == []


DESIGN = [page for path, page in PAGES.items() if path == "docs/architecture.md" or path.startswith("docs/design/")]
design = pytest.mark.parametrize("page", DESIGN, ids=[page.path for page in DESIGN])


@design
def test_diagrams_fit_beside_the_navigation(page: Page) -> None:
    """A window of 1280 pixels shows lines of 92 characters."""
    diagrams = [block.text for block in page.blocks if not block.language]
    assert [line for text in diagrams for line in text.splitlines() if len(line) > 92] == []


@design
def test_what_links_name_is_in_their_files(page: Page) -> None:
    """As in [`Engine.step`](../core/src/infer/engine/engine.py): the file has that class, with that method or field."""
    wrong = []
    for name, target in re.findall(r"\[`([\w.]+)`\]\((\S+\.py)\)", page.text):
        place = (ROOT / page.path).parent / target
        if target.endswith(name):
            continue
        owner, _, member = name.partition(".")
        found: Iterable[ast.AST] = ast.parse(place.read_text(encoding="utf-8")).body
        for part in (owner, member) if member else (owner,):
            found = [inner for node in found if part in names(node) for inner in getattr(node, "body", [node])]
        if not found:
            wrong.append(f"{name} in {target}")
    assert wrong == []


def names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_architecture_is_read_in_one_go() -> None:
    assert len(PAGES["docs/architecture.md"].text.split()) <= 1500


def test_the_first_page_shows_what_it_is_about() -> None:
    home = PAGES[f"{CONF['HOME']}.md"].text
    before, _, _ = home.partition("\n## ")
    (image,) = re.findall(r"!\[[^]]{20,}\]\((\S+)\)", before)
    assert (ROOT / "docs" / image).is_file()
    assert "(start.md)" in before
