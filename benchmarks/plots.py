"""Plots of results, written next to their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "infer", "font.size": 8})  # so that the same figures give the same file


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def title(report: Mapping[str, Any]) -> str:
    return f"{report['shape']}, {report['machine']['cpu']}, {report['machine']['cores']} cores"


def peers(report: Mapping[str, Any], medians: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Every engine's times relative to the first one's, cell by cell, with its bound as a line."""
    base, *_ = medians
    own, bounds = medians[base], report["bounds"].get(base, {})
    cells = list(own)
    figure, axes = pyplot.subplots(figsize=(1 + 0.9 * len(cells), 3.5))
    width = 0.8 / len(medians)
    for i, (peer, found) in enumerate(medians.items()):
        at = [x + (i - (len(medians) - 1) / 2) * width for x in range(len(cells))]
        axes.bar(at, [found[cell] / own[cell] for cell in cells], width, label=peer)
    for x, cell in enumerate(cells):
        if cell in bounds:
            axes.hlines(bounds[cell] / own[cell], x - 0.4, x + 0.4, colors="black")
    axes.set_xticks(range(len(cells)), [f"{c}\n{1e3 * own[c]:.0f} ms" for c in cells], rotation=30)
    axes.set_ylabel(f"times as long as {base} (line: the bound)")
    axes.set_title(title(report))
    axes.legend()
    save(figure, path)


def growth(report: Mapping[str, Any], path: Path) -> None:
    """Measured points and their fit, one panel per figure."""
    panels = report["panels"]
    figure, row = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2))
    for axes, panel in zip(row, panels, strict=True):
        axes.plot(panel["x"], [1e3 * y for y in panel["seconds"]], "o", label="measured")
        axes.plot(panel["x"], [1e3 * y for y in panel["fitted"]], "-", label=panel["formula"])
        axes.set_xlabel(panel["of"])
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.set_title(panel["name"])
        axes.legend()
    figure.suptitle(title(report))
    save(figure, path)
