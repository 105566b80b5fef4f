"""Decode passes recorded once per batch size and replayed: the host then says one thing to the device, not hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.protocols import CachePoolProtocol, ModelProtocol

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Runs a function once and returns one that does the same again to the same tensors."""


class DecodeGraphs:
    """The model's forward pass over decodes, for a few numbers of rows; a batch takes the next larger one."""

    def __init__(
        self, model: ModelProtocol, pool: CachePoolProtocol, device: torch.device, max_batch_size: int, record: Record
    ) -> None:
        self.sizes = batch_sizes(max_batch_size)
        self.token_ids_T = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        for rows in reversed(self.sizes):  # the largest first: the others find room in what it leaves
            self._replays[rows] = self._record(model, pool, rows, record)

    def _record(self, model: ModelProtocol, pool: CachePoolProtocol, rows: int, record: Record) -> Callable[[], Tensor]:
        place = pool.allocate([0], reuse=False)
        assert place is not None, "the pool is empty before the first request"
        view = pool.decode_view([place.slot], rows)
        with torch.inference_mode():
            replay = record(lambda: model.forward(self.token_ids_T[:rows], self.positions_T[:rows], view))
        pool.free(place.slot)
        return replay

    def rows(self, num: int) -> int:
        """The recorded size that ``num`` sequences take."""
        return next(rows for rows in self.sizes if rows >= num)

    def replay(self, rows: int) -> Tensor:
        """Hidden states, [rows, D], of what ``token_ids_T``, ``positions_T`` and the pool's latest ``decode_view`` of
        so many rows say. The next replay writes over them."""
        return self._replays[rows]()


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, then every eighth, then every sixteenth: what is computed in vain stays small."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [*(size for size in sizes if size < largest), largest]


def cuda_recorder() -> Record:
    """CUDA graphs that share one pool of memory, since they never run at a time."""
    memory = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()  # whatever is compiled or allocated the first time may not be part of a graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
