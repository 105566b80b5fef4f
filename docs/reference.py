"""Writes docs/reference.md: all that plugins build on, from the docstrings in the source.

`make docs` runs it; git does not keep the page. Nothing is imported: a docstring is what the source has, and a string
below an attribute is that attribute's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "core/src/infer"
KIT = "../../../plugins/testing/src/infer_testing"
LAYERS = "../../../plugins/layers/src/infer_layers"
PAGED = "../../../plugins/cache_paged/src/infer_cache_paged"
SECTIONS: dict[str, tuple[str, str, Sequence[str]]] = {
    "Hooks": (
        "What a plugin's module implements, and what it states about itself.",
        "contracts/__init__.py",
        ("contracts/hooks.py", "contracts/registration.py"),
    ),
    **{
        title: (
            f"What {who} needs. Import it from `infer.contracts.{file}`.",
            "contracts/__init__.py",
            (f"contracts/{file}.py",),
        )
        for title, who, file in (
            ("Attention", "whoever writes caches, kernels or models", "attention"),
            ("States", "whoever writes recurrent layers, or kernels for them", "states"),
            ("Caches", "the author of a cache pool", "cache"),
            ("Kernels", "the author of kernels", "kernels"),
            ("Models", "the author of a model family", "model"),
            ("Checkpoints", "the author of a container or a weight format", "weights"),
            ("Adapters", "the author of a reader of adapters", "adapters"),
            ("Schedulers", "the author of a scheduler", "scheduler"),
            ("Proposers", "the author of a proposer", "proposer"),
            ("Text formats", "the author of a tool format or a reasoning format", "text"),
            ("Grammars", "the author of a grammar backend", "grammar"),
            ("Endpoints", "the author of an endpoint", "server"),
            ("Commands", "the author of a command", "command"),
            ("Observers", "the author of an observer", "records"),
        )
    },
    "Requests and errors": (
        "What clients ask for, what they get, and which errors there are. Import them from `infer`.",
        "__init__.py",
        ("contracts/params.py", "contracts/request.py", "llm.py", "errors.py"),
    ),
    "Weights": ("What kernels multiply by. Import it from `infer.weight`.", "weight.py", ("weight.py",)),
    "Layers": (
        "What model families are composed of. Import them from `infer_layers`.",
        f"{LAYERS}/__init__.py",
        tuple(
            f"{LAYERS}/{name}.py"
            for name in (
                "table",
                "config",
                "linear",
                "rotary",
                "blocks",
                "latent",
                "mamba",
                "recurrent",
                "experts",
                "decoder",
            )
        ),
    ),
    "Cache pools": (
        "What cache pools are made of. Import it from `infer.cache`.",
        "cache/__init__.py",
        tuple(f"cache/{name}.py" for name in ("block_manager", "storage", "state_manager", "states", "pool")),
    ),
    "Tiers": (
        "What keeps the K/V of blocks outside a paged pool's memory. Import it from `infer_cache_paged.tier`.",
        f"{PAGED}/tier.py",
        (f"{PAGED}/tier.py",),
    ),
    "Scheduling": (
        "What schedulers are made of. Import the policies from `infer.engine.schedulers`, the rest from "
        "`infer.engine.seats`.",
        "engine/__init__.py",
        ("engine/schedulers.py", "engine/seats.py"),
    ),
    "Tool calls": (
        "What readers of tool calls are made of. Import it from `infer.text.tool_formats.reader`.",
        "text/tool_formats/reader.py",
        ("text/tool_formats/reader.py",),
    ),
    "Testing": (
        "What tries a plugin; [Testing a plugin](testing.md) shows how. Import it from `infer_testing`.",
        f"{KIT}/__init__.py",
        tuple(
            f"{KIT}/{name}.py"
            for name in (
                *(
                    "checkpoints",
                    "models",
                    "pools",
                    "schedulers",
                    "kernels/__init__",
                    "formats",
                    "proposers",
                    "tool_formats",
                    "grammars",
                ),
                *("routes", "commands", "suite"),
            )
        ),
    ),
}
"""Of each section: what it says first, the module that plugins import from, and where the names are defined, from
``SOURCE`` on."""
EXPORTERS = {file: exporter for _, exporter, files in SECTIONS.values() for file in files}


@dataclass
class Entry:
    """A class, function or attribute, and what belongs to it."""

    name: str
    head: str
    """Its signature, or its type."""
    text: str | None
    """Its docstring, cleaned; None if it has none."""
    kind: str
    """``class``, ``maker`` (how a class is made), ``function``, ``property`` or ``attribute``."""
    members: list[Entry] = field(default_factory=list)
    node: ast.AST | None = None


def entries(file: str) -> list[Entry]:
    """The public names that a file defines, in its order; if the module that plugins import them from has ``__all__``,
    those in it."""
    exporter = ast.parse(_read(SOURCE / EXPORTERS[file]))
    exported = next((each for each in exporter.body if _assigned(each, "__all__")), None)
    names = None if exported is None else {c.value for c in ast.walk(exported) if isinstance(c, ast.Constant)}
    return [entry for entry in _entries(ast.parse(_read(SOURCE / file)).body) if names is None or entry.name in names]


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _entries(body: Sequence[ast.stmt], of_class: str = "") -> Iterator[Entry]:
    """Of a module, or of the class ``of_class``."""
    for at, node in enumerate(body):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(map(ast.unparse, node.bases))
            members = list(_entries(node.body, node.name))
            head = f"class {node.name}" + (f"({bases})" if bases else "")
            yield Entry(node.name, head, ast.get_docstring(node), "class", members, node)
        elif of_class and isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield Entry(of_class, f"{of_class}({_arguments(node.args)})", ast.get_docstring(node), "maker", [], node)
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__call__"):
            returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
            decorators = {ast.unparse(each) for each in node.decorator_list}
            head = f"{node.name}({_arguments(node.args)}){returns}"
            if "property" in decorators:
                yield Entry(node.name, f"{node.name}: {returns[4:]}", ast.get_docstring(node), "property", [], node)
            elif not decorators & {"model_validator(mode='after')"}:
                yield Entry(node.name, head, ast.get_docstring(node), "function", [], node)
        elif of_class and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not node.target.id.startswith("_"):
                value, text = _default(node.value)
                default = "" if value is None else f" = {ast.unparse(value)}"
                head = f"{node.target.id}: {ast.unparse(node.annotation)}{default}"
                yield Entry(node.target.id, head, _below(body, at) or text, "attribute", [], node)
        elif not of_class and (name := _assigned(node)) and (text := _below(body, at)):
            yield Entry(name, ast.unparse(node), text, "attribute", [], node)


def _default(value: ast.expr | None) -> tuple[ast.expr | None, str | None]:
    """The default that a class gives an attribute, and its description if that is pydantic's ``Field``."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"):
        return value, None
    given = {each.arg: each.value for each in value.keywords}
    text = given.get("description")
    default = value.args[0] if value.args else given.get("default")
    return default, str(text.value) if isinstance(text, ast.Constant) else None


