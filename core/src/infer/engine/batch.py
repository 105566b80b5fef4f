"""A pass as arrays: its tokens, laid end to end without padding, and its readouts, which say what to read from it.

A batch holds values only, so that it stays true when a sequence changes or ends while the pass is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from infer.contracts.request import Request
from infer.contracts.scheduler import PENDING, Sequence, Work, Works
from infer.engine.processors import LogitsProcessor, ProcessedRow

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
NONE: Ints = np.zeros(0, dtype=np.int64)


class Draw(NamedTuple):
    """A readout: N tokens, drawn from the logits of wanted rows first .. first+N-1. Each of the M sequences that draw
    has one or more of them, in the order of its positions."""

    of: Seq[int]
    """For each token, the index of its sequence in the batch."""
    first: int
    last_M: Seq[int] | None
    """The index among N of each sequence's last token; None if each has one token."""
    slots_M: Ints
    positions_N: Ints
    """Each token's index in its sequence."""
    requests: list[Request]
    """Each token's request, with its sampling parameters and seed."""
    processed: list[ProcessedRow]
    """The rows among N whose logits are edited. A sequence's rows follow each other."""


@dataclass(frozen=True, slots=True)
class Score:
    """A readout: the logprobs of prompt tokens, from the logits of wanted rows first .. first+len(targets)-1."""

    of: int
    """The sequence's index in the batch."""
    first: int
    targets: list[int]
    """The prompt token that follows each row."""
    count: int
    """How many of the likeliest tokens to report as well."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A readout: the hidden states of wanted rows first .. first+count-1, all of one sequence's prompt."""

    of: int
    """The sequence's index in the batch."""
    first: int
    count: int


class Lineup:
    """Sequences that decode, and what stays the same from step to step as long as they do so in the same slots."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self.sequences = [*sequences]
        self.slots: list[Any] = [sequence.slot for sequence in sequences]
        self.slots_B = ints(self.slots)
        self.tokens = [sequence.tokens for sequence in sequences]
        self.requests = [sequence.request for sequence in sequences]

    def of(self, sequences: Seq[Sequence]) -> Lineup:
        """This lineup if it is that of the sequences, or a new one."""
        same = self.sequences == [*sequences] and self.slots == [sequence.slot for sequence in sequences]
        return self if same else Lineup(sequences)

    def advance(self, starts: Seq[int]) -> None:
        """Record in the sequences that a pass computes the next position of each, and draws a token."""
        for sequence, start in zip(self.sequences, starts, strict=True):
            sequence.num_computed = start + 1
        for tokens in self.tokens:
            tokens.append(PENDING)


class Batch(NamedTuple):
    """The input of one pass: T tokens of B sequences."""

    decode_only: bool
    """Each sequence has one token and draws one, so that all rows are wanted."""
    slots: list[int]
    starts: list[int]
    lens: list[int]
    token_ids_T: Ints
    """PENDING at ``fed_rows``: the host has not read these tokens back yet, and the device puts in the token that it
    drew last for the slot in ``fed_slots``."""
    fed_rows: Ints
    fed_slots: Ints
    positions_T: Ints
    rows_N: Ints
    """The rows of T whose hidden states are wanted."""
    readouts: list[Score | HiddenStates | Draw]
    """What to compute from the wanted rows; a Draw comes last."""
    adapters_T: Ints | None = None
    """The slot of each row's adapter, -1 for none; None if no row has an adapter."""

    def pad(self, rows: int) -> Batch:
        """A decode batch padded to ``rows`` rows by repeating its last row. A repeated row writes the same values to
        the same place again, and nobody reads its result."""
        if rows == len(self.token_ids_T):
            return self
        more = (0, rows - len(self.token_ids_T))
        token_ids_T = np.pad(self.token_ids_T, more, mode="edge")
        fed_rows = np.flatnonzero(token_ids_T == PENDING)
        return self._replace(
            token_ids_T=token_ids_T,
            fed_rows=fed_rows,
            fed_slots=np.pad(np.asarray(self.slots), more, mode="edge")[fed_rows],
            positions_T=np.pad(self.positions_T, more, mode="edge"),
        )


def ints(values: Seq[int]) -> Ints:
    """An array of the values, in two thirds of the time that ``np.array`` takes."""
    return np.fromiter(values, np.int64, len(values))


def pack(
    works: Seq[Work],
    processors: Mapping[Sequence, LogitsProcessor] | None = None,
    *,
    adapted: bool = True,
    lineup: Lineup | None = None,
) -> Batch:
    """Lay the works' tokens end to end and work out the readouts. ``processors`` has one for each sequence whose logits
    are edited; ``adapted`` says whether any has an adapter, as far as is known; ``lineup`` is that of the sequences, if
    it is known."""
    works = Works.of(works)
    lineup = lineup or Lineup(works.sequences)
    batch = (_pack_decodes if works.single else _pack_chunks)(works, lineup, processors or {})
    return batch._replace(adapters_T=_adapters(works)) if adapted else batch


