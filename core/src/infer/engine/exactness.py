"""The start-up check of exactness: on the loaded model, a row's bits do not depend on what else is in its pass.

The whole model computes one text in a single pass, then again in chunks, together with other sequences, and by decodes,
which are recorded if decode passes are recorded. Then the kernels that the model has called are tried alone, because
there many more sizes cost little: each product with different numbers of rows, attention at the edges of segments, and
sampling.
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
"""CPU time after which the check starts nothing new. It takes about one second for 0.6B on two cores, and many minutes
in Triton's interpreter."""
LENGTH = 80
"""Tokens in the text that the whole model computes."""
CHUNKS = (7, 1, 17)
"""Chunk lengths of the first sequences in the second pass."""
DECODES = (1, 1, 1, 3, 16)
"""How many sequences each decode of the whole model has. The first three are of one sequence, because a pass is
recorded, then recorded again, and then compared with its replay."""
ROWS = (*range(1, 18), 33, 64, 76, 77, 128, 200, 512)
"""Numbers of rows that kernels are tried with, and compared with the same rows among MOST_ROWS."""
HEAD_ROWS = (1, 2, 5, 9, 16)
"""Numbers of rows that the output head is tried with: few, since it costs as much as many layers."""
MORE_HEAD_ROWS = (33, 64, 65, 129, 257)
"""Further numbers of rows for the head, except on a CPU, where they would take too long."""
SEQUENCES = (1, 2, 3, 5, 6, 9, 12, 16, 17, 33, 64)
"""Numbers of sequences that the attention of decodes, and sampling, are tried with."""
MOST_ROWS = 600
OPERATIONS = 1 << 31
"""A bound on the operations of one product: with a large weight, fewer rows than MOST_ROWS are tried."""
ROWWISE = {
    "linear": 1,
    "gated_linear": 1,
    "route": 1,
    "gated_experts": 3,
    "embedding": 1,
    "rms_norm": 1,
    "add_rms_norm": 2,
    "gated": 1,
}
"""The kernels that work row by row, and how many of their first arguments are tensors of rows."""
PRODUCTS = ("linear", "gated_linear", "gated_experts")
"""Those of them that multiply by a weight."""
EDGES = (127, 511, 1, 1023, 128, 2, 129, 255, 3, 512, 64, 5, 256, 17)
"""Lengths of the sequences' first chunks in the check of attention: around the edges of segments."""
LAST_CHUNK = 20
"""The length of the longest second chunk, after which the sequences decode."""
POSITIONS = 1080
"""The longest sequence in the check of attention."""
SHIFT = 97
"""How many values later in the same noise each random row begins."""


@torch.inference_mode()
def self_check(
    model: ModelProtocol,
    pool: CachePoolProtocol,
    kernels: KernelsProtocol,
    graphs: DecodeGraphs | None = None,
    *,
    max_batch_size: int,
    max_seq_len: int,
    max_chunk: int | None = None,
    device: torch.device,
) -> list[str]:
    """Check that a row's bits do not depend on the rest of its pass. Returns one phrase for the log per kernel, or part
    of the model, that varies: what varies, and with how many rows; an empty list if all is exact. Frees all slots that
    it allocates. No pass extends a sequence by more than ``max_chunk`` positions, if there is such a limit; it is at
    least LENGTH."""
    observed = Observed()
    trial = model, pool, kernels, graphs, max_batch_size, max_seq_len, max_chunk or max_seq_len, device, observed
    began = time.thread_time()
    whole = list(_Whole(*trial).faults())
    attention = _Attention(*trial)
    parts: list[tuple[str, Callable[[], Iterable[str]]]] = [
        *((str(call), partial(_rows, call, kernels)) for call in observed.calls.values()),
        ("sample", partial(_sampling, kernels, model.vocab_size, max_batch_size, observed.logits)),
        *((f"attention of layer {a[0]}", partial(attention.faults, *a)) for a in observed.attends.values()),
    ]
    # This thread's CPU time counts, so that a busy machine does not make the check try less.
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
    """A call of a row-wise kernel, as the model makes it."""

    name: str
    rows: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    results: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.name} of {list(self.rows[0].shape[1:])} to {list(self.results[0].shape[1:])}"


