"""Fixtures for the tests of models."""

from tests.support import one_thread as one_thread
