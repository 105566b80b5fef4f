"""The events of a pass as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import repeat
from typing import Any, overload

from infer.contracts.request import Event

_make: Any = partial(tuple.__new__, Event)
"""An event of all its fields, in a third of the constructor's time."""
_DEFAULTS = {name: repeat(value) for name, value in Event("")._asdict().items()}
"""For each field, a column of its default."""


class Events(Seq[Event]):
    """Events in the order of a pass's rows. Most have a token and its text and nothing else. These are columns, and an
    ``Event`` is made of them only when it is read, in the reader's thread."""

    __slots__ = ("_cached", "_rows", "_texts", "_tokens", "ids", "whole")

    def __init__(
        self,
        ids: Seq[str],
        tokens: Seq[int | None],
        texts: Seq[str | None],
        cached: Seq[int],
        whole: Mapping[int, Event | None],
    ) -> None:
        """Each row's ``request_id``, token, ``text`` and ``num_cached``. ``whole`` has the event of each row with more
        to it than that, or None for a row without an event; what the columns say of these rows does not count."""
        self.ids = ids
        self._tokens, self._texts, self._cached, self._rows = tokens, texts, cached, whole
        self.whole = [*filter(None, whole.values())]
        """The events with more to them than a token and its text. Every request's first and last events are among
        these."""

    def __len__(self) -> int:
        return len(self.ids) - len(self._rows) + len(self.whole)

    def __iter__(self) -> Iterator[Event]:
        columns: dict[str, Any] = _DEFAULTS | {
            "request_id": self.ids,
            "token_ids": zip(self._tokens, strict=True),
            "text": self._texts,
            "num_cached": self._cached,
        }
        made: Iterator[Event] = map(_make, zip(*columns.values(), strict=False))
        if not self._rows:
            return made
        return filter(None, (self._rows.get(i, event) for i, event in enumerate(made)))

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return [*self][index]
