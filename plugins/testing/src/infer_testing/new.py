"""`infer new plugin`: writes a package that fills a slot, with a test that tries its contract."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import NamedTuple

from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError

TEMPLATES = Path(__file__).parent / "templates"
NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
MAX_NAME = 64
PASSES = "Its test passes as it is: change the plugin, and run the test again."


class Kind(NamedTuple):
    """What is written for a slot."""

    what: str
    needs: str
    """Packages that the plugin imports, besides infer-core, as pip is asked for them."""
    tried: str
    """Packages that its test needs, besides pytest."""
    settings: str
    """What settings.toml says to use it."""
    state: str = PASSES
    """What its test says at first."""


RUNS = "infer-cache-slotted infer-models"
KINDS: Mapping[str, Kind] = {
    "model": Kind(
        "a model family",
        "infer-layers torch",
        "transformers",
        '[model]\npath = "DIR"  # a checkpoint of the architecture\nfamily = "$name"  # found by the architecture, too',
        "Its test fails until the layer is written. The first promise that it does not keep is\n"
        "`forward gives [N, D] of the wanted rows`.",
    ),
    "cache": Kind("a cache pool", "", "", '[cache]\nbackend = "$name"'),
    "scheduler": Kind("a scheduler", "", "", '[engine]\nbatching_mode = "$name"'),
    "kernels": Kind("kernels", "torch", "", '[kernels]\nbackend = "$name"'),
    "weights": Kind("a weight format", "", "torch", '# nothing: quant_method = "$name" in config.json decides'),
    "proposer": Kind("a proposer of draft tokens", "", "", '[engine]\nspeculation = "$name"'),
    "tools": Kind("a format of tool calls", "", "", '[model]\ntool_format = "$name"  # the chat template says it, too'),
    "grammar": Kind("a grammar backend", "numpy tokenizers", "", '[engine]\ngrammar_backend = "$name"'),
    "route": Kind(
        "an endpoint of the server",
        "infer-server>=0.1,<0.2 aiohttp typing-extensions",
        RUNS,
        "# nothing: all routes are served",
    ),
    "command": Kind("a command", "", RUNS, "# nothing: infer $name runs it"),
    "observer": Kind("an observer", "pydantic", RUNS, '[observers.$name]\nunit = "tokens"'),
}
"""By slot, as `infer new` calls it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["plugin"], metavar="plugin", help="what to write")
    parser.add_argument("name", metavar="NAME", help="the package's name, such as infer-mine: a new folder here")
    parser.add_argument("--slot", required=True, metavar="SLOT", help=f"what it is: one of {', '.join(KINDS)}")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Write the package and say what to do next. Raises InferError if it cannot be."""
    folder = write(args.name, args.slot)
    print(f"Written: {folder}, {KINDS[args.slot].what}. {' '.join(KINDS[args.slot].state.split())} Next:")
    print(f"    cd {folder}\n    pip install -e '.[test]'\n    pytest")
    return 0


def write(name: str, slot: str) -> Path:
    """Write a package into a new folder, which is returned. Raises InferError."""
    for path, text in package(name, slot).items():
        file = Path(name, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return Path(name)


def package(name: str, slot: str) -> dict[str, str]:
    """The files of a package, by their paths. Raises InferError for a name or a slot that cannot be used."""
    if slot not in KINDS:
        raise InferError(f"--slot {slot}: there is no such slot; it is one of {', '.join(KINDS)}.")
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise InferError(
            f"{name[: MAX_NAME + 1]!r} cannot be a package's name; take lower-case letters and digits, with single "
            f"hyphens or underscores between them, {MAX_NAME} characters at most."
        )
    module = name.replace("-", "_")
    short = module.removeprefix("infer_")
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        why = "is a word of Python" if keyword.iskeyword(module) else "can be imported here already"
        raise InferError(f"{name!r} needs a module {module!r}, which {why}; take another name.")
    if Path(name).exists():
        raise InferError(f"{name} is here already; take another name or another folder.")
    kind = KINDS[slot]
    values = {
        "dist": name,
        "module": module,
        "name": short,
        "Name": "".join(part.capitalize() for part in short.split("_")),
        "what": kind.what,
        "state": kind.state,
        "needs": "".join(f', "{library}"' for library in kind.needs.split()),
        "tried": "".join(f', "{library}"' for library in kind.tried.split()),
    }
    values["settings"] = Template(kind.settings).substitute(values)
    written = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"src/{module}/__init__.py": f"{slot}.py",
        f"tests/test_{module}.py": f"{slot}_test.py",
    }
    files = {path: (TEMPLATES / f"{source}.txt").read_text("utf-8") for path, source in written.items()}
    return {path: Template(text).substitute(values) for path, text in files.items()} | {f"src/{module}/py.typed": ""}


COMMAND = CommandRegistration("new", run, "write a plugin's package, with a test", add_arguments=add_arguments)
