"""Whether the bits of attention depend on the rest of the pass, layer by layer on random K/V."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.cache import CachePoolProtocol, KVCacheView
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import ModelProtocol
from infer.device import same_bits
from infer.engine.confirmation import Steps
from infer.engine.graphs import DecodeGraphs
from infer.engine.trial_rows import EVERY, counted, random_like

log = logging.getLogger(__name__)

SEQUENCES = (*range(1, 65), 96, 128, 200, EVERY)
"""Numbers of sequences that the attention of decodes is tried with."""
EDGES = (127, 511, 1, 1023, 128, 2, 129, 255, 3, 512, 64, 5, 256, 17)
"""Lengths of the sequences' first chunks in the check of attention: around the edges of segments."""
LAST_CHUNK = 20
"""The length of the longest second chunk, after which the sequences decode."""
SHORT = (2, 4)
"""Lengths of further chunks of all sequences; where draft tokens are verified, all lengths that this has."""
FAR = 8
"""How many positions are tried before each power of two beyond EDGES, and at the end of a sequence of full length."""
FILL = 512
"""How many positions of made-up K/V are stored at a time."""


@dataclass
class Trial:
    """A loaded model, its pool, and the limits of a pass."""

    model: ModelProtocol
    pool: CachePoolProtocol
    kernels: KernelsProtocol
    graphs: DecodeGraphs | None
    max_batch_size: int
    max_seq_len: int
    max_chunk: int
    max_drafts: int
    device: torch.device

    @contextmanager
    def slots(self, lengths: Iterable[int]) -> Iterator[list[int]]:
        """Slots for sequences of these lengths, as many of them as the pool has room for. Freed at the end."""
        slots: list[int] = []
        for length in lengths:
            place = self.pool.allocate([0] * length, reuse=False)
            if place is None:
                break
            slots.append(place.slot)
        try:
            yield slots
        finally:
            for slot in slots:
                self.pool.free(slot)

    def spans(self, begins: Sequence[int], lens: Sequence[int]) -> Tensor:
        """The positions [begin, begin + n) of all sequences, end to end."""
        parts = [torch.arange(begin, begin + n) for begin, n in zip(begins, lens, strict=True)]
        return torch.cat(parts).to(self.device)


