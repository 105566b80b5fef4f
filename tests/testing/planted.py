"""Bugs planted in our own implementations, and what the kit has to say about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

from infer_testing import ConformanceError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Bug(Generic[Made]):
    name: str
    """What the bug does."""
    make: Made
    """The implementation with the bug, or what makes it."""
    check: str
    """The check that has to fail."""
    says: str
    """A regular expression that is found in the violation."""


@dataclass
class Bugs(Generic[Made]):
    """A list that a decorator fills."""

    found: list[Bug[Made]]

    def __call__(self, name: str, check: str, says: str) -> Callable[[Made], Made]:
        def add(make: Made) -> Made:
            self.found.append(Bug(name, make, check, says))
            return make

        return add

    @property
    def each(self) -> pytest.MarkDecorator:
        return pytest.mark.parametrize("bug", self.found, ids=lambda bug: bug.name)


def caught(bug: Bug[Any], run: Callable[..., None]) -> None:
    """A suite names the bug, and the replay of the case that failed finds it again. ``run`` runs the suite on the
    implementation with the bug; it takes ``only``, ``seed`` and ``case``."""
    with pytest.raises(ConformanceError, match=bug.says) as caught:
        run(only=[bug.check])
    (outcome,) = caught.value.outcomes
    assert outcome.name == bug.check
    assert f'only="{bug.check}", seed=0, case={outcome.case}' in outcome.replay
    with pytest.raises(ConformanceError) as again:
        run(only=[bug.check], seed=0, case=outcome.case)
    assert again.value.outcomes[0].violation == outcome.violation