def _pack_decodes(works: Works, lineup: Lineup, processors: Mapping[Sequence, LogitsProcessor]) -> Batch:
    """A batch of one token for each sequence, which draws one."""
    of = range(len(works))
    token_ids = [tokens[-1] for tokens in lineup.tokens]
    token_ids_T, starts_B, rows_B = ints(token_ids), ints(works.starts), np.arange(len(works))
    fed_rows, fed_slots = _fed(token_ids, token_ids_T, rows_B, lineup.slots_B)
    draw = Draw(
        of=of,
        first=0,
        last_M=None,
        slots_M=lineup.slots_B,
        positions_N=starts_B + 1,
        requests=lineup.requests,
        processed=_processed(of, lineup.sequences, works.drafts, processors),
    )
    return Batch(
        decode_only=True,
        slots=lineup.slots,
        starts=list(works.starts),
        lens=list(works.lens),
        token_ids_T=token_ids_T,
        fed_rows=fed_rows,
        fed_slots=fed_slots,
        positions_T=starts_B,
        rows_N=rows_B,
        readouts=[draw],
    )


def _pack_chunks(works: Works, lineup: Lineup, processors: Mapping[Sequence, LogitsProcessor]) -> Batch:
    """A batch of any number of tokens for each sequence, which draws as many as it verifies, or none."""
    sequences, starts, lens, draws, _, drafts = works.columns
    draws = tuple([0 if s.request.pooling else count for s, count in zip(sequences, draws, strict=True)])
    of = [b for b, count in enumerate(draws) for _ in range(count)]
    back_N = np.array([i for count in draws for i in range(count - 1, -1, -1)], dtype=np.int64)
    token_ids, rows, readouts = _lay(works)
    token_ids_T, starts_B, lens_B = ints(token_ids), ints(starts), ints(lens)
    lasts_B = np.cumsum(lens_B) - 1
    fed_rows, fed_slots = _fed(token_ids, token_ids_T, lasts_B, lineup.slots_B)
    if of:
        last_M = np.flatnonzero(back_N == 0).tolist() if len(of) > sum(map(bool, draws)) else None
        draw = Draw(
            of=of,
            first=len(rows),
            last_M=last_M,
            slots_M=lineup.slots_B[of] if last_M is None else lineup.slots_B[of][last_M],
            positions_N=(starts_B + lens_B)[of] - back_N,
            requests=[lineup.requests[b] for b in of],
            processed=_processed(of, sequences, drafts, processors),
        )
        readouts.append(draw)
    return Batch(
        decode_only=False,
        slots=lineup.slots,
        starts=list(starts),
        lens=list(lens),
        token_ids_T=token_ids_T,
        fed_rows=fed_rows,
        fed_slots=fed_slots,
        positions_T=np.arange(len(token_ids)) - np.repeat(lasts_B + 1 - lens_B - starts_B, lens_B),
        rows_N=np.concatenate([ints(rows), lasts_B[of] - back_N]),
        readouts=readouts,
    )


def _lay(works: Works) -> tuple[list[int], list[int], list[Score | HiddenStates | Draw]]:
    """The works' tokens end to end, the rows of them that scores and hidden states are read from, and what is read."""
    token_ids: list[int] = []
    rows: list[int] = []
    readouts: list[Score | HiddenStates | Draw] = []
    for b, (sequence, start, length, draws, decode, drafts) in enumerate(works):
        before = len(token_ids) - start
        count = sequence.request.params.prompt_logprobs
        if count is not None and not decode:
            begin, end = max(start, sequence.prompt_scored), min(start + length, sequence.num_prompt - 1)
            if begin < end:
                readouts.append(Score(b, len(rows), sequence.tokens[begin + 1 : end + 1], count))
                rows += range(before + begin, before + end)
        if pooling := sequence.request.pooling:
            end = start + length
            begin = max(start, sequence.prompt_scored) if pooling == "mean" else end - draws
            if begin < end:
                readouts.append(HiddenStates(b, len(rows), end - begin))
                rows += range(before + begin, before + end)
        token_ids += sequence.tokens[start : start + length]
        token_ids += drafts
    return token_ids, rows, readouts


def _processed(
    of: Seq[int],
    sequences: Seq[Sequence],
    drafts: Seq[tuple[int, ...]],
    processors: Mapping[Sequence, LogitsProcessor],
) -> list[ProcessedRow]:
    """``Draw.processed``."""
    if not processors:
        return []
    found: list[ProcessedRow] = []
    before, i = -1, 0
    for n, b in enumerate(of):
        before, i = b, i + 1 if b == before else 0
        if how := processors.get(sequences[b]):
            seen = drafts[b][i - 1 : i] if i else sequences[b].tokens[how.num_seen :]
            found.append(ProcessedRow(n, how, seen, draft=i > 0))
    return found


def _fed(token_ids: list[int], token_ids_T: Ints, lasts_B: Ints, slots_B: Ints) -> tuple[Ints, Ints]:
    """``Batch.fed_rows`` and ``fed_slots``. ``lasts_B`` are the sequences' last rows."""
    if PENDING not in token_ids:
        return NONE, NONE
    fed_rows = np.flatnonzero(token_ids_T == PENDING)
    return fed_rows, slots_B[np.searchsorted(lasts_B, fed_rows)]


def _adapters(works: Works) -> Ints | None:
    slots = [-1 if s.request.adapter is None else s.request.adapter.slot for s in works.sequences]
    return np.repeat(ints(slots), works.lens) if max(slots, default=-1) >= 0 else None