class AttentionTrial(Trial):
    """Checks one attention layer of each kind on random K/V: in one pass, then in chunks, decodes and short extends of
    many sequences, and at the full length."""

    def faults(self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None) -> Steps:
        name = f"{type(self.kernels).__name__}'s attention of layer {layer}"
        wrong = yield from self._layer(layer, q, k, rotary)
        return [f"{name} varies in {what}, at positions {min(at)} to {max(at)}" for what, at in wrong.items()]

    def _layer(
        self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None
    ) -> Generator[None, None, dict[str, list[int]]]:
        """The positions whose results differ, by the kind of pass in which they do."""
        most = min(self.max_batch_size, EVERY)
        sizes = [n for n in sorted({*SEQUENCES, self.max_batch_size}) if n <= most]
        short = sorted({*SHORT, *range(2, 2 + self.max_drafts)})
        growth = LAST_CHUNK + len(sizes) + sum(short) + 2 * short[-1]
        length = min(max(EDGES) + growth, self.max_seq_len, self.pool.free_tokens() // 2)
        edges = (n if n + growth <= length else 1 + n % 5 for n in EDGES)
        lens = [min(n, length) for n in (*edges, *(1 + i % 5 for i in range(most)))][:most]
        wrong: dict[str, list[int]] = {}
        if length < 1:
            return wrong
        q, k, v = (random_like(x, length) for x in (q, k, k.flip(0)))
        if rotary is not None and len(rotary.cos) > 1:
            angles = torch.arange(length)[:, None] * torch.logspace(0, -4, rotary.cos.shape[1])
            rotary = rotary._replace(cos=angles.cos().to(rotary.cos), sin=angles.sin().to(rotary.sin))

        def attend(view: KVCacheView, at: Tensor) -> Tensor:
            at, rotation = at % length, rotary
            if rotation is not None and len(rotation.cos) > 1:
                rotation = rotation._replace(cos=rotation.cos[at], sin=rotation.sin[at])
            return view.attend(layer, q[at], k[at], v[at], rotation)

        def compare(what: str, out: Tensor, whole: Tensor, at: Tensor) -> None:
            if not same_bits(out, whole):
                wrong.setdefault(what, []).extend(at[(out != whole).flatten(1).any(1)].tolist())

        with self.slots([length]) as slots:
            parts = []
            for begin in range(0, length, self.max_chunk):
                yield
                n = min(self.max_chunk, length - begin)
                view = self.pool.batched_chunked_prefill_view(slots, [begin], [n])
                parts.append(attend(view, self.spans([begin], [n])))
            whole = torch.cat(parts)
        with self.slots([min(n + growth, length) for n in lens]) as slots:
            ends = [0] * len(slots)
            everyone = list(range(len(slots)))
            turns: list[tuple[str, list[int], list[int]]] = []
            for group in _groups_within(lens[: len(slots)], length):
                for begin in range(0, max((lens[i] for i in group), default=0), self.max_chunk):
                    left = [i for i in group if lens[i] > begin]
                    turns.append(("chunks", left, [min(self.max_chunk, lens[i] - begin) for i in left]))
            turns.append(("chunks", everyone, [min(LAST_CHUNK, 1 + i) for i in everyone]))
            for turn, size in enumerate((n for n in sizes if n <= len(slots)), len(turns)):
                turns.append(("a decode", [(3 * turn + i) % len(slots) for i in range(size)], [1] * size))
            turns += [(f"extends by {n}", everyone, [n] * len(slots)) for n in short]
            turns.append(("short extends", everyone, [short[-1] - i % short[-1] for i in everyone]))
            turns.append((f"extends by {short[-1]}", everyone[:1], short[-1:]))
            for what, chosen, chunk in turns:
                fits = [(i, n) for i, n in zip(chosen, chunk, strict=True) if ends[i] + n <= length]
                if not fits:
                    continue
                yield
                chosen, chunk = map(list, zip(*fits, strict=True))
                picked, begins = [slots[i] for i in chosen], [ends[i] for i in chosen]
                view = self._view(picked, begins, chunk, decode=what == "a decode")
                at = self.spans(begins, chunk)
                compare(f"{what} of {counted([len(chosen)], 'sequence')}", attend(view, at), whole[at], at)
                for i, n in zip(chosen, chunk, strict=True):
                    ends[i] += n
        yield from self._far(layer, q, k, v, length, attend, compare)
        return wrong

    def _view(self, slots: list[int], begins: list[int], lens: list[int], *, decode: bool) -> KVCacheView:
        if decode:
            return self.pool.decode_view(slots, None if self.graphs is None else len(slots))
        return self.pool.batched_chunked_prefill_view(slots, begins, lens)

    def _far(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beyond: int,
        attend: Callable[[KVCacheView, Tensor], Tensor],
        compare: Callable[[str, Tensor, Tensor, Tensor], None],
    ) -> Iterator[None]:
        """Compare the last positions before each power of two ``beyond`` what the other passes reach, and before the
        full length: in one chunk, then by decodes and short extends, alone and in company."""
        full = min(self.max_seq_len, self.pool.free_tokens())
        ends = sorted({full, *(1 << n for n in range(beyond.bit_length(), full.bit_length()))})
        ends = [end for end in ends if beyond < end <= full]
        if not ends:
            return
        wholes: list[Tensor] = []
        with self.slots([full]) as slots:
            for begin in self._filled(layer, q, k, v, slots, ends):
                if begin is None:
                    yield
                    continue
                view = self.pool.batched_chunked_prefill_view(slots, [begin], [FAR])
                wholes.append(attend(view, self.spans([begin], [FAR])))
        room = min(self.max_batch_size - 1, EVERY - 1)
        with self.slots([full, *[4 * len(ends)] * room]) as slots:
            company = slots[1:]
            turn = -1
            for begin in self._filled(layer, q, k, v, slots[:1], ends):
                yield
                if begin is None:
                    continue
                at, turn = begin, turn + 1
                for number, others in ((FAR - 4, company[:1]), (2, []), (1, company), (1, [])):
                    decode = number == 1
                    what = "a decode" if decode else f"extends by {number}"
                    begins, lens = [at, *map(self.pool.length, others)], [number, *[1] * len(others)]
                    picked, positions = [slots[0], *others], self.spans(begins, lens)
                    view = self._view(picked, begins, lens, decode=decode)
                    what = f"{what} of {counted([len(picked)], 'sequence')}"
                    expected = wholes[turn][at - begin : at - begin + number]
                    compare(what, attend(view, positions)[:number], expected, positions[:number])
                    at += number

    def _filled(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: list[int], ends: Sequence[int]
    ) -> Iterator[int | None]:
        """Store K/V up to FAR positions before each of ``ends`` in turn; yields where that is, and None in between.
        What these positions' queries see is not computed: it would take time that grows with the square of the length.
        Views that do not ask the provider for it are left out."""
        at, asked = 0, False

        def attention(q_THE: Tensor, *_: Any) -> Tensor:
            nonlocal asked
            asked = True
            return q_THE

        for end in ends:
            while at < end - FAR:
                n = min(FILL, self.max_chunk, len(k), end - FAR - at)
                view = self.pool.batched_chunked_prefill_view(slots, [at], [n])
                with replaced(self.kernels, extend_attention=attention):
                    view.attend(layer, q[:n], k[:n], v[:n])
                at += n
                yield None
                if not asked:
                    log.warning(
                        "the start-up check tries no attention at positions above %d: views of %s do not ask %s for it",
                        len(q),
                        type(self.pool).__name__,
                        type(self.kernels).__name__,
                    )
                    return
            yield at
            at = end


def _groups_within(lens: Sequence[int], most: int) -> list[list[int]]:
    """Split sequences, by index, into groups of neighbors with at most ``most`` tokens, so that no pass takes more
    memory than one of that length."""
    groups: list[list[int]] = [[]]
    for i, n in enumerate(lens):
        if groups[-1] and sum(lens[j] for j in groups[-1]) + n > most:
            groups.append([])
        groups[-1].append(i)
    return groups


@contextmanager
def replaced(kernels: KernelsProtocol, **methods: Any) -> Iterator[None]:
    """Until the context ends, the provider has these methods."""
    own = vars(kernels)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name)
        own.update(before)
