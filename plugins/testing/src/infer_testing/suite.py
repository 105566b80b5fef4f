"""Suites: the promises of a contract, each with a function that tries it on one implementation.

Every check draws its cases from a generator that is seeded with the check's name, the seed and the number of the case,
so that a failure can be replayed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from infer.errors import InferError, one_line

Subject = TypeVar("Subject")
Run = Callable[[Subject, random.Random], None]


class Violation(Exception):  # noqa: N818
    """An implementation does not do what its contract says. The text names what was seen and what is promised."""


class Skipped(Exception):  # noqa: N818
    """A check does not apply to an implementation; the text says why."""


class ConformanceError(AssertionError):
    """At least one check has failed. The text has a paragraph for each of ``outcomes``; those that say the same, as if
    an exception ends every check, share one."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes
        alike: dict[str | None, list[Outcome]] = {}
        for outcome in outcomes:
            alike.setdefault(outcome.violation, []).append(outcome)
        super().__init__(
            "\n\n".join(
                str(first) + (f"\n    the same: {', '.join(other.name for other in others)}" if others else "")
                for first, *others in alike.values()
            )
        )


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One promise, and how it is tried."""

    name: str
    contract: str
    """The promise, in one sentence."""
    run: Run[Subject]
    """Tries one case. Raises Violation, or Skipped."""
    cases: int


@dataclass(frozen=True)
class Outcome:
    """What became of a check."""

    name: str
    contract: str
    seed: int
    case: int
    """The case that failed; how many were tried if none did."""
    violation: str | None = None
    skipped: str | None = None
    replay: str = ""
    """What replays the case that failed."""

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.name}: skipped: {self.skipped}"
        if self.violation is None:
            return f"{self.name}: ok ({self.case} {'case' if self.case == 1 else 'cases'})"
        return f"{self.name}: {self.violation}\n    contract: {self.contract}\n    replay: {self.replay}"


@dataclass
class Suite(Generic[Subject]):
    """The checks of one contract."""

    call: str
    """How Python calls the suite, for the replay of a failure."""
    checks: list[Check[Subject]] = field(default_factory=list)

    def check(self, contract: str, cases: int = 1) -> Callable[[Run[Subject]], Run[Subject]]:
        """Adds a function to the suite, under its own name."""

        def add(run: Run[Subject]) -> Run[Subject]:
            self.checks.append(Check(run.__name__, contract, run, cases))
            return run

        return add

    def outcomes(
        self,
        subject: Subject,
        *,
        only: Sequence[str] = (),
        seed: int = 0,
        case: int | None = None,
        command: str | None = None,
    ) -> Iterator[Outcome]:
        """Run the checks, or those that ``only`` names, and one case of each if ``case`` is given. A check ends with
        its first failure. ``command`` is the command line that ran the suite, if one did. Raises InferError for an
        unknown name."""
        names = [check.name for check in self.checks]
        if unknown := [name for name in only if name not in names]:
            raise InferError(f"There is no check {unknown[0]!r}; there are {', '.join(names)}.")
        for check in self.checks:
            if not only or check.name in only:
                yield self._outcome(check, subject, seed, case, command)

    def enforce(self, subject: Subject, *, only: Sequence[str] = (), seed: int = 0, case: int | None = None) -> None:
        """Run the checks as ``outcomes`` does. Raises ConformanceError with all that have failed."""
        found = self.outcomes(subject, only=[only] if isinstance(only, str) else only, seed=seed, case=case)
        if failed := [outcome for outcome in found if outcome.violation is not None]:
            raise ConformanceError(failed)

    def _outcome(
        self, check: Check[Subject], subject: Subject, seed: int, case: int | None, command: str | None
    ) -> Outcome:
        at, tried, skipped = 0, 0, None
        cases = range(check.cases) if case is None else [case]
        try:
            for at in cases:
                try:
                    check.run(subject, random.Random(f"{check.name} {seed} {at}"))
                    tried += 1
                except Skipped as reason:
                    skipped = str(reason)
        except Violation as violation:
            text = str(violation)
        except Exception as error:  # whatever a stranger's code raises
            text = f"raised {one_line(error)}"
        else:
            # A check counts as skipped if none of its cases applies.
            return Outcome(check.name, check.contract, seed, tried, skipped=None if tried else skipped)
        replay = f'{self.call}(..., only="{check.name}", seed={seed}, case={at})'
        if command is not None:
            replay = f"{command} --only {check.name} --seed {seed} --case {at}"
        return Outcome(check.name, check.contract, seed, at, text, replay=replay)
