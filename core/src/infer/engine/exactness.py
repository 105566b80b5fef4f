"""The promise, tried at start-up on the loaded model: a row's bits do not depend on its company.

The whole model computes one text in a single pass, and again in chunks, in company and by decodes, recorded ones where
passes are recorded. What it asks of the kernels on the way is then asked of them alone, where many
more sizes cost little: each product of a layer by rows, attention at the edges of segments, and the draw.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.contracts.protocols import (
    CachePoolProtocol,
    Draws,
    KernelsProtocol,
    KVCacheView,
    ModelProtocol,
    Pass,
    Rotary,
)
from infer.device import same_bits
from infer.engine.graphs import DecodeGraphs

log = logging.getLogger(__name__)

SECONDS = 15.0
"""Of computing, after which nothing new is tried. 0.6B on two cores take about one, an interpreter many minutes."""
LENGTH = 80
"""Tokens of the text that the whole model computes."""
CHUNKS = (7, 1, 17)
"""How far sequences get in the next pass, as far as there are so many."""
DECODES = (1, 1, 1, 3, 16)
"""Sequences in each of its decodes: a recorded pass is recorded, recorded again, and compared with its
replay."""
ROWS = (*range(1, 18), 33, 64, 76, 77, 128, 200, 512)
"""Rows that kernels get, of the MOST_ROWS that they had at once."""
HEAD_ROWS = (1, 2, 5, 9, 16)
"""The same of the head, which costs as much as many layers: few rows."""
MORE_HEAD_ROWS = (33, 64, 65, 129, 257)
"""And these where they cost next to nothing: not on a CPU."""
SEQUENCES = (1, 2, 3, 5, 6, 9, 12, 16, 17, 33, 64)
"""Of decodes' attention, and of the draw."""
MOST_ROWS = 600
OPERATIONS = 1 << 31
"""Of one product; a larger weight gets fewer rows than MOST_ROWS."""
ROWWISE = {"linear": 1, "gated_linear": 1, "embedding": 1, "rms_norm": 1, "add_rms_norm": 2, "gated": 1}
"""Kernels, and how many of their arguments have the rows."""
EDGES = (127, 511, 1, 1023, 128, 2, 129, 255, 3, 512, 64, 5, 256, 17)
"""Lengths at which sequences begin to be decoded."""
LAST_CHUNK = 20
"""The longest chunk after that, before decodes."""
POSITIONS = 1080
SHIFT = 97
"""Values by which made-up rows differ in where they begin."""


@torch.inference_mode()
def self_check(
    model: ModelProtocol,
    pool: CachePoolProtocol,
    kernels: KernelsProtocol,
    graphs: DecodeGraphs | None = None,
    *,
    max_batch_size: int,
    max_seq_len: int,
    device: torch.device,
) -> list[str]:
    """What varies, and at which rows, in words for the log; nothing where all is exact. Leaves the pool as it was."""
    noted = Noted()
    trial = model, pool, kernels, graphs, max_batch_size, max_seq_len, device, noted
    began = time.thread_time()
    whole = list(_Whole(*trial).faults())
    attention = _Attention(*trial)
    parts: list[tuple[str, Callable[[], Iterable[str]]]] = [
        *((str(call), partial(_rows, call, kernels, model.vocab_size)) for call in noted.calls.values()),
        ("sample", partial(_sampling, kernels, model.vocab_size, max_batch_size, noted.logits)),
        *((f"attention of layer {a[0]}", partial(attention.faults, *a)) for a in noted.attends.values()),
    ]
    # Of this thread alone: what else the machine does, and how long it stands still, is no reason to try less.
    tried = [list(faults()) for _, faults in parts if time.thread_time() - began < SECONDS]
    if left := [name for name, _ in parts[len(tried) :]]:
        log.warning(
            "the start-up check ends after %.0f s, before it has tried, alone, %s of %s",
            time.thread_time() - began,
            ", ".join(left),
            type(kernels).__name__,
        )
    return list(dict.fromkeys([*itertools.chain(*tried), *whole]))


@dataclass(frozen=True)
class Call:
    """One of a kernel's, as the model makes it."""

    name: str
    rows: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    results: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.name} of {list(self.rows[0].shape[1:])} to {list(self.results[0].shape[1:])}"


