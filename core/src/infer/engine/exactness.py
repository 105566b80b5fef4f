"""The promise, tried at start-up on the loaded model: a row's bits do not depend on its company.

The whole model computes one text in a single pass, and again in chunks, in company and by decodes, recorded ones where
passes are recorded. What it asks of the kernels on the way is then asked of them alone, where many
more sizes cost little: each product of a layer by rows, attention at the edges of segments, and the draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from infer.device import same_bits
from infer.engine.graphs import DecodeGraphs
from infer.protocols import CachePoolProtocol, Draws, KernelsProtocol, KVCacheView, ModelProtocol, Rotary

LENGTH = 80
"""Tokens of the text that the whole model computes."""
CHUNKS = (7, 17, 1)
"""Its first chunks; the last one is the rest."""
DECODES = (1, 1, 1, 1, 3, 16)
"""Sequences in each of its decodes: a recorded pass is recorded, recorded again, compared and replayed."""
ROWS = (*range(1, 18), 33, 64, 76, 77, 128, 200, 512)
"""Rows that kernels get, of the MOST_ROWS that they had at once."""
HEAD_ROWS = (1, 2, 5, 9, 16, 33)
"""The same of the head, which costs as much as many layers."""
SEQUENCES = (1, 2, 3, 5, 6, 9, 12, 16, 17, 33, 64)
"""Of decodes' attention, and of the draw."""
MOST_ROWS = 1025
OPERATIONS = 1 << 34
"""Of one product; a larger weight gets fewer rows than MOST_ROWS."""
ROWWISE = {"linear": 1, "gated_linear": 1, "embedding": 1, "rms_norm": 1, "add_rms_norm": 2, "gated": 1}
"""Kernels, and how many of their arguments have the rows."""
EDGES = (127, 511, 1, 1023, 128, 2, 129, 255, 3, 512, 64, 5, 256, 17)
"""Lengths at which sequences begin to be decoded."""
LAST_CHUNK = 20
"""The longest chunk after that, before decodes."""
POSITIONS = 1080


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
    whole = list(_Whole(model, pool, kernels, graphs, max_batch_size, max_seq_len, device, noted).faults())
    faults = [
        *(fault for call in noted.calls.values() for fault in _rows(call, kernels, model.vocab_size)),
        *_Attention(model, pool, kernels, graphs, max_batch_size, max_seq_len, device, noted).faults(),
        *_sampling(kernels, model.vocab_size, max_batch_size, noted.logits),
        *whole,
    ]
    return list(dict.fromkeys(faults))


@dataclass(frozen=True)
class Call:
    """One of a kernel's, as the model makes it."""

    name: str
    rows: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    results: tuple[Tensor, ...]


