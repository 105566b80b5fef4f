"""A pass as tensors: tokens laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.engine.sequence import Sequence, Work


@dataclass(frozen=True, slots=True)
class Batch:
    """The ragged step. T tokens, B sequences."""

    work: Seq[Work]
    slots: list[int]
    starts: list[int]
    lens: list[int]
    token_ids_T: Tensor
    positions_T: Tensor
    sampled: list[Sequence]
    """The sequences that get a token."""
    sample_rows: list[int]
    """The rows of T whose logits give it."""
    scored: list[tuple[Sequence, int, int]]
    """Prompt logprobs: (sequence, row, n): rows row .. row+n-1 predict the prompt's tokens from ``prompt_scored``+1."""

    @property
    def decode_only(self) -> bool:
        return all(work.sequence.decoding for work in self.work)


def pack(works: Seq[Work]) -> Batch:
    """Lay the works' tokens end to end and note which rows need logits."""
    token_ids: list[int] = []
    sampled, sample_rows, scored = [], [], []
    starts = [work.start for work in works]
    lens = [work.length for work in works]
    for work in works:
        sequence, row = work.sequence, len(token_ids)
        token_ids += sequence.tokens[work.start : work.end]
        if work.samples:
            sampled.append(sequence)
            sample_rows.append(row + work.length - 1)
        if sequence.request.params.prompt_logprobs is not None:
            begin, end = max(work.start, sequence.prompt_scored), min(work.end, sequence.num_prompt - 1)
            if begin < end:
                scored.append((sequence, row + begin - work.start, end - begin))
    lens_B = np.asarray(lens)
    ends_B = np.cumsum(lens_B)
    positions = np.arange(len(token_ids)) - np.repeat(ends_B - lens_B - np.asarray(starts), lens_B)
    return Batch(
        work=works,
        slots=[slot for work in works if (slot := work.sequence.slot) is not None],
        starts=starts,
        lens=lens,
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.from_numpy(positions),
        sampled=sampled,
        sample_rows=sample_rows,
        scored=scored,
    )