@dataclass
class Noted:
    """What a pass asks for: the first call of each shape of a kernel, and the first of each kind of attention."""

    calls: dict[Any, Call] = field(default_factory=dict)
    attends: dict[Any, tuple[int, Tensor, Tensor, Rotary | None]] = field(default_factory=dict)
    """Layer, q, K and the rotary."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """One row's."""

    @contextmanager
    def calls_of(self, kernels: KernelsProtocol) -> Iterator[None]:
        """Meanwhile, the provider's own methods are hidden behind ones that note."""
        own = vars(kernels)
        before = {name: own[name] for name in ROWWISE if name in own}
        own.update({name: self._noting(name, getattr(kernels, name)) for name in ROWWISE})
        try:
            yield
        finally:
            for name in ROWWISE:
                own.pop(name)
            own.update(before)

    def _noting(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = method(*args, **kwargs)
            rows, rest = args[: ROWWISE[name]], (*args[ROWWISE[name] :], *kwargs.values())
            results = _tensors(out)
            shapes = [(x.shape[1:], x.dtype) for x in (*rows, *results)]
            key = name, *shapes, *(x for x in rest if isinstance(x, (bool, int, float, str)))
            self.calls.setdefault(key, Call(name, rows, rest, results))
            return out

        return call


@dataclass
class NotedView:
    """A view that notes what kinds of attention are asked for."""

    view: KVCacheView
    model: ModelProtocol
    noted: Noted

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: Rotary | None = None) -> Tensor:
        kind = self.model.attention[layer], q_THE.shape, k_TKE.shape, rotary is None
        self.noted.attends.setdefault(kind, (layer, q_THE, k_TKE, rotary))
        return self.view.attend(layer, q_THE, k_TKE, v_TKE, rotary)


@dataclass
class _Trial:
    """What the whole model and its attention are tried with."""

    model: ModelProtocol
    pool: CachePoolProtocol
    kernels: KernelsProtocol
    graphs: DecodeGraphs | None
    max_batch_size: int
    max_seq_len: int
    device: torch.device
    noted: Noted

    @contextmanager
    def slots(self, lengths: Iterable[int]) -> Iterator[list[int]]:
        """For sequences of these lengths, as many as there is room for."""
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
        """The positions of each, end to end."""
        parts = [torch.arange(begin, begin + n) for begin, n in zip(begins, lens, strict=True)]
        return torch.cat(parts).to(self.device)


class _Whole(_Trial):
    """All sequences have one text, so that whatever is computed has been computed before."""

    def faults(self) -> Iterator[str]:
        name, length = type(self.model).__name__, min(LENGTH, self.max_seq_len)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, self.model.vocab_size, (length,), generator=generator).to(self.device)
        at = self.spans([0], [length])
        with self.slots([length]) as slots, self.noted.calls_of(self.kernels):
            view = self.pool.batched_chunked_prefill_view(slots, [0], [length])
            whole = self.model.forward(Pass(text, at, NotedView(view, self.model, self.noted)))
        if found := self._logits(whole):
            yield f"{name}.logits varies at {_count(found, 'row')}"
        sizes = sorted(min(n, self.max_batch_size) for n in DECODES)[-(length - 1) :]
        first = length - len(sizes)
        lengths = [min(first, n) + len(sizes) for n in (*CHUNKS, *[0] * sizes[-1])][: sizes[-1]]
        with self.slots(lengths) as slots:
            ends = [0] * len(slots)
            chunk = [min(n, first) for n in CHUNKS[: len(slots)]]
            at = self.spans(ends[: len(chunk)], chunk)
            view = self.pool.batched_chunked_prefill_view(slots[: len(chunk)], ends[: len(chunk)], chunk)
            rows = self.spans([0], [len(at)]).flip(0)
            if not same_bits(self.model.forward(Pass(text[at], at, view, rows)), whole[at[rows]]):
                parts = " and ".join(map(str, chunk))
                yield f"{name}.forward varies in a pass of {_count([len(at)], 'row')}, chunks of {parts}"
            ends[: len(chunk)] = chunk
            for size in (n for n in sizes if n <= len(slots)):
                at = torch.tensor(ends[:size], device=self.device)
                if not same_bits(self._decode(slots[:size], text[at], at)[:size], whole[at]):
                    how = "" if self.graphs is None else ", recorded or replayed"
                    yield f"{name}.forward varies in a decode of {_count([size], 'sequence')}{how}"
                ends[:size] = [end + 1 for end in ends[:size]]

    def _logits(self, hidden: Tensor) -> list[int]:
        """Numbers of rows at which the head varies."""
        sizes = HEAD_ROWS if self.device.type == "cpu" else HEAD_ROWS + MORE_HEAD_ROWS
        hidden = hidden[self.spans([0], [sizes[-1] + 1]) % len(hidden)]
        logits = self.model.logits(hidden)
        self.noted.logits = logits[0].clone()
        return [n for n in sizes if not same_bits(self.model.logits(hidden[:n]), logits[:n])]

    def _decode(self, slots: list[int], tokens: Tensor, at: Tensor) -> Tensor:
        if self.graphs is None:
            return self.model.forward(Pass(tokens, at, self.pool.decode_view(slots)))
        rows = self.graphs.rows(len(slots))
        padding = self.spans([0], [rows]).clamp(max=len(slots) - 1)
        self.graphs.token_ids_T[:rows] = tokens[padding]
        self.graphs.positions_T[:rows] = at[padding]
        view = self.pool.decode_view(slots, rows)
        return self.graphs.run(rows, view, (tokens[padding].tolist(), at[padding].tolist(), slots))


