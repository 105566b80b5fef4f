"""The import rules: which room may import which, directly or through others, and that no imports form a circle."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = tuple(path.name for path in sorted(ROOT.glob("plugins/*/src/*")))
TEXT = ("tokenizers", "infer.text")
ABOVE = (
    *("infer.engine", "infer.commands", "infer.settings", "infer.assemble", "infer.llm"),
    *("infer_server", "infer_testing"),
)
SERVER = ("torch", "infer.cache", "infer.kernels", "infer.commands", "infer_testing")
DOORS = (
    *("infer", "infer.assemble.assembly", "infer.assemble.blueprint"),
    *("infer.llm", "infer.openmp", "infer.plugins.survey", "infer.engine.loop"),
)
"""Where rooms meet: what is behind these is not counted as imported by whoever imports them."""
ROOMS: dict[str, tuple[str, ...]] = {
    "core/src/infer": ("aiohttp", "prometheus_client", *PLUGINS),
    "core/src/infer/contracts": ("torch", "numpy", "tokenizers", "infer.text", "infer.cache", *ABOVE),
    "core/src/infer/contracts/scheduler.py": ("torch", "numpy", *TEXT),
    "core/src/infer/checkpoint": ("infer.cache", "infer.kernels", *TEXT, *ABOVE),
    "plugins/layers/src": ("infer.cache", "infer.kernels", "infer.checkpoint", *TEXT, *ABOVE),
    "core/src/infer/kernels": ("infer.cache", "infer.checkpoint", *TEXT, *ABOVE),
    "core/src/infer/cache": ("infer.kernels", "infer.checkpoint", *TEXT, *ABOVE),
    "core/src/infer/cache/block_manager.py": ("torch", *TEXT),
    "core/src/infer/cache/state_manager.py": ("torch", *TEXT),
    "core/src/infer/text": ("torch", "infer.cache", "infer.kernels", *ABOVE),
    "core/src/infer/engine": ("infer.commands", "infer.checkpoint"),
    "core/src/infer/engine/seats.py": ("torch", "numpy", *TEXT),
    "core/src/infer/engine/schedulers.py": ("torch", "numpy", *TEXT),
    "core/src/infer/engine/batch.py": ("infer.cache", "infer.kernels"),
    "core/src/infer/engine/engine.py": ("infer.kernels", "infer.cache"),
    "core/src/infer/commands": ("infer.checkpoint", "infer.kernels", "infer.cache"),
    "core/src/infer/assemble": ("infer.commands",),
    "core/src/infer/plugins": ("infer.cache",),
    "core/src/infer/settings.py": ("torch", "numpy", "infer.text", "infer.engine", "infer.assemble"),
    "core/src/infer/llm.py": ("infer.commands",),
    "core/src/infer/weight.py": ("infer.contracts", "infer.cache", "infer.kernels", *TEXT, *ABOVE),
    "core/src/infer/device.py": ("infer.contracts", "infer.cache", "infer.kernels", *TEXT, *ABOVE),
    "plugins/cache_slotted/src": ("infer_layers", "infer.kernels", "infer.checkpoint", *TEXT, *ABOVE),
    "plugins/cache_paged/src": ("infer_layers", "infer.kernels", "infer.checkpoint", *TEXT, *ABOVE),
    "plugins/cache_paged/src/infer_cache_paged/pages.py": ("torch", "numpy", "infer"),
    "plugins/kernels_triton/src": ("infer_layers", "infer.cache", "infer.checkpoint", *TEXT, *ABOVE),
    "plugins/kernels_cpu/src": ("infer_layers", "infer.cache", "infer.checkpoint", *TEXT, *ABOVE),
    "plugins/models/src": ("infer.cache", "infer.kernels", "infer.checkpoint", *TEXT, *ABOVE),
    "plugins/server/src": SERVER,
    "plugins/server/src/infer_server/http": ("infer.engine", "infer.assemble", "infer.settings"),
    "plugins/decisions/src": SERVER,
    "plugins/embeddings/src": SERVER,
    "plugins/console/src": SERVER,
    "plugins/router/src": SERVER,
    "plugins/router/src/infer_router/router.py": ("aiohttp", "infer", "pydantic"),
    "plugins/router/src/infer_router/prefixes.py": ("aiohttp", "infer"),
    "plugins/router/src/infer_router/resume.py": ("aiohttp", "infer"),
    "plugins/ray/src": SERVER,
    "plugins/models_transformers/src": ("infer.cache", "infer.kernels", "infer.checkpoint", *TEXT, *ABOVE),
    "plugins/otel/src": ("torch", "numpy", "aiohttp", "infer.cache", "infer.kernels", *TEXT, *ABOVE),
    "plugins/demo/src": ("torch", "numpy", *TEXT, *ABOVE),
    "plugins/agents/src": SERVER,
    "plugins/ollama/src": SERVER,
    "plugins/bench/src": ("infer_server", "infer_layers", "infer.kernels", "infer_testing"),
    "plugins/bench/src/infer_bench/bench.py": ("torch", "infer.engine", "infer.cache"),
    "plugins/bench/src/infer_bench/demo.py": ("torch", "infer.engine", "infer.cache"),
    "plugins/testing/src": ("pytest", "hypothesis", "aiohttp", "infer_server", "infer.commands"),
    "plugins/speculation/src": (
        *("infer_layers", "infer.kernels", "infer.checkpoint", "infer_server", "infer.commands", "infer.settings"),
        *("infer.assemble", "infer.llm", "infer_testing"),
        *("infer.cache.storage", "infer.cache.pool"),
    ),
    "plugins/llguidance/src": ("torch", "aiohttp", "infer.cache", "infer.kernels", "infer.checkpoint", *ABOVE),
    "plugins/tool_formats/src": ("torch", "infer.cache", "infer.kernels", "infer.checkpoint", *ABOVE),
    "plugins/formats/src": ("infer.cache", "infer.kernels", "infer_layers", "infer.checkpoint", *TEXT, *ABOVE),
}

HTTP = ("infer.errors", "infer.contracts", "infer_server.http")
"""What a server without an engine is made of."""
ONLY: dict[str, tuple[str, ...]] = {
    "plugins/server/src/infer_server/http": HTTP,
    "plugins/router/src/infer_router/ingress.py": HTTP,
    "plugins/router/src/infer_router/outline.py": HTTP,
}
"""Rooms that reach nothing else of infer."""
MAY: dict[str, tuple[str, ...]] = {"infer_testing.routes": ("aiohttp", "infer_server")}
"""What single modules may touch though their room must not."""


def module_of(file: Path) -> str:
    """The dotted name of a file below a folder ``src``."""
    parts = file.relative_to(next(p for p in file.parents if p.name == "src")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for file in (*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"))}


@cache
def imports(module: str, types: bool = False) -> frozenset[str]:
    """The modules that one imports at run time, be it late; with ``types``, what only a type checker sees as well."""
    found: set[str] = set()
    tree = ast.parse(FILES[module].read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & FILES.keys() or {node.module}
    return frozenset(found)


def reached(module: str) -> dict[str, tuple[str, ...]]:
    """Every module that one imports, directly or not, and by which way."""
    ways: dict[str, tuple[str, ...]] = {module: (module,)}
    unseen = [module]
    while unseen:
        at = unseen.pop()
        for other in imports(at):
            if other not in ways:
                ways[other] = (*ways[at], other)
                if other in FILES and other not in DOORS:
                    unseen.append(other)
    del ways[module]
    return ways


def test_each_package_is_a_room() -> None:
    inits = ROOT.glob("core/src/infer/*/__init__.py")
    places = [*(file.parent for file in inits), *(file.parents[1] for file in ROOT.glob("plugins/*/src/*/__init__.py"))]
    assert {place.relative_to(ROOT).as_posix() for place in places} <= ROOMS.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_touches_nothing_it_must_not(room: str) -> None:
    place = ROOT / room
    modules = [module for module, file in FILES.items() if file == place or place in file.parents]
    assert modules
    for module in modules:
        for other, way in reached(module).items():
            banned = {*ROOMS[room]} - {*MAY.get(module, ())}
            bad = [b for b in banned if other == b or other.startswith(b + ".")]
            assert not bad, " imports ".join(way)


@pytest.mark.parametrize("room", ONLY)
def test_a_room_touches_only_what_it_may(room: str) -> None:
    place = ROOT / room
    modules = [module for module, file in FILES.items() if file == place or place in file.parents]
    assert modules
    for module in modules:
        for other, way in reached(module).items():
            allowed = any(other == each or other.startswith(each + ".") for each in ONLY[room])
            assert allowed or not other.startswith(("infer.", "infer_server.")), " imports ".join(way)


def test_nobody_imports_in_a_circle() -> None:
    try:
        TopologicalSorter({module: imports(module, types=True) & FILES.keys() for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
