"""Decode passes recorded once per batch size and replayed: the host then says one thing, not hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.protocols import CachePoolProtocol, KVCacheView, ModelProtocol, RecorderProtocol


class DecodeGraphs:
    """The model's forward pass over decodes. Where recording costs no more than running, each number of rows is
    recorded when it is first met; elsewhere a few are at the start, and a batch takes the next larger one."""

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
        self._model = model
        self._record = record
        self._replays: dict[int, Callable[[], Tensor] | None] = {}
        if not record.cheap:
            for rows in reversed(self.sizes):  # the largest first: the others find room in what it leaves
                place = pool.allocate([0], reuse=False)
                assert place is not None, "the pool is empty before the first request"
                with torch.inference_mode():
                    self.run(rows, pool.decode_view([place.slot], rows))
                pool.free(place.slot)

    def rows(self, num: int) -> int:
        """The recorded size that ``num`` sequences take."""
        return next(rows for rows in self.sizes if rows >= num)

    def run(self, rows: int, view: KVCacheView) -> Tensor:
        """Hidden states, [rows, D], of what ``token_ids_T``, ``positions_T`` and the pool's latest ``decode_view`` of
        so many rows say. The next run writes over them."""
        if replay := self._replays.get(rows):
            return replay()
        token_ids_T, positions_T = self.token_ids_T[:rows], self.positions_T[:rows]
        if rows in self._replays:
            return self._model.forward(token_ids_T, positions_T, view)
        hidden_TD, self._replays[rows] = self._record(lambda: self._model.forward(token_ids_T, positions_T, view))
        return hidden_TD


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, then every eighth, then every sixteenth: what is computed in vain stays small."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [*(size for size in sizes if size < largest), largest]