def _rows(call: Call, kernels: KernelsProtocol, vocab_size: int) -> Iterator[str]:
    """A kernel with few rows, against the same rows among many."""
    inner, outer = (math.prod(x.shape[1:]) for x in (call.rows[0], call.results[0]))
    most = max(129, min(MOST_ROWS, OPERATIONS // (2 * inner * outer))) if "linear" in call.name else MOST_ROWS
    inputs = [_like(x, most, vocab_size) for x in call.rows]

    def run(begin: int, end: int) -> tuple[Tensor, ...]:
        return _tensors(getattr(kernels, call.name)(*(x[begin:end] for x in inputs), *call.rest))

    whole = run(0, most)
    found = []
    for n in (n for n in ROWS if n < most):
        begins = (0, most - n) if n <= 2 else (most - n,)
        if not all(same_bits(a, b[i : i + n]) for i in begins for a, b in zip(run(i, i + n), whole, strict=True)):
            found.append(n)
    if found:
        yield f"{type(kernels).__name__}.{call} varies at {_count(found, 'row')}"


class _Attention(_Trial):
    """A layer of each kind over made-up K/V: in one pass, and again in chunks and decodes of many sequences."""

    def faults(self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None) -> Iterator[str]:
        for what, positions in self._layer(layer, q, k, rotary).items():
            name = f"{type(self.kernels).__name__}'s attention of layer {layer}"
            yield f"{name} varies in {what}, at positions {min(positions)} to {max(positions)}"

    def _layer(self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None) -> dict[str, list[int]]:
        """Positions that came out otherwise, by what was done."""
        length = min(POSITIONS, self.max_seq_len, self.pool.free_tokens() // 2)
        sizes = [n for n in sorted({*SEQUENCES, self.max_batch_size}) if n <= min(self.max_batch_size, 256)]
        more = LAST_CHUNK + len(sizes)
        edges = (n if n + more <= length else 1 + n % 5 for n in EDGES)
        lens = [*edges, *(1 + i % 5 for i in range(sizes[-1]))][: sizes[-1]]
        wrong: dict[str, list[int]] = {}
        if length < more + 5:
            return wrong
        q, k, v = (_like(x, length, 0) for x in (q, k, k.flip(0)))
        if rotary is not None and len(rotary.cos) > 1:
            angles = torch.arange(length)[:, None] * torch.logspace(0, -4, rotary.cos.shape[1])
            rotary = rotary._replace(cos=angles.cos().to(rotary.cos), sin=angles.sin().to(rotary.sin))

        def attend(view: KVCacheView, at: Tensor) -> Tensor:
            turn = rotary
            if turn is not None and len(turn.cos) > 1:
                turn = turn._replace(cos=turn.cos[at], sin=turn.sin[at])
            return view.attend(layer, q[at], k[at], v[at], turn)

        with self.slots([length]) as slots:
            whole = attend(self.pool.batched_chunked_prefill_view(slots, [0], [length]), self.spans([0], [length]))
        with self.slots([n + more for n in lens]) as slots:
            ends = [0] * len(slots)
            everyone = list(range(len(slots)))
            chunks = [(group, [lens[i] for i in group]) for group in _groups(lens[: len(slots)], length)]
            chunks.append((everyone, [min(LAST_CHUNK, 1 + i) for i in everyone]))
            for turn, size in enumerate([*[0] * len(chunks), *(n for n in sizes if n <= len(slots))]):
                if size == 0:
                    chosen, chunk = chunks[turn]
                    view = self.pool.batched_chunked_prefill_view(
                        [slots[i] for i in chosen], [ends[i] for i in chosen], chunk
                    )
                else:
                    chosen, chunk = [(3 * turn + i) % len(slots) for i in range(size)], [1] * size
                    picked = [slots[i] for i in chosen]
                    view = self.pool.decode_view(picked, None if self.graphs is None else size)
                at = self.spans([ends[i] for i in chosen], chunk)
                found = attend(view, at)
                if not same_bits(found, whole[at]):
                    what = "chunks" if size == 0 else "a decode"
                    differ = at[(found != whole[at]).flatten(1).any(1)].tolist()
                    wrong.setdefault(f"{what} of {_count([len(chosen)], 'sequence')}", []).extend(differ)
                for i, n in zip(chosen, chunk, strict=True):
                    ends[i] += n
        return wrong


@dataclass(frozen=True)
class Draw:
    """How one token is drawn, of a row of logits."""

    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


KINDS = (Draw(0), Draw(1, top_k=50, top_p=0.9), Draw(2, min_p=0.05))
GREEDY = Draw(3, temperature=0.0)


def _sampling(kernels: KernelsProtocol, vocab_size: int, max_batch_size: int, like: Tensor) -> Iterator[str]:
    """Draws whose random numbers lie beside the edge between two tokens: any other sum draws the other one."""
    noise_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)).to(like)
    logits_KV = torch.stack([noise_V.roll(kind) for kind in range(1 + len(KINDS))])

    def sample(draws: Sequence[Draw]) -> list[int]:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(draw, name) for draw in draws], dtype=dtype, device=like.device)

        logits_NV = logits_KV[[draw.row for draw in draws]]
        tokens: list[int] = kernels.sample(
            logits_NV,
            Draws(
                temperature_N=column("temperature", torch.float32),
                top_k_N=column("top_k", torch.int64),
                top_p_N=column("top_p", torch.float32),
                min_p_N=column("min_p", torch.float32),
                uniform_N=column("uniform", torch.float64),
                greedy=all(draw.temperature == 0 for draw in draws),
                ranked=any(draw.top_k > 0 or draw.top_p < 1 for draw in draws),
            ),
        ).tolist()
        return tokens

    edges = [(0.0, 0.5) for _ in KINDS]
    last = sample([replace(kind, uniform=0.5) for kind in KINDS])
    while any(low < (low + high) / 2 < high for low, high in edges):
        middles = [(low + high) / 2 for low, high in edges]
        tokens = sample([replace(kind, uniform=u) for kind, u in zip(KINDS, middles, strict=True)])
        edges = [
            (u, high) if token < end else (low, u)
            for (low, high), u, token, end in zip(edges, middles, tokens, last, strict=True)
        ]
    draws = [GREEDY, *(replace(kind, uniform=u) for kind, edge in zip(KINDS, edges, strict=True) for u in edge)]
    alone = [(draw, sample([draw])[0]) for draw in draws]
    found = []
    for n in (n for n in SEQUENCES if 1 < n <= max_batch_size):
        chosen = [alone[(n + i) % len(alone)] for i in range(n)]
        if sample([draw for draw, _ in chosen]) != [token for _, token in chosen]:
            found.append(n)
    if found:
        yield f"{type(kernels).__name__}.sample varies at {_count(found, 'row')}"


def _like(x: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Made-up rows of the size of those of ``x``; token ids where these are integers."""
    generator = torch.Generator().manual_seed(x.dim())
    shape = (rows, *x.shape[1:])
    if not x.dtype.is_floating_point:
        return torch.randint(0, vocab_size, shape, generator=generator).to(x)
    # Each row begins a little later in the same noise: to draw all of them would take as long as what they are for.
    width = math.prod(shape[1:])
    noise = torch.randn(width + SHIFT * rows, generator=generator) * float(x.float().std())
    return noise.to(x).unfold(0, width, SHIFT)[:rows].reshape(shape)


def _groups(lens: Sequence[int], most: int) -> list[list[int]]:
    """Neighbours that together are no longer than ``most``, so that no pass takes more memory than one so long."""
    groups: list[list[int]] = [[]]
    for i, n in enumerate(lens):
        if groups[-1] and sum(lens[j] for j in groups[-1]) + n > most:
            groups.append([])
        groups[-1].append(i)
    return groups


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _count(numbers: Sequence[int], thing: str) -> str:
    return f"{', '.join(map(str, numbers))} {thing}{'' if list(numbers) == [1] else 's'}"
