"""Parameters of which each two values meet in one case at least, where not every combination is code of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

Row = tuple[Any, ...]


def _pairs(row: Row) -> set[Row]:
    return {*itertools.combinations(row, 2)}


def cover(columns: Sequence[Sequence[Any]], rows: Sequence[Row] = ()) -> list[Row]:
    """These rows, and as many others as it takes that each two values of different columns are in one."""
    found = list(rows)
    places = [[(i, k) for k in range(len(column))] for i, column in enumerate(columns)]
    given = [tuple((i, list(columns[i]).index(value)) for i, value in enumerate(row)) for row in found]
    left = set[Any]().union(*map(_pairs, itertools.product(*places))).difference(*map(_pairs, given))
    while left:
        best = max(itertools.product(*places), key=lambda row: len(_pairs(row) & left))
        left -= _pairs(best)
        found.append(tuple(columns[i][k] for i, k in best))
    return found


def pairwise(names: str, *columns: Sequence[Any], slow: Sequence[Sequence[Any]] = ()) -> pytest.MarkDecorator:
    """``slow`` has further values of each column: cases that it takes for these are left out by ``make test``."""
    fast = cover(columns)
    more = [(*column, *others) for column, others in itertools.zip_longest(columns, slow, fillvalue=())]
    rows = cover(more, fast)
    cases = [*fast, *(pytest.param(*row, marks=pytest.mark.slow) for row in rows[len(fast) :])]
    return pytest.mark.parametrize(names.split(), cases, ids=_name)


def _name(value: Any) -> str | None:
    """Types have names that say little of them to pytest."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
