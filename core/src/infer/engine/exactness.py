"""The promise, tried at start-up on the loaded model: a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.protocols import CachePoolProtocol, ModelProtocol

CHUNKS = (7, 17, 1)


@torch.inference_mode()
def self_check(
    model: ModelProtocol,
    pool: CachePoolProtocol,
    *,
    max_batch_size: int,
    max_seq_len: int,
    device: torch.device,
) -> bool:
    """Prefill and decode one sequence alone and whole, then chunked and in company; compare the logits bit for bit."""
    generator = torch.Generator().manual_seed(0)
    length = min(64, max_seq_len - 2)
    texts = torch.randint(0, model.vocab_size, (min(4, max_batch_size), length + 2), generator=generator).tolist()

    def extend(slots: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Logits at each sequence's last row, [B, V]."""
        view = pool.batched_chunked_prefill_view(slots, begins, [e - b for b, e in zip(begins, ends, strict=True)])
        spans = [(texts[i], b, e) for i, (b, e) in enumerate(zip(begins, ends, strict=True))]
        tokens_T = torch.tensor([token for text, b, e in spans for token in text[b:e]], device=device)
        positions_T = torch.tensor([p for _, b, e in spans for p in range(b, e)], device=device)
        last_B = torch.tensor([e - b for _, b, e in spans]).cumsum(0) - 1
        return model.logits(model.forward(tokens_T, positions_T, view)[last_B.to(device)])

    def run(ends: Sequence[int], company: int) -> list[Tensor]:
        """The first sequence's logits where its chunks end at ``ends``, the others' as long or a little shorter."""
        places = [pool.allocate(text, reuse=False) for text in texts[:company]]
        slots = [place.slot for place in places if place is not None]
        logits, begins = [], [0] * len(slots)
        for end in ends:
            stops = [max(begins[i] + 1, end - i) for i in range(len(slots))]
            logits.append(extend(slots, begins, stops)[0])
            begins = stops
        for slot in slots:
            pool.free(slot)
        return logits[-3:]

    decodes = [length, length + 1, length + 2]
    whole = run(decodes, 1)
    bounds = [end for end in (sum(CHUNKS[: i + 1]) for i in range(len(CHUNKS))) if end < length]
    chunked = run(bounds + decodes, len(texts))
    return all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
