"""How many examples hypothesis tries: fewer where slow tests are left out."""

from __future__ import annotations

fast = False
"""Whether slow tests are left out. ``tests/conftest.py`` sets it before any test is collected."""


def examples(all_tests: int, fast_tests: int) -> int:
    return fast_tests if fast else all_tests
