"""What tests draw, in the one place that says whether it is drawn anew.

The gate draws nothing: Hypothesis derives its examples from each test, and every other generator has a written seed.
``pytest --explore SEED`` (``make explore``) draws from that seed, more often, and runs only the tests that draw.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import torch

fast = False
"""Whether slow tests are left out. ``tests/conftest.py`` sets it before any test is collected."""
explored: int | None = None
"""The seed of an exploration, None in the gate. ``tests/conftest.py`` sets it, too."""
MORE = 10
"""How many times as many examples an exploration tries."""


def examples(all_tests: int, fast_tests: int | None = None) -> int:
    """How many examples Hypothesis tries: fewer where slow tests are left out, more in an exploration."""
    if explored is not None:
        return MORE * all_tests
    return fast_tests if fast and fast_tests is not None else all_tests


def seeds(all_tests: int) -> list[int]:
    """The seeds of a test that draws from its own generator: the same ones in every run of the gate."""
    return [*range(all_tests)] if explored is None else [explored * 1_000_000 + i for i in range(MORE * all_tests)]


def seeded(all_tests: int = 1) -> pytest.MarkDecorator:
    """Runs a test with each of ``seeds``. The test is to be marked with ``draws``."""
    return pytest.mark.parametrize("seed", seeds(all_tests))


def slowly(*values: Any) -> list[Any]:
    """Parameters of a test that ``make test`` leaves out; a tuple has one value for each argument."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]


def seed_everything() -> None:
    """Whatever a test draws without a generator of its own is drawn from the same seed."""
    seed = explored or 0
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_profile() -> None:
    """Hypothesis's settings for all tests. Without Hypothesis, as on a bare GPU machine, there is nothing to set."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, core, settings
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    settings.register_profile(
        "infer",
        derandomize=explored is None,
        database=None,
        print_blob=True,
        deadline=None,  # a verdict never depends on the clock
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("infer")
    core.global_force_seed = explored  # type: ignore[assignment]  # what --hypothesis-seed sets, too
    if explored is None:
        # Hypothesis mixes in numbers and strings from whichever modules happen to be imported, so that the examples
        # would depend on the tests that ran before in the same process. No setting turns that off.
        providers._get_local_constants = Constants
