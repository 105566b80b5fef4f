"""Progress bars for long work, if standard error is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar. Yields a function to be called whenever one of ``total`` things is done."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: the process was started without
        yield lambda: None
        return
    from rich.console import Console  # imported late, since a server that logs to a file does not need it
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items, with a bar that shows how many have been taken."""
    with bar(what, total) as done:
        for item in items:
            yield item
            done()
