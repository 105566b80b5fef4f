"""Decode passes recorded once per batch size and replayed: the host then says one thing, not hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.contracts.protocols import CachePoolProtocol, KVCacheView, ModelProtocol, Pass, RecorderProtocol
from infer.device import same_bits

log = logging.getLogger(__name__)

Known = Sequence["list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]"]
"""Each row's token (or PENDING), position and slot."""
Path = tuple[str | int, ...]


class Recording:
    """A pass of one size, and how far its replay may be trusted: as far as it was compared.

    Whatever a model, a provider or a view takes from the host stays in a recording. So a row whose token, position or
    slot is another than when it was recorded is not replayed before a second recording, of a pass where it was another,
    has been found equal to the first; and no replay is used before one has given the bits of a pass that was run.
    """

    def __init__(self, replay: Callable[[], Tensor | str], view: KVCacheView, known: Known) -> None:
        self.replay = replay
        self.tried = False
        """A replay has been compared with the pass."""
        self._view = view
        """Kept, since a replay reads what it holds."""
        self._places: list[tuple[Path, int, torch.Size]] | None = None
        """Where the tensors are that every view has anew."""
        self._known = {kind: list(_numbers(values)) for kind, values in enumerate(known)}
        """Of what has not been another in every row."""
        self._varied: dict[int, set[int]] = {kind: set() for kind in self._known}
        """The rows in which it has, without making another recording."""

    def moved(self, view: KVCacheView) -> str | None:
        """The first of the view's tensors that is elsewhere than in the recorded view, or of another shape."""
        if self._places is None:
            found = ((path, _at(self._view, path)) for path in _fresh(self._view, view))
            self._places = [(path, x.data_ptr(), x.shape) for path, x in found if isinstance(x, Tensor)]
        for path, address, shape in self._places:
            x = _at(view, path)
            if x.data_ptr() != address or x.shape != shape:
                return ".".join(map(str, path))
        return None

    def trusts(self, known: Known) -> bool:
        """Whether all that is known of the rows is as it was, or may be another. If not, it may be from now on."""
        new = False
        for kind, before in list(self._known.items()):
            now, varied = _numbers(known[kind]), self._varied[kind]
            if now != before and (rows := {i for i, value in enumerate(now) if value != before[i]} - varied):
                new = True
                varied |= rows
                if len(varied) == len(before):
                    del self._known[kind]
        return not new