@dataclass
class Observed:
    """The kernels' calls in a pass of the model: the first of each kernel and shape, and the first of each kind of
    attention."""

    calls: dict[Any, Call] = field(default_factory=dict)
    attends: dict[Any, tuple[int, Tensor, Tensor, Rotary | None]] = field(default_factory=dict)
    """Per kind of attention (layer, q, K, rotary)."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """One row of logits, [V]."""

    @contextmanager
    def observe_calls(self, kernels: KernelsProtocol) -> Iterator[None]:
        """Until the context ends, the provider's row-wise methods are wrapped to record their calls."""
        own = vars(kernels)
        before = {name: own[name] for name in ROWWISE if name in own}
        own.update({name: self._observing(name, getattr(kernels, name)) for name in ROWWISE})
        try:
            yield
        finally:
            for name in ROWWISE:
                own.pop(name)
            own.update(before)

    def _observing(self, name: str, method: Any) -> Any:
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
class ObservingView:
    """A view that records which kinds of attention the model uses."""

    view: KVCacheView
    model: ModelProtocol
    observed: Observed

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: Rotary | None = None) -> Tensor:
        spec = self.model.attention[layer]
        kind = spec, spec.sinks_H is None, q_THE.shape, k_TKE.shape, rotary is None
        self.observed.attends.setdefault(kind, (layer, q_THE, k_TKE, rotary))
        return self.view.attend(layer, q_THE, k_TKE, v_TKE, rotary)


@dataclass
class _Trial:
    """What the checks of the whole model and of its attention need."""

    model: ModelProtocol
    pool: CachePoolProtocol
    kernels: KernelsProtocol
    graphs: DecodeGraphs | None
    max_batch_size: int
    max_seq_len: int
    max_chunk: int
    device: torch.device
    observed: Observed

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


class _Whole(_Trial):
    """Checks the whole model. All sequences have the same text, so that one pass gives what every other must equal."""

    def faults(self) -> Iterator[str]:
        name, length = type(self.model).__name__, min(LENGTH, self.max_seq_len)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, self.model.vocab_size, (length,), generator=generator).to(self.device)
        at = self.spans([0], [length])
        with self.slots([length]) as slots, self.observed.observe_calls(self.kernels):
            view = self.pool.batched_chunked_prefill_view(slots, [0], [length])
            whole = self.model.forward(Pass(text, at, ObservingView(view, self.model, self.observed)))
        if varying := self._logits(whole):
            yield f"{name}.logits varies at {_count(varying, 'row')}"
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
                    suffix = "" if self.graphs is None else ", recorded or replayed"
                    yield f"{name}.forward varies in a decode of {_count([size], 'sequence')}{suffix}"
                ends[:size] = [end + 1 for end in ends[:size]]

    def _logits(self, hidden: Tensor) -> list[int]:
        """The numbers of rows with which the output head varies."""
        sizes = HEAD_ROWS if self.device.type == "cpu" else HEAD_ROWS + MORE_HEAD_ROWS
        hidden = hidden[self.spans([0], [sizes[-1] + 1]) % len(hidden)]
        logits = self.model.logits(hidden)
        self.observed.logits = logits[0].clone()
        return [n for n in sizes if not same_bits(self.model.logits(hidden[:n]), logits[:n])]

    def _decode(self, slots: list[int], tokens: Tensor, at: Tensor) -> Tensor:
        if self.graphs is None:
            return self.model.forward(Pass(tokens, at, self.pool.decode_view(slots)))
        rows = self.graphs.rows(len(slots))
        padding = self.spans([0], [rows]).clamp(max=len(slots) - 1)
        self.graphs.token_ids.tensor[:rows] = tokens[padding]
        self.graphs.positions.tensor[:rows] = at[padding]
        view = self.pool.decode_view(slots, rows)
        return self.graphs.run(rows, view, (tokens[padding].tolist(), at[padding].tolist(), slots))


