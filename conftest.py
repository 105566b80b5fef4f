"""Tests import the packages in examples/, which are not installed. pytest's own setting of paths takes no patterns."""

import sys
from pathlib import Path

sys.path[:0] = map(str, sorted(Path(__file__).parent.glob("examples/*/src")))