class DecodeGraphs:
    """The model's forward pass over decodes. Where recording costs no more than running, each number of rows is
    recorded when it is first met; elsewhere a few are at the start, and a batch takes the next larger one.

    What cannot be recorded, and what does not replay the bits of a pass that is run, is run; the log says why.
    """

    def __init__(
        self,
        model: ModelProtocol,
        pool: CachePoolProtocol,
        device: torch.device,
        max_batch_size: int,
        record: RecorderProtocol,
    ) -> None:
        self.sizes: Sequence[int] = range(1, max_batch_size + 1) if record.cheap else batch_sizes(max_batch_size)
        self.token_ids_T = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.recordings: dict[int, Recording | None] = {}
        """None for a size that cannot be recorded."""
        self._model = model
        self._pool = pool
        self._record = record
        self._given_up = False
        self._said: set[str] = set()
        if not record.cheap:
            for rows in reversed(self.sizes):  # the largest first: the others find room in what it leaves
                self._capture(rows)

    def rows(self, num: int) -> int:
        """The recorded size that ``num`` sequences take."""
        return next(rows for rows in self.sizes if rows >= num)

    def run(self, rows: int, view: KVCacheView, known: Known) -> Tensor:
        """Hidden states, [rows, D], of what ``token_ids_T``, ``positions_T`` and the pool's latest ``decode_view`` of
        so many rows say. The next run writes over them. ``known``: the same as the host knows it, and the slots."""
        recording = self.recordings.get(rows)
        if recording is None:
            if self._given_up or rows in self.recordings:
                return self._run(rows, view)
            hidden_TD, replay = self._record(lambda: self._run(rows, view))
            why = read_on_host(view) or replay
            self.recordings[rows] = None if isinstance(why, str) else Recording(why, view, known)
            if isinstance(why, str):
                self._say(why)
            return hidden_TD
        found: Tensor | str
        if name := recording.moved(view):
            found = f"the views of {type(self._pool).__name__} do not stay where they are ({name})"
        elif not recording.trusts(known):
            return self._record_again(recording, rows, view)
        elif not recording.tried:
            return self._compare(recording, rows, view)
        else:
            found = recording.replay()
        if isinstance(found, Tensor):
            return found
        self._give_up(found)
        return self._run(rows, view)

    def _run(self, rows: int, view: KVCacheView) -> Tensor:
        return self._model.forward(Pass(self.token_ids_T[:rows], self.positions_T[:rows], view))

    def _record_again(self, recording: Recording, rows: int, view: KVCacheView) -> Tensor:
        hidden_TD, again = self._record(lambda: self._run(rows, view))
        if isinstance(again, str):
            self._give_up(again)
        elif again != recording.replay or read_on_host(view):
            self._give_up("a pass does not do the same for every token, position and slot")
        return hidden_TD

    def _compare(self, recording: Recording, rows: int, view: KVCacheView) -> Tensor:
        """The pass; before it, lest it finds done what it should do, the replay."""
        recording.tried = True
        found = recording.replay()
        if isinstance(found, Tensor):
            found = found.clone()
        hidden_TD = self._run(rows, view)
        if isinstance(found, str):
            self._give_up(found)
        elif not same_bits(found, hidden_TD):
            self._give_up(f"a replay of {rows} rows gave other bits")
        return hidden_TD

    def _capture(self, rows: int) -> None:
        """Record, and compare with another token, position and slot: the pool is empty, so nothing can be harmed."""
        if self._given_up:
            return
        places = [place for _ in self.sizes[:2] if (place := self._pool.allocate([0, 0], reuse=False)) is not None]
        assert places, "the pool is empty before the first request"
        first, last = places[0].slot, places[-1].slot
        with torch.inference_mode():
            self.token_ids_T.fill_(0)
            self.positions_T.fill_(0)
            self.run(rows, self._pool.decode_view([first], rows), ())
            if recording := self.recordings[rows]:
                if last != first:
                    self._pool.decode_view([last])
                self.token_ids_T.fill_(self._model.vocab_size - 1)
                self.positions_T.fill_(1)
                self.run(rows, self._pool.decode_view([last], rows), ())
                assert self._given_up or recording.tried
        for place in places:
            self._pool.free(place.slot)

    def _give_up(self, why: str) -> None:
        """Neither replay nor record any more."""
        self._given_up = True
        self.recordings.clear()
        self._say(why)

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            log.warning("decode passes of %s are run, not replayed: %s", type(self._model).__name__, why)


def read_on_host(view: KVCacheView) -> str | None:
    """Who read, of a view of ``KVStorage``'s, what differs between passes and is not on the device."""
    found: str | None = getattr(getattr(view, "ragged", None), "read", None)
    return found


def _numbers(values: list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    return values if isinstance(values, list) else values.tolist()


def _fresh(old: object, new: object, path: Path = ()) -> Iterator[Path]:
    """Where among the attributes of ``new``, and among theirs, there are tensors that ``old`` does not have."""
    if old is new:
        return
    if isinstance(new, Tensor):
        yield path
    elif isinstance(new, (list, tuple)):
        if not (new and isinstance(new[0], int)):
            for i, value in enumerate(new):
                yield from _fresh(_at(old, (i,)), value, (*path, i))
    else:
        for name, value in getattr(new, "__dict__", {}).items():
            yield from _fresh(_at(old, (name,)), value, (*path, name))


def _at(x: Any, path: Path) -> Any:
    for key in path:
        try:
            x = getattr(x, key) if isinstance(key, str) else x[key]
        except (AttributeError, LookupError, TypeError):
            return None
    return x


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, then every eighth, then every sixteenth: what is computed in vain stays small."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [*(size for size in sizes if size < largest), largest]