def _rows(call: Call, kernels: KernelsProtocol) -> Iterator[str]:
    """Compare a kernel's results for some rows with those of the same rows among many."""
    inner, outer = (math.prod(x.shape[1:]) for x in (call.rows[0], call.results[0]))
    most = max(129, min(MOST_ROWS, OPERATIONS // (2 * inner * outer))) if call.name in PRODUCTS else MOST_ROWS
    inputs = [_random_like(x, most) for x in call.rows]

    def run(begin: int, end: int) -> tuple[Tensor, ...]:
        return _tensors(getattr(kernels, call.name)(*(x[begin:end] for x in inputs), *call.rest))

    whole = run(0, most)
    varying = []
    for n in (n for n in ROWS if n < most):
        begins = (0, most - n) if n <= 2 else (most - n,)
        if not all(same_bits(a, b[i : i + n]) for i in begins for a, b in zip(run(i, i + n), whole, strict=True)):
            varying.append(n)
    if varying:
        yield f"{type(kernels).__name__}.{call} varies at {_count(varying, 'row')}"


class _Attention(_Trial):
    """Checks one attention layer of each kind on random K/V: in one pass, then in chunks and decodes of many
    sequences."""

    def faults(self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None) -> Iterator[str]:
        for what, positions in self._layer(layer, q, k, rotary).items():
            name = f"{type(self.kernels).__name__}'s attention of layer {layer}"
            yield f"{name} varies in {what}, at positions {min(positions)} to {max(positions)}"

    def _layer(self, layer: int, q: Tensor, k: Tensor, rotary: Rotary | None) -> dict[str, list[int]]:
        """The positions whose results differ, by the kind of pass in which they do."""
        length = min(POSITIONS, self.max_seq_len, self.pool.free_tokens() // 2)
        sizes = [n for n in sorted({*SEQUENCES, self.max_batch_size}) if n <= min(self.max_batch_size, 256)]
        growth = LAST_CHUNK + len(sizes)
        edges = (n if n + growth <= length else 1 + n % 5 for n in EDGES)
        lens = [*edges, *(1 + i % 5 for i in range(sizes[-1]))][: sizes[-1]]
        wrong: dict[str, list[int]] = {}
        if length < growth + 5:
            return wrong
        q, k, v = (_random_like(x, length) for x in (q, k, k.flip(0)))
        if rotary is not None and len(rotary.cos) > 1:
            angles = torch.arange(length)[:, None] * torch.logspace(0, -4, rotary.cos.shape[1])
            rotary = rotary._replace(cos=angles.cos().to(rotary.cos), sin=angles.sin().to(rotary.sin))

        def attend(view: KVCacheView, at: Tensor) -> Tensor:
            rotation = rotary
            if rotation is not None and len(rotation.cos) > 1:
                rotation = rotation._replace(cos=rotation.cos[at], sin=rotation.sin[at])
            return view.attend(layer, q[at], k[at], v[at], rotation)

        with self.slots([length]) as slots:
            parts = []
            for begin in range(0, length, self.max_chunk):
                n = min(self.max_chunk, length - begin)
                view = self.pool.batched_chunked_prefill_view(slots, [begin], [n])
                parts.append(attend(view, self.spans([begin], [n])))
            whole = torch.cat(parts)
        with self.slots([n + growth for n in lens]) as slots:
            ends = [0] * len(slots)
            everyone = list(range(len(slots)))
            chunks = []
            for group in _groups_within(lens[: len(slots)], length):
                for begin in range(0, max((lens[i] for i in group), default=0), self.max_chunk):
                    left = [i for i in group if lens[i] > begin]
                    chunks.append((left, [min(self.max_chunk, lens[i] - begin) for i in left]))
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
                out = attend(view, at)
                if not same_bits(out, whole[at]):
                    what = "chunks" if size == 0 else "a decode"
                    differ = at[(out != whole[at]).flatten(1).any(1)].tolist()
                    wrong.setdefault(f"{what} of {_count([len(chosen)], 'sequence')}", []).extend(differ)
                for i, n in zip(chosen, chunk, strict=True):
                    ends[i] += n
        return wrong


@dataclass(frozen=True)
class DrawCase:
    """How to draw one token, and from which row of logits."""

    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


KINDS = (DrawCase(0), DrawCase(1, top_k=50, top_p=0.9), DrawCase(2, min_p=0.05))
GREEDY = DrawCase(3, temperature=0.0)


def _sampling(kernels: KernelsProtocol, vocab_size: int, max_batch_size: int, example_V: Tensor) -> Iterator[str]:
    """Compare tokens drawn alone with those drawn in a batch, for logits like ``example_V``. The random numbers lie on
    both sides of the edge between two tokens, so that a sum that differs in its last bit draws the other token."""
    noise_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)).to(example_V)
    logits_KV = torch.stack([noise_V.roll(kind) for kind in range(1 + len(KINDS))])

    def sample(draws: Sequence[DrawCase]) -> list[int]:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(draw, name) for draw in draws], dtype=dtype, device=example_V.device)

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
    varying = []
    for n in (n for n in SEQUENCES if 1 < n <= max_batch_size):
        chosen = [alone[(n + i) % len(alone)] for i in range(n)]
        if sample([draw for draw, _ in chosen]) != [token for _, token in chosen]:
            varying.append(n)
    if varying:
        yield f"{type(kernels).__name__}.sample varies at {_count(varying, 'row')}"


def _random_like(x: Tensor, rows: int) -> Tensor:
    """Random rows of the shape, type and scale of those of ``x``; rows of ``x`` in random order if it has integers."""
    generator = torch.Generator().manual_seed(x.dim())
    shape = (rows, *x.shape[1:])
    if not x.dtype.is_floating_point:
        return x[torch.randint(len(x), (rows,), generator=generator).to(x.device)]
    # Each row begins a little later in the same noise: drawing new noise for every row would take as long as the
    # kernels.
    width = math.prod(shape[1:])
    noise = torch.randn(width + SHIFT * rows, generator=generator) * float(x.float().std())
    # Contiguous, as models have it: some libraries' narrow products depend on how rows are aligned.
    return noise.to(x).unfold(0, width, SHIFT)[:rows].contiguous().view(shape)


def _groups_within(lens: Sequence[int], most: int) -> list[list[int]]:
    """Split sequences, by index, into groups of neighbours with at most ``most`` tokens, so that no pass takes more
    memory than one of that length."""
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
