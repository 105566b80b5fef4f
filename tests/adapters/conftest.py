"""Fixtures for the tests of adapters."""

from tests.support import one_thread as one_thread
