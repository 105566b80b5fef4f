"""How Sphinx makes a site of the repository's Markdown: `make docs`.

The source folder is the repository, so that a link means the same here and there. The lists of docs/README.md
have every page: they are the navigation, under their headings.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

HOME = "docs/README"

project = "infer"
author = "the infer authors"
copyright = author
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = HOME
include_patterns = ["*.md", *(f"{folder}/**.md" for folder in ("bundle", "core", "docs", "examples", "plugins"))]
include_patterns += ["benchmarks/*.md"]
exclude_patterns = [".*", "**/.*", "build", "dist"]
highlight_language = "text"
myst_heading_anchors = 4
html_theme = "furo"
html_title = "infer"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}
# What is copied of a console is its commands, without the prompt and what they print.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"


def chapters(page: str) -> list[tuple[str, list[str]]]:
    """Each heading of docs/README.md and the pages of its list, from the repository's root and without .md."""
    found: list[tuple[str, list[str]]] = []
    for line in page.splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif link := re.match(r"- \[[^]]*\]\(([^)#]+)\.md\)", line):
            found[-1][1].append(posixpath.normpath(f"docs/{link[1]}"))
    return found


def _with_navigation(app: object, docname: str, source: list[str]) -> None:
    if docname == HOME:
        for caption, pages in chapters(source[0]):
            entries = "\n".join(f"/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _with_navigation)