@dataclass
class Noted:
    """What a pass asks for: the first call of each shape of a kernel, and the first of each kind of attention."""

    calls: dict[Any, Call] = field(default_factory=dict)
    attends: dict[Any, tuple[int, Tensor, Tensor, Rotary | None]] = field(default_factory=dict)
    """Layer, q, K and the rotary."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the whole text."""

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
            whole = self.model.forward(text, at, NotedView(view, self.model, self.noted))
        self.noted.logits = logits = self.model.logits(whole)
        found = [n for n in HEAD_ROWS if n < length and not same_bits(self.model.logits(whole[:n]), logits[:n])]
        if found:
            yield f"{name}.logits varies at {_count(found, 'row')}"
        sizes = sorted(min(n, self.max_batch_size) for n in DECODES)[-(length - 1) :]
        with self.slots([length] * sizes[-1]) as slots:
            ends = [0] * len(slots)
            bounds = [*itertools.accumulate(CHUNKS), length - len(sizes)]
            for k, bound in enumerate(bounds):
                wanted = [min(bound, bounds[-1]) - ends[0], 1 + k, 2 + k][: len(slots)]
                chunk = list(itertools.takewhile(lambda n: n > 0, wanted))
                if not chunk or any(end + n > bounds[-1] for end, n in zip(ends, chunk, strict=False)):
                    continue
                at = self.spans(ends[: len(chunk)], chunk)
                view = self.pool.batched_chunked_prefill_view(slots[: len(chunk)], ends[: len(chunk)], chunk)
                rows = None if k % 2 else self.spans([0], [len(at)]).flip(0)
                hidden = self.model.forward(text[at], at, view, rows)
                if not same_bits(hidden, whole[at if rows is None else at[rows]]):
                    parts = " and ".join(map(str, chunk))
                    yield f"{name}.forward varies in a pass of {_count([len(at)], 'row')}, chunks of {parts}"
                ends[: len(chunk)] = [end + n for end, n in zip(ends, chunk, strict=False)]
            for size in (n for n in sizes if n <= len(slots)):
                at = torch.tensor(ends[:size], device=self.device)
                if not same_bits(self._decode(slots[:size], text[at], at)[:size], whole[at]):
                    how = "" if self.graphs is None else ", recorded or replayed"
                    yield f"{name}.forward varies in a decode of {_count([size], 'sequence')}{how}"
                ends[:size] = [end + 1 for end in ends[:size]]

    def _decode(self, slots: list[int], tokens: Tensor, at: Tensor) -> Tensor:
        if self.graphs is None:
            return self.model.forward(tokens, at, self.pool.decode_view(slots))
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
        shape = f"{list(call.rows[0].shape[1:])} to {list(call.results[0].shape[1:])}"
        yield f"{type(kernels).__name__}.{call.name} of {shape} varies at {_count(found, 'row')}"


class _Attention(_Trial):
    """A layer of each kind over made-up K/V: in one pass, and again in chunks and decodes of many sequences."""

    def faults(self) -> Iterator[str]:
        for layer, q, k, rotary in self.noted.attends.values():
            for what, positions in self._layer(layer, q, k, rotary).items():
                name = f"{type(self.kernels).__name__}'s attention of layer {layer}"
                yield f"{name} varies in {what}, at positions {min(positions)} to {max(positions)}"

    def _layer(self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None) -> dict[str, list[int]]:
        """Positions that came out otherwise, by what was done."""
        length = min(POSITIONS, self.max_seq_len, self.pool.free_tokens() // 2)
        sizes = [n for n in sorted({*SEQUENCES, self.max_batch_size}) if n <= min(self.max_batch_size, 256)]
        more = LAST_CHUNK + len(sizes)
        lens = [n if n + more <= length else 1 + n % 5 for n in itertools.islice(itertools.cycle(EDGES), sizes[-1])]
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
            for turn, size in enumerate([0, 0, *(n for n in sizes if n <= len(slots))]):
                if size == 0:
                    chosen = list(range(len(slots)))
                    chunk = [min(LAST_CHUNK, 1 + i) if turn else lens[i] for i in chosen]
                    view = self.pool.batched_chunked_prefill_view(slots, ends, chunk)
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


KINDS = (Draw(0), Draw(1, top_k=50, top_p=0.9), Draw(2, min_p=0.05), Draw(3, temperature=0.0))


def _sampling(kernels: KernelsProtocol, vocab_size: int, max_batch_size: int, like: Tensor) -> Iterator[str]:
    """Draws whose random numbers lie beside the edge between two tokens: any other sum draws the other one."""
    noise_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)).to(like)
    logits_KV = torch.stack([noise_V.roll(kind) for kind in range(len(KINDS))])

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

    alone: list[tuple[Draw, int]] = []
    for kind in KINDS:
        low, high = 0.0, 0.5
        token = sample([replace(kind, uniform=high)])[0]
        while low < (middle := (low + high) / 2) < high:
            if sample([replace(kind, uniform=middle)])[0] < token:
                low = middle
            else:
                high = middle
        alone += [(draw, sample([draw])[0]) for u in (low, high) for draw in [replace(kind, uniform=u)]]
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
    return (torch.randn(shape, generator=generator) * float(x.float().std())).to(x)


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _count(numbers: Sequence[int], thing: str) -> str:
    return f"{', '.join(map(str, numbers))} {thing}{'' if list(numbers) == [1] else 's'}"
