"""A pass as arrays: tokens laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from infer.engine.sequence import PENDING, Sequence, Work

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The ragged step. T tokens, B sequences."""

    decode_only: bool
    slots: list[int]
    starts: list[int]
    lens: list[int]
    token_ids_T: Ints
    """PENDING where the device knows better: ``fed_rows``, whose tokens were last drawn for ``fed_slots``."""
    fed_rows: Ints
    fed_slots: Ints
    positions_T: Ints
    sampled: list[Sequence]
    """The sequences that get a token."""
    rows_N: Ints
    """The rows of T whose hidden states are wanted."""
    sample_rows: Ints
    """Which of these give it."""
    sample_slots: Ints
    scored: list[tuple[Sequence, int, int]]
    """Prompt logprobs: (sequence, i, n): of the wanted rows, i .. i+n-1 predict the tokens from ``prompt_scored``+1."""

    def pad(self, rows: int) -> Batch:
        """A batch of decodes with its last row repeated, to ``rows`` in all: that writes the same once more to the same
        place, and nobody reads the result."""
        if rows == len(self.token_ids_T):
            return self
        more = (0, rows - len(self.token_ids_T))
        token_ids_T = np.pad(self.token_ids_T, more, mode="edge")
        fed_rows = np.flatnonzero(token_ids_T == PENDING)
        return replace(
            self,
            token_ids_T=token_ids_T,
            fed_rows=fed_rows,
            fed_slots=np.pad(np.asarray(self.slots), more, mode="edge")[fed_rows],
            positions_T=np.pad(self.positions_T, more, mode="edge"),
        )


def pack(works: Seq[Work]) -> Batch:
    """Lay the works' tokens end to end and note which rows need logits."""
    token_ids: list[int] = []
    wanted: list[int] = []
    sampled, sample_rows, sample_slots, scored = [], [], [], []
    slots: list[int] = []
    decode_only = True
    for sequence, start, length, samples, decode in works:
        row, slot = len(token_ids), sequence.slot
        assert slot is not None, f"{sequence.id} does not run"
        slots.append(slot)
        if decode:
            token_ids.append(sequence.tokens[start])
        else:
            decode_only = False
            token_ids += sequence.tokens[start : start + length]
            if sequence.request.params.prompt_logprobs is not None:
                begin, end = max(start, sequence.prompt_scored), min(start + length, sequence.num_prompt - 1)
                if begin < end:
                    scored.append((sequence, len(wanted), end - begin))
                    wanted += range(row + begin - start, row + end - start)
        if samples:
            sampled.append(sequence)
            sample_rows.append(len(wanted))
            sample_slots.append(slot)
            wanted.append(row + length - 1)
    starts = [work.start for work in works]
    lens = [work.length for work in works]
    lens_B = np.asarray(lens)
    ends_B = np.cumsum(lens_B)
    token_ids_T = np.array(token_ids)
    fed_rows = np.flatnonzero(token_ids_T == PENDING)
    return Batch(
        decode_only=decode_only,
        slots=slots,
        starts=starts,
        lens=lens,
        token_ids_T=token_ids_T,
        fed_rows=fed_rows,
        fed_slots=np.asarray(slots)[np.searchsorted(ends_B, fed_rows, side="right")],
        positions_T=np.arange(len(token_ids)) - np.repeat(ends_B - lens_B - np.asarray(starts), lens_B),
        sampled=sampled,
        rows_N=np.array(wanted, dtype=np.int64),
        sample_rows=np.array(sample_rows, dtype=np.int64),
        sample_slots=np.array(sample_slots, dtype=np.int64),
        scored=scored,
    )