def _assigned(node: ast.stmt, name: str = "") -> str | None:
    """The public name that a statement of a module gives a value; ``name`` if it gives one to that."""
    target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(node, ast.Assign):
        target = node.targets[0]
    if not isinstance(target, ast.Name) or (target.id.startswith("_") and target.id != name):
        return None
    return target.id if name in ("", target.id) else None


def _below(body: Sequence[ast.stmt], at: int) -> str | None:
    """The string that stands below a statement."""
    after = body[at + 1] if at + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return "\n".join(line.strip() for line in after.value.value.strip().splitlines())
    return None


def _arguments(arguments: ast.arguments) -> str:
    """Without ``self``."""
    if arguments.posonlyargs and arguments.posonlyargs[0].arg == "self":
        arguments.posonlyargs = arguments.posonlyargs[1:]
    elif arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    return ast.unparse(arguments)


def page() -> str:
    """The whole page."""
    legend = ast.get_docstring(ast.parse(_read(SOURCE / "contracts/__init__.py"))) or ""
    lines = [
        "# Reference",
        "",
        "All that plugins build on, from the docstrings in the source: "
        "`python docs/reference.py` writes this page. [Writing a plugin](plugins.md) shows how they go together.",
        "",
        _code(legend.partition("\n\nShape legend")[2].join(("Shape legend", ""))),
    ]
    elsewhere = promised()
    for title, (about, _, files) in SECTIONS.items():
        lines += ["", f"## {title}", "", about]
        for file in files:
            for entry in entries(file):
                lines += _shown(entry, elsewhere)
    return "\n".join(lines) + "\n"


def form(entry: Entry) -> tuple[str, ...]:
    """What a method or property has in common with the one whose promise it keeps: name, kind and parameters."""
    taken = entry.node.args if isinstance(entry.node, ast.FunctionDef) else None
    names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)] if taken else []
    return entry.name, entry.kind, *(name for name in names if name != "self")


def promised() -> dict[tuple[str, ...], str]:
    """By the form of a method or property, the class that says what it does: the first one that has it, a protocol if
    there is one. Others, which keep the promise, need not repeat it."""
    found: dict[tuple[str, ...], str] = {}
    known = [each for _, _, files in SECTIONS.values() for file in files for each in entries(file)]
    for entry in sorted(known, key=lambda each: "(Protocol" not in each.head):
        for member in entry.members:
            if member.text and member.name != "__call__" and member.kind != "maker":
                found.setdefault(form(member), entry.name)
    return found


def _shown(entry: Entry, elsewhere: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    yield from ("", f"### {entry.name}", "", "```", entry.head, "```")
    if entry.text:
        yield from ("", _code(entry.text))
    if entry.members:
        yield ""
    for member in entry.members:
        text = _code(member.text) if member.text else ""
        if not text and not isinstance(member.node, ast.AnnAssign) and (other := elsewhere.get(form(member))):
            text = f"As in `{other}`."
        kind = " (a property)" if member.kind == "property" else ""
        yield f"- `{member.head}`{kind}" + (f"<br>{' '.join(text.split())}" if text else "")


def _code(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    (ROOT / "docs/reference.md").write_text(page(), encoding="utf-8")
