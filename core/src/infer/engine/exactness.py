"""The start-up check of exactness: on the loaded model, a row's bits do not depend on what else is in its pass.

The whole model computes one text in a single pass, then again in chunks, together with other sequences, and by decodes,
which are recorded if decode passes are recorded. Then the kernels that the model has called are tried alone, because
there many more sizes cost little: each product with all small numbers of rows and with those of the largest pass,
attention at the edges of segments and at the full length, in decodes of every size and in short extends, and sampling.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec

import torch
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.cache import CachePoolProtocol, KVCacheView
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import ModelProtocol, Pass
from infer.device import same_bits
from infer.engine import meaning
from infer.engine.confirmation import Steps
from infer.engine.graphs import DecodeGraphs
from infer.engine.trial_draws import varying_draws
from infer.engine.trial_rows import EVERY, HEAD_OPERATIONS, PER_VALUE, counted, random_like, row_counts

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
SEQUENCES = (*range(1, 65), 96, 128, 200, EVERY)
"""Numbers of sequences that the attention of decodes is tried with."""
LEAST_ROWS = 129
"""The fewest rows that are the most of a kernel."""
LEAST_HEAD_ROWS, MANY_HEAD_ROWS = 18, 260
"""The same of the output head, and the most on a CPU that has the time for them."""
MOST_DRAWN = 1024
"""Tokens are not drawn from more rows at a time; the head is not tried with more."""
MOST_ROWS = 8192
"""A larger pass is taken to be one of so many rows."""
ROWWISE = {
    "linear": 1,
    "gated_linear": 1,
    "route": 1,
    "gated_experts": 3,
    "embedding": 1,
    "rms_norm": 1,
    "add_rms_norm": 2,
    "gated": 1,
    "gated_rms_norm": 2,
}
"""The kernels that work row by row, and how many of their first arguments are tensors of rows."""
PRODUCTS = ("linear", "gated_linear", "gated_experts")
"""Those of them that multiply by a weight."""
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


P = ParamSpec("P")


@torch.inference_mode()
def checking(
    model: ModelProtocol,
    pool: CachePoolProtocol,
    kernels: KernelsProtocol,
    graphs: DecodeGraphs | None = None,
    *,
    max_batch_size: int,
    max_seq_len: int,
    max_chunk: int | None = None,
    max_tokens: int | None = None,
    max_drafts: int = 0,
    device: torch.device,
) -> Steps:
    """Check that a row's bits do not depend on the rest of its pass. Returns one phrase for the log per kernel, or part
    of the model, that varies: what varies, and with how many rows; an empty list if all is exact. Frees all slots that
    it allocates, also if it is closed early. No pass extends a sequence by more than ``max_chunk`` positions, if there
    is such a limit; it is at least LENGTH. No pass has more than ``max_tokens`` rows, if there is such a limit, and at
    most ``max_drafts`` draft tokens of a sequence are verified at a time."""
    observed = Observed()
    chunk = max_chunk or max_seq_len
    trial = model, pool, kernels, graphs, max_batch_size, max_seq_len, chunk, max_drafts, device, observed
    largest = min(max_batch_size * max(chunk, 1 + max_drafts), max_tokens or MOST_ROWS, MOST_ROWS)
    drawn = min(max_batch_size * (1 + max_drafts), MOST_DRAWN)
    began = time.thread_time()
    whole = yield from _Whole(*trial).faults()
    attention = _Attention(*trial)
    parts: list[tuple[str, Callable[[], Steps]]] = [
        *((str(call), partial(_rows, call, kernels, largest, max_batch_size)) for call in observed.calls.values()),
        ("sample", partial(varying_draws, kernels, model.vocab_size, drawn, observed.logits)),
        *((f"attention of layer {a[0]}", partial(attention.faults, *a)) for a in observed.attends.values()),
    ]
    # This thread's CPU time counts, so that a busy machine does not make the check try less.
    tried: list[list[str]] = []
    for _, faults in parts:
        if time.thread_time() - began < SECONDS:
            tried.append((yield from faults()))
    if left := [name for name, _ in parts[len(tried) :]]:
        log.warning(
            "the start-up check ends after %.0f s, before it has tried, alone, %s of %s",
            time.thread_time() - began,
            ", ".join(left),
            type(kernels).__name__,
        )
    wrong = yield from _beside_torch(model, kernels, observed)
    return list(dict.fromkeys([*wrong, *itertools.chain(*tried), *whole]))


def in_one_go(check: Callable[P, Steps]) -> Callable[P, list[str]]:
    """The check without its pauses."""

    def run(*trial: P.args, **sizes: P.kwargs) -> list[str]:
        steps = check(*trial, **sizes)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return list(end.value)

    return run


self_check = in_one_go(checking)


def _beside_torch(model: ModelProtocol, kernels: KernelsProtocol, observed: Observed) -> Steps:
    """Compare each kernel once with torch."""
    wrong: list[str] = []
    for call in observed.calls.values():
        yield
        wrong += meaning.wrong_calls(kernels, [(call, tuple(random_like(x, LENGTH) for x in call.rows))])
    for layer, q, k, rotary in observed.attends.values():
        yield
        queries, keys = random_like(q, len(q)), random_like(k, len(k))
        wrong += meaning.wrong_attention(kernels, layer, model.attention[layer], queries, keys, rotary)
    yield
    return [*wrong, *meaning.wrong_draws(kernels, random_like(observed.logits[None], 4))]


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
        with _replaced(kernels, **{name: self._observing(name, getattr(kernels, name)) for name in ROWWISE}):
            yield

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

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
    ) -> Tensor:
        spec = self.model.attention[layer]
        if k_TKE is not None:  # what only reads is tried with what has written
            kind = spec, spec.sinks_H is None, q_THE.shape, k_TKE.shape, rotary is None
            self.observed.attends.setdefault(kind, (layer, q_THE, k_TKE, rotary))
        return self.view.attend(layer, q_THE, k_TKE, v_TKE, rotary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)  # ``state``, if it is a StatefulView


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
    max_drafts: int
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

    def faults(self) -> Steps:
        found: list[str] = []
        name, length = type(self.model).__name__, min(LENGTH, self.max_seq_len)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, self.model.vocab_size, (length,), generator=generator).to(self.device)
        at = self.spans([0], [length])
        with self.slots([length]) as slots, self.observed.observe_calls(self.kernels):
            view = self.pool.batched_chunked_prefill_view(slots, [0], [length])
            whole = self.model.forward(Pass(text, at, ObservingView(view, self.model, self.observed)))
        yield
        if varying := (yield from self._logits(whole)):
            found.append(f"{name}.logits varies at {counted(varying, 'row')}")
        yield
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
                found.append(f"{name}.forward varies in a pass of {counted([len(at)], 'row')}, chunks of {parts}")
            ends[: len(chunk)] = chunk
            for size in (n for n in sizes if n <= len(slots)):
                yield
                at = torch.tensor(ends[:size], device=self.device)
                if not same_bits(self._decode(slots[:size], text[at], at)[:size], whole[at]):
                    suffix = "" if self.graphs is None else ", recorded or replayed"
                    found.append(f"{name}.forward varies in a decode of {counted([size], 'sequence')}{suffix}")
                ends[:size] = [end + 1 for end in ends[:size]]
        return found

    def _logits(self, hidden: Tensor) -> Generator[None, None, list[int]]:
        """The numbers of rows with which the output head varies."""
        vocab, batch = self.model.vocab_size, self.max_batch_size
        largest = max(MANY_HEAD_ROWS, min(batch * (1 + self.max_drafts), MOST_DRAWN))
        cost = 2 * hidden.shape[1] * vocab
        most, *sizes = row_counts(cost, LEAST_HEAD_ROWS, largest, batch, self.device, HEAD_OPERATIONS)
        hidden = hidden[self.spans([0], [most]) % len(hidden)]
        logits = self.model.logits(hidden)
        self.observed.logits = logits[0].clone()
        varying: list[int] = []
        for n in sorted(sizes):
            yield
            if not same_bits(self.model.logits(hidden[:n]), logits[:n]):
                varying.append(n)
        return varying

    def _decode(self, slots: list[int], tokens: Tensor, at: Tensor) -> Tensor:
        if self.graphs is None:
            return self.model.forward(Pass(tokens, at, self.pool.decode_view(slots)))
        rows = self.graphs.rows(len(slots))
        padding = self.spans([0], [rows]).clamp(max=len(slots) - 1)
        self.graphs.token_ids.tensor[:rows] = tokens[padding]
        self.graphs.positions.tensor[:rows] = at[padding]
        view = self.pool.decode_view(slots, rows)
        return self.graphs.run(rows, view, (tokens[padding].tolist(), at[padding].tolist(), slots))


def _rows(call: Call, kernels: KernelsProtocol, largest: int, max_batch_size: int) -> Steps:
    """Compare a kernel's results for some rows with those of the same rows among many."""
    inner, outer = (math.prod(x.shape[1:]) for x in (call.rows[0], call.results[0]))
    if call.name in PRODUCTS:
        times = {"gated_linear": 2, "gated_experts": math.prod(call.rows[-1].shape[1:])}.get(call.name, 1)
        cost = 2 * inner * outer * times
    else:
        cost = PER_VALUE * (inner + outer)
    most, *counts = row_counts(cost, LEAST_ROWS, largest, max_batch_size, call.results[0].device)
    inputs = [random_like(x, most) for x in call.rows]

    def run(begin: int, end: int) -> tuple[Tensor, ...]:
        return _tensors(getattr(kernels, call.name)(*(x[begin:end] for x in inputs), *call.rest))

    whole = run(0, most)
    varying = []
    for n in sorted(counts):
        yield
        begins = (0, most - n) if n <= 2 else (most - n,)
        if not all(same_bits(a, b[i : i + n]) for i in begins for a, b in zip(run(i, i + n), whole, strict=True)):
            varying.append(n)
    return [f"{type(kernels).__name__}.{call} varies at {counted(varying, 'row')}"] if varying else []


class _Attention(_Trial):
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
                with _replaced(self.kernels, extend_attention=attention):
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
def _replaced(kernels: KernelsProtocol, **methods: Any) -> Iterator[None]:
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


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
