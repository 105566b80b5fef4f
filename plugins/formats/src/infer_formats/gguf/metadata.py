"""Reading a GGUF file's settings: every error is one sentence that names the file, the key and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from infer.errors import CheckpointError

V = TypeVar("V")
MAX_SIZE = 1 << 31


@dataclass(frozen=True)
class Metadata:
    path: Path
    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set)
    """The keys that have been asked for."""

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> int | None:
        """A whole number of reasonable size."""
        value = self._get(key)
        if value is None:
            return default
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # one for each layer
        if type(value) is not int or not least <= value < MAX_SIZE:
            raise self.bad(key, f"one whole number from {least} to {MAX_SIZE - 1}")
        return value

    def size(self, key: str) -> int:
        """A size that the file has to give."""
        value = self.whole(key, least=1)
        if value is None:
            raise CheckpointError(f"{self.path} does not say {key}.")
        return value

    def each(self, key: str, default: int | None = None) -> list[int]:
        """A size per layer, or one for all of them."""
        if isinstance(self.values.get(key), list):
            sizes = self.several(key, int)
            if not sizes or not all(0 <= size < MAX_SIZE for size in sizes):
                raise self.bad(key, f"one or more whole numbers from 0 to {MAX_SIZE - 1}")
            return sizes
        return self.alike(key, default)

    def alike(self, key: str, default: int | None = None) -> list[int]:
        """A size, the same one for all layers, in a list."""
        return [self.whole(key, default, least=1) or self.size(key)]

    def layers(self, key: str, count: int) -> list[int]:
        """A size for each of ``count`` layers, all alike but for those that are 0."""
        value = self._get(key)
        if value is None:
            raise CheckpointError(f"{self.path} does not say {key}.")
        sizes = (
            {each for each in value if type(each) is int and 0 < each < MAX_SIZE} if isinstance(value, list) else set()
        )
        if len(sizes) != 1 or len(value) != count or not {0, *sizes}.issuperset(value):
            raise self.bad(key, f"for each of {count} layers either 0 or the same number from 1 to {MAX_SIZE - 1}")
        return list(value)

    def layer_types(self, arch: str) -> list[str] | None:
        """config.json's ``layer_types``: which layers have windows. None if there is no list of them."""
        key, kinds = f"{arch}.attention.sliding_window_pattern", {True: "sliding_attention", False: "full_attention"}
        if not isinstance(self.values.get(key), list):
            return None
        return [kinds[windowed] for windowed in self.several(key, bool) or []]

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self._get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.bad(key, "a number")
        return float(value)

    def needed(self, key: str) -> float:
        """A number that the file has to give."""
        value = self.number(key)
        if value is None:
            raise CheckpointError(f"{self.path} does not say {key}.")
        return value

    def text(self, key: str) -> str | None:
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, "a text")
        return value

    def truth(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def several(self, key: str, kind: type[V]) -> list[V] | None:
        """A list of texts or numbers."""
        value = self._get(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            raise self.bad(key, f"a list of {kind.__name__}s")
        return value

    def bad(self, key: str, wanted: str) -> CheckpointError:
        shown = repr(self.values[key])
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        return CheckpointError(f"{self.path}: {key} is {shown}; it has to be {wanted}.")

    def _get(self, key: str) -> Any:
        self.read.add(key)
        return self.values.get(key)
