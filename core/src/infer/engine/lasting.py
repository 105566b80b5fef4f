"""What the engine's side gives to a pool whose K and V outlive the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.model import ModelProtocol, Pass


def computing(
    model: ModelProtocol, pool: CachePoolProtocol, device: torch.device, max_seq_len: int, max_chunk: int | None
) -> Callable[[Sequence[int]], int | None]:
    """A function for ``LastingPool.verify``: it computes tokens in a slot, which it returns; None if they are no text
    of this model, or too long."""

    @torch.inference_mode()
    def compute(token_ids: Sequence[int]) -> int | None:
        count = len(token_ids)
        if not 0 < count <= max_seq_len or not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
            return None
        place = pool.allocate(token_ids, reuse=False)
        if place is None:
            return None
        for start in range(0, count, max_chunk or count):
            part = torch.tensor(token_ids[start : start + (max_chunk or count)], device=device)
            at = torch.arange(start, start + len(part), device=device)
            view = pool.batched_chunked_prefill_view([place.slot], [start], [len(part)])
            model.forward(Pass(part, at, view))
        return place.slot

    return compute
