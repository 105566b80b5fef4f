"""What every pool over blocks refuses to write."""

from __future__ import annotations

import re

import pytest
import torch
from tests.support import slotted_pool, tiny_model


@pytest.mark.parametrize(
    ("slots", "starts", "lens", "says"),
    [
        ([0, 0], [4, 4], [1, 1], "slots [0, 0] repeat"),
        ([0], [3], [1], "slot 0 holds 4 positions; a chunk cannot start at 3"),
        ([0], [5], [1], "slot 0 holds 4 positions; a chunk cannot start at 5"),
        ([1], [0], [1], "slot 1 is not allocated"),
        ([1], [-1], [1], "slot 1 is not allocated"),
        ([0], [4], [0], "not for 4+0"),
        ([0], [4], [317], "slot 0 has room for 320 positions, not for 4+317"),
    ],
)
def test_what_would_be_written_elsewhere_is_refused(
    slots: list[int], starts: list[int], lens: list[int], says: str
) -> None:
    """And nothing is booked: the slot goes on where it was, to its last position."""
    pool = slotted_pool(tiny_model("llama"), torch.float32, 2)
    place = pool.allocate([1])
    assert place is not None
    assert place.slot == 0
    pool.batched_chunked_prefill_view([0], [0], [4])
    with pytest.raises(ValueError, match=re.escape(says)):
        pool.batched_chunked_prefill_view(slots, starts, lens)
    pool.batched_chunked_prefill_view([0], [4], [316])
    assert pool.length(0) == 320
