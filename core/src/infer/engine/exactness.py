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
from collections.abc import Callable, Generator, Iterator
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
from infer.engine.trial_attention import AttentionTrial, Trial, replaced
from infer.engine.trial_draws import varying_draws
from infer.engine.trial_rows import HEAD_OPERATIONS, PER_VALUE, counted, random_like, row_counts

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
    "gated": 2,
    "gated_rms_norm": 2,
}
"""The kernels that work row by row, and how many of their first arguments are tensors of rows."""
PRODUCTS = ("linear", "gated_linear", "gated_experts")
"""Those of them that multiply by a weight."""

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
    trial = model, pool, kernels, graphs, max_batch_size, max_seq_len, chunk, max_drafts, device
    largest = min(max_batch_size * max(chunk, 1 + max_drafts), max_tokens or MOST_ROWS, MOST_ROWS)
    drawn = min(max_batch_size * (1 + max_drafts), MOST_DRAWN)
    began = time.thread_time()
    whole = yield from _Whole(*trial, observed).faults()
    attention = AttentionTrial(*trial)
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
        with replaced(kernels, **{name: self._observing(name, getattr(kernels, name)) for name in ROWWISE}):
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
class _Whole(Trial):
    """Checks the whole model. All sequences have the same text, so that one pass gives what every other must equal."""

    observed: Observed

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


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
