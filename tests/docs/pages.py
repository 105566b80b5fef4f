"""The repository's Markdown, as GitHub and `make docs` read it."""

from __future__ import annotations

import os
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results/"
"""What is measured is kept there, also as Markdown; it is no part of the documentation."""
REFERENCE, TIMELINE = "docs/reference.md", "docs/demo/steps.html"
"""What `make docs` writes before it makes the site. Git does not keep it."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    path: str
    """From the repository's root."""

    @cached_property
    def text(self) -> str:
        if self.path == REFERENCE:
            return str(runpy.run_path(str(ROOT / "docs/reference.py"))["page"]())
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    @cached_property
    def inline(self) -> list[tuple[int, Token]]:
        """What stands in paragraphs, headings and tables, with its line."""
        return [
            (token.map[0] + 1 if token.map else 0, child)
            for token in self.tokens
            for child in token.children or ()
            if token.type == "inline"
        ]

    @cached_property
    def anchors(self) -> set[str]:
        """Of its headings, as GitHub makes them."""
        found: set[str] = set()
        seen: Counter[str] = Counter()
        for before, token in zip(self.tokens, self.tokens[1:], strict=False):
            if before.type == "heading_open":
                text = "".join(child.content for child in token.children or ())
                slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
                found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return found

    @cached_property
    def links(self) -> list[tuple[int, str]]:
        """The line and the target of each link and picture."""
        targets = ((line, child.attrs.get("href") or child.attrs.get("src")) for line, child in self.inline)
        return [(line, str(target)) for line, target in targets if target]

    @cached_property
    def code(self) -> list[tuple[int, str]]:
        """What stands between backticks."""
        return [(line, child.content) for line, child in self.inline if child.type == "code_inline"]

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(token.info.strip(), token.content, token.map[0] + 1 if token.map else 0)
            for token in self.tokens
            if token.type == "fence"
        ]


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command of a console's block, which may go on after a backslash, and what the page shows of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif not found[-1][1] and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        else:
            found[-1][1].append(line)
    return found


def _pages() -> Iterator[str]:
    for folder, inside, files in os.walk(ROOT):
        inside[:] = [
            each for each in inside if not each.startswith(".") and each not in ("build", "dist", "node_modules")
        ]
        for file in files:
            path = Path(folder, file).relative_to(ROOT).as_posix()
            if file.endswith(".md") and not path.startswith(RESULTS):
                yield path


PAGES = {path: Page(path) for path in sorted({*_pages(), REFERENCE})}
