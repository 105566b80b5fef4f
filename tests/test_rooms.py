"""Imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/infer"
PLUGINS = tuple(path.name for path in sorted(ROOT.glob("plugins/*/src/*")))
TEXT = ("tokenizers", "infer.engine.text")
ROOMS: dict[str, tuple[str, ...]] = {
    "core/src/infer": PLUGINS,
    "core/src/infer/server": ("torch", "infer.kernels", "infer.layers", "infer.cache"),
    "core/src/infer/engine/schedulers.py": ("torch", "numpy", *TEXT),
    "core/src/infer/schedule.py": ("torch", "numpy", *TEXT),
    "core/src/infer/engine/batch.py": ("infer.layers", "infer.cache", "infer.kernels", *TEXT),
    "core/src/infer/engine/runner.py": ("aiohttp", "infer.server", *TEXT),
    "core/src/infer/engine/sampler.py": ("aiohttp", "infer.server", *TEXT),
    "core/src/infer/engine/engine.py": ("aiohttp", "infer.server", "infer.layers", "infer.kernels"),
    "core/src/infer/kernels": ("infer.engine", "infer.layers", "infer.server", "infer.settings", *TEXT),
    "core/src/infer/cache/books.py": ("torch", *TEXT),
    "core/src/infer/cache": ("infer.engine", "infer.layers", "infer.server", "infer.settings", *TEXT),
    "core/src/infer/request.py": ("torch", "infer.engine", "infer.server"),
    "plugins/cache_slotted/src": ("infer.engine", "infer.layers", "infer.server", "infer.settings", *TEXT),
    "plugins/cache_paged/src": ("infer.engine", "infer.layers", "infer.server", "infer.settings", *TEXT),
    "plugins/cache_paged/src/infer_cache_paged/pages.py": ("torch", "numpy", "infer"),
    "plugins/kernels_triton/src": ("infer.engine", "infer.layers", "infer.server", "infer.settings", *TEXT),
    "plugins/kernels_cpu/src": ("infer.engine", "infer.layers", "infer.server", "infer.settings", *TEXT),
    "plugins/models/src": ("infer.engine", "infer.cache", "infer.server", "infer.settings", *TEXT),
}


def imports(path: Path) -> set[str]:
    """The modules that a file imports at run time; what only a type checker sees does not count."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_touches_nothing_it_must_not(room: str) -> None:
    place = ROOT / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    for file in files:
        for module in imports(file):
            bad = [b for b in ROOMS[room] if module == b or module.startswith(b + ".")]
            assert not bad, f"{file.relative_to(ROOT)} imports {module}"
