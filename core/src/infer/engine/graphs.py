"""Decode passes are recorded once per batch size and then replayed, which spares the host hundreds of launches."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from infer.contracts.adapters import AdapterRows
from infer.contracts.cache import CachePoolProtocol, KVCacheView, StatefulView
from infer.contracts.kernels import RecorderProtocol
from infer.contracts.model import ModelProtocol, Pass, StatefulModel
from infer.device import FixedTensor, same_bits

log = logging.getLogger(__name__)

Known = Sequence["list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]"]
"""Each row's token (or PENDING), position and slot, and in a pass with adapters the slot of its adapter."""
Path = tuple[str | int, ...]


class Recording:
    """A recorded pass of one batch size, and for which rows its replay may be trusted.

    Whatever a model, a provider or a view reads on the host is fixed in a recording. Therefore, when a row has a token,
    position, slot or adapter that differs from the recorded one, the pass is recorded a second time, and replayed from
    then on only if the two recordings are equal. And no replay's result is used before one replay has been compared,
    bit for bit, with a pass that was run.
    """

    def __init__(self, replay: Callable[[], Tensor | str], view: KVCacheView, known: Known) -> None:
        self.replay = replay
        self.tried = False
        """A replay has been compared with a pass that was run."""
        self._view = view
        """The recorded pass's view; kept because a replay reads its tensors."""
        self._places: list[tuple[Path, int, torch.Size]] | None = None
        """Path, address and shape of each tensor that differs from view to view."""
        self._known = {kind: list(_numbers(values)) for kind, values in enumerate(known)}
        """Per kind (token, position, slot, adapter), the recorded value of each row. A kind is removed once every row
        of it has varied."""
        self._varied: dict[int, set[int]] = {kind: set() for kind in self._known}
        """Per kind, the rows whose value has differed from the recorded one without changing the recording."""

    def moved(self, view: KVCacheView) -> str | None:
        """The path of the first tensor of the view whose address or shape is not the recorded one; None if there is
        none."""
        if self._places is None:
            recorded = ((path, _at(self._view, path)) for path in _fresh(self._view, view))
            self._places = [(path, x.data_ptr(), x.shape) for path, x in recorded if isinstance(x, Tensor)]
        for path, address, shape in self._places:
            x = _at(view, path)
            if x.data_ptr() != address or x.shape != shape:
                return ".".join(map(str, path))
        return None

    def trusts(self, known: Known) -> bool:
        """Whether all that is known of each row is the recorded value, or is known to vary without changing the
        recording. If not, the caller records again, and these rows count as varying from now on."""
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
    """Runs the model's decode passes, recorded if possible. If recording costs no more than running, each batch size is
    recorded when it first occurs, and again when it first occurs with adapters. Otherwise some sizes are recorded at
    the start, without adapters, and a batch takes the next larger one.

    A pass that cannot be recorded, or whose replay gives other bits, is run instead, and the log says why.
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
        self.token_ids, self.positions = (
            FixedTensor(torch.zeros(max_batch_size, dtype=torch.int64, device=device)) for _ in range(2)
        )
        self.recordings: dict[tuple[int, bool], Recording | None] = {}
        """Recordings by batch size, and whether a row has an adapter; None for what cannot be recorded."""
        self.adapting = record.cheap
        """Whether passes with adapters may be recorded."""
        self._model = model
        self._pool = pool
        self._record = record
        self._stateless = not (isinstance(model, StatefulModel) and model.states)
        self._given_up = False
        self._warned: set[str] = set()
        if not record.cheap:
            for rows in reversed(self.sizes):  # the largest first, so that the others reuse its memory
                self._capture(rows)

    def rows(self, num: int) -> int:
        """The batch size at which ``num`` sequences are run."""
        return self.sizes[bisect_left(self.sizes, num)]

    def run(self, rows: int, view: KVCacheView, known: Known, adapters: AdapterRows | None = None) -> Tensor:
        """Run or replay a decode pass of ``rows`` rows, whose input is in ``token_ids``, ``positions`` and
        ``view``, the latest of the pool's ``decode_view``. ``known`` is what the host knows of each row. ``adapters``
        are those that the model applies, if this is ``adapting``; their ``slots_T`` has the same place in each run.
        Returns hidden states, [rows, D], which the next run overwrites."""
        key = rows, adapters is not None
        recording = self.recordings.get(key)
        if recording is None:
            if self._given_up or key in self.recordings:
                return self._run(rows, view)
            hidden_TD, replay = self._recorded(rows, view)
            why = read_on_host(view, adapters) or replay
            self.recordings[key] = None if isinstance(why, str) else Recording(why, view, known)
            if isinstance(why, str):
                self._warn_once(why)
            return hidden_TD
        outcome: Tensor | str
        if name := recording.moved(view):
            outcome = f"the views of {type(self._pool).__name__} do not stay where they are ({name})"
        elif not recording.trusts(known):
            return self._record_again(recording, key, view, adapters)
        elif not recording.tried:
            return self._compare(recording, rows, view)
        else:
            outcome = recording.replay()
        if isinstance(outcome, Tensor):
            return outcome
        self._give_up(outcome)
        return self._run(rows, view)

    def _run(self, rows: int, view: KVCacheView) -> Tensor:
        return self._model.forward(Pass(self.token_ids.tensor[:rows], self.positions.tensor[:rows], view))

    def _recorded(self, rows: int, view: KVCacheView) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        """Record a pass, and run it once as far as its states are concerned: a recorder may run it more often."""
        with self._rehearsal(view):
            hidden_TD, replay = self._record(lambda: self._run(rows, view))
        return hidden_TD if self._stateless else self._run(rows, view), replay

    def _rehearsal(self, view: KVCacheView) -> AbstractContextManager[None]:
        return nullcontext() if self._stateless else cast(StatefulView, view).rehearsal()

    def _record_again(
        self, recording: Recording, key: tuple[int, bool], view: KVCacheView, adapters: AdapterRows | None
    ) -> Tensor:
        del self.recordings[key]  # if this raises, nobody knows whether these rows may vary
        hidden_TD, again = self._recorded(key[0], view)
        if isinstance(again, str):
            self._give_up(again)
        elif again != recording.replay or read_on_host(view, adapters):
            self._give_up("a pass does not do the same for every token, position, slot and adapter")
        else:
            self.recordings[key] = recording
        return hidden_TD

    def _compare(self, recording: Recording, rows: int, view: KVCacheView) -> Tensor:
        """Replay the pass, then run it, and compare the two. Returns the result of running it. The replay goes first:
        after a run it would find K/V already written that it might fail to write itself."""
        with self._rehearsal(view):
            outcome = recording.replay()
        if isinstance(outcome, Tensor):
            outcome = outcome.clone()
        hidden_TD = self._run(rows, view)
        if isinstance(outcome, str):
            self._give_up(outcome)
        elif not same_bits(outcome, hidden_TD):
            self._give_up(f"a replay of {rows} rows gave other bits")
        recording.tried = True  # not before: if anything raises, nothing has been compared
        return hidden_TD

    def _capture(self, rows: int) -> None:
        """Record a pass and compare its replay with a pass that has another token, position and slot. At the start the
        pool is empty, so this overwrites nobody's K/V."""
        if self._given_up:
            return
        places = [place for _ in self.sizes[:2] if (place := self._pool.allocate([0, 0], reuse=False)) is not None]
        assert places, "the pool is empty before the first request"
        first, last = places[0].slot, places[-1].slot
        with torch.inference_mode():
            self.token_ids.tensor.fill_(0)
            self.positions.tensor.fill_(0)
            self.run(rows, self._pool.decode_view([first], rows), ())
            if recording := self.recordings[rows, False]:
                if last != first:
                    self._pool.decode_view([last])
                self.token_ids.tensor.fill_(self._model.vocab_size - 1)
                self.positions.tensor.fill_(1)
                self.run(rows, self._pool.decode_view([last], rows), ())
                assert self._given_up or recording.tried
        for place in places:
            self._pool.free(place.slot)

    def _give_up(self, why: str) -> None:
        """Stop recording and replaying; run every pass from now on."""
        self._given_up = True
        self.recordings.clear()
        self._warn_once(why)

    def _warn_once(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            log.warning("decode passes of %s are run, not replayed: %s", type(self._model).__name__, why)


def read_on_host(view: KVCacheView, adapters: AdapterRows | None = None) -> str | None:
    """Who has read, from one of ``KVStorage``'s views or of adapters, host values that differ between passes; None if
    nobody has."""
    read = [*getattr(view, "raggeds", ()), *([] if adapters is None else [adapters.groups])]
    return next(filter(None, (getattr(values, "read", None) for values in read)), None)


def _numbers(values: list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    return values if isinstance(values, list) else values.tolist()


def _fresh(old: object, new: object, path: Path = ()) -> Iterator[Path]:
    """The paths of all tensors among the attributes of ``new``, and among their attributes, that ``old`` does not
    share."""
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
    """1, 2, 4, then multiples of 8 below 64, then multiples of 16, and ``largest``: close enough that little is wasted
    on padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [*(size for size in sizes if size < largest), largest]
