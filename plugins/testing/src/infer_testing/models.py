"""What ``ModelProtocol`` promises, tried on one checkpoint of a family."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from infer.assemble.weights import Weights, open_checkpoint
from infer.cache import KVStorage, StateManager, StateStorage
from infer.checkpoint import Checkpoint
from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import KernelsProtocol, RecorderProtocol
from infer.contracts.model import ModelContext, ModelProtocol, Pass, StatefulModel
from infer.contracts.sections import Settings
from infer.device import FixedTensor
from infer.engine.graphs import read_on_host
from infer.errors import CheckpointError, InferError
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Offer, Plugins
from infer.settings import load_settings, plugin_settings
from infer.weight import Weight
from infer_testing.suite import Skipped, Suite, Violation

BLOCK = 16
LONGEST = 160
"""Positions of the longest sequence."""
TEXT = 80
"""Tokens of the text that is compared with transformers."""
TOLERANCE = 1e-3
"""How far a log-probability may be from that of transformers, in float32."""
Against = Literal["auto", "transformers", "none"]


@dataclass
class Models:
    """A checkpoint, and the family that is tried on it."""

    folder: Path
    plugins: Plugins
    settings: Settings
    offer: Offer
    against: Against = "auto"
    kernels: KernelsProtocol = field(default_factory=ReferenceKernels)

    @classmethod
    def of(
        cls,
        folder: Path,
        family: str = "auto",
        plugins: Sequence[object] = (),
        against: Against = "auto",
        kernels: KernelsProtocol | None = None,
    ) -> Models:
        """Raises InferError."""
        found = Plugins.discover(plugins)
        sections = {"model": {"path": str(folder), "family": family}}
        settings = load_settings(found, env={}, overrides=sections, read_file=False).settings
        checkpoint = open_checkpoint(settings, str(folder), found)
        offer = found.choose("model", settings, checkpoint.architectures)
        return cls(folder, found, settings, offer, against, kernels or ReferenceKernels())

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.settings, str(self.folder), self.plugins)

    def empty(self, dtype: torch.dtype = torch.float32) -> ModelProtocol:
        """A model that is not loaded."""
        own = plugin_settings(self.settings, "model", self.offer.name)
        made: ModelProtocol = self.offer.make(ModelProtocol, self.checkpoint.config, self.context(dtype), own)
        return made

    def context(self, dtype: torch.dtype) -> ModelContext:
        return ModelContext(self.kernels, dtype, torch.device("cpu"), min(LONGEST, self.checkpoint.max_positions))

    def model(self, dtype: torch.dtype) -> ModelProtocol:
        """The loaded model; one per dtype, as an engine has one for all its passes."""
        if dtype not in self._models:
            format = self.plugins.choose("weights", self.settings, [self.checkpoint.quant_method])
            self._models[dtype] = Weights(self.settings, self.offer, format, self.checkpoint).load(self.context(dtype))
        return self._models[dtype]

    _models: dict[torch.dtype, ModelProtocol] = field(default_factory=dict, init=False)

    @property
    def longest(self) -> int:
        return self.context(torch.float32).max_seq_len


SUITE: Suite[Models] = Suite("check_model")
check = SUITE.check


def check_model(
    folder: Path | str,
    *,
    family: str = "auto",
    plugins: Sequence[object] = (),
    against: Against = "auto",
    kernels: KernelsProtocol | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that ``ModelProtocol`` promises on a checkpoint, in ``folder``, of a family: the one of that name,
    or the one that knows the checkpoint's architecture. ``plugins`` are modules in addition to the installed ones.
    The reference is transformers' model, if ``against`` is "transformers", or "auto" and it is installed. ``only``
    names checks, ``case`` one case of each. Raises ConformanceError, and InferError if there is no such family."""
    SUITE.enforce(Models.of(Path(folder), family, plugins, against, kernels), only=only, seed=seed, case=case)


class Stage:
    """K/V and states for some sequences of a model, and passes over them. A part that starts at position 0 begins a
    sequence anew."""

    def __init__(self, m: Models, dtype: torch.dtype, sequences: int) -> None:
        self.model = m.model(dtype)
        context = CacheContext(self.model.attention, sequences, m.longest, dtype, torch.device("cpu"), m.kernels)
        each = -(-m.longest // BLOCK)
        self.storage = KVStorage(context, sequences * each, BLOCK)
        order = np.random.default_rng(0).permutation(sequences * each).astype(np.int32)
        self.table = order.reshape(sequences, each)
        """The blocks of each sequence."""
        specs = self.model.states if isinstance(self.model, StatefulModel) else ()
        self.states = StateStorage(specs, StateManager(sequences), sequences, context.device) if specs else None

    def run(self, parts: Sequence[tuple[int, Sequence[int], int, int]], rows_N: Tensor | None = None) -> Tensor:
        """Hidden states of one pass. Each part is (row of the table, its tokens, start, length)."""
        return self.model.forward(self.batch(parts, rows_N))

    def share(self, source: int, target: int, other: int, text: Sequence[int], begin: int) -> None:
        """Let row ``target`` of the table go on after the first ``begin`` tokens of ``source``, a multiple of a
        block. A state is only known after a pass's last token, so row ``other`` computes that of these tokens."""
        self.table[target, : begin // BLOCK] = self.table[source, : begin // BLOCK]
        if self.states is not None:
            batch = self.batch([(other, text, 0, begin)])
            self.model.forward(batch)
            view: Any = batch.cache
            self.states.manager.open(target, int(view.state(0).rows.save_T[-1]))

    def batch(self, parts: Sequence[tuple[int, Sequence[int], int, int]], rows_N: Tensor | None = None) -> Pass:
        tokens = [token for _, text, start, n in parts for token in text[start : start + n]]
        positions = [at for _, _, start, n in parts for at in range(start, start + n)]
        slots, starts, lens = [b for b, *_ in parts], [start for _, _, start, _ in parts], [n for *_, n in parts]
        view: Any = self.storage.view(self.table[slots], starts, lens)
        if self.states is not None:
            for b, start in zip(slots, starts, strict=True):
                if start == 0:
                    self.states.manager.open(b)
            view.states = self.states.view(slots, starts, lens)
        return Pass(torch.tensor(tokens), torch.tensor(positions), view, rows_N)


def text_of(m: Models, length: int, draw: random.Random) -> list[int]:
    return [draw.randrange(m.model(torch.float32).vocab_size) for _ in range(length)]


def differs(found: Tensor, expected: Tensor) -> list[int]:
    """The rows whose bits differ."""
    wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    return wrong.flatten(1).any(1).nonzero().flatten().tolist()


DTYPES = (torch.float32, torch.bfloat16)


@check("load takes the weights that expected names, and refuses all others with a CheckpointError", 3)
def loading(m: Models, draw: random.Random) -> None:
    shapes = m.empty().expected()
    if not shapes:
        raise Violation("expected() names no tensor")

    def weights(skip: str = "", other: str = "") -> Iterable[tuple[str, Weight]]:
        for name, shape in shapes.items():
            if name != skip:
                yield name, torch.zeros([n + 1 for n in shape] if name == other else shape)

    name = draw.choice(sorted(shapes))
    faults: dict[str, Iterable[tuple[str, Weight]]] = {
        f"although {name} is missing": weights(skip=name),
        f"although {name} has another shape": weights(other=name),
        "although a tensor is there that expected does not name": [*weights(), ("of.another.model", torch.zeros(3))],
    }
    for what, given in faults.items():
        try:
            m.empty().load(given)
        except CheckpointError:
            continue
        except Exception as error:
            raise Violation(
                f"load raises a {type(error).__name__} {what}; a CheckpointError says it to users"
            ) from None
        raise Violation(f"load raises no error {what}")


@check("forward gives [N, D] of the wanted rows, in their order, and logits gives [N, V], both in the model's dtype", 4)
def shapes(m: Models, draw: random.Random) -> None:
    dtype = draw.choice(DTYPES)
    stage, text = Stage(m, dtype, 2), text_of(m, 40, draw)
    model = stage.model
    for layer, spec in enumerate(model.attention):
        if not isinstance(spec, AttentionSpec) or spec.num_heads % spec.num_kv_heads:
            raise Violation(f"attention[{layer}] is {spec}: query heads are a multiple of K/V heads")
    parts = [(0, text, 0, 25), (1, text, 0, 15)]
    whole = stage.run(parts)
    if whole.ndim != 2 or len(whole) != 40 or whole.dtype != dtype:
        raise Violation(
            f"forward gives {list(whole.shape)} of {whole.dtype} for 40 tokens; [40, D] of {dtype} is right"
        )
    for count in (draw.choice([1, 7, 40]), 0):
        wanted = draw.sample(range(40), count)
        found = stage.run(parts, torch.tensor(wanted, dtype=torch.int64))
        if found.shape != (count, whole.shape[1]):
            raise Violation(f"forward gives {list(found.shape)} where {count} rows are wanted")
        if wrong := differs(found, whole[wanted]):
            raise Violation(
                f"forward gives another hidden state for token {wanted[wrong[0]]} if rows_N asks for {wanted} than "
                "without"
            )
    logits = model.logits(whole)
    if logits.shape != (40, model.vocab_size) or logits.dtype != dtype:
        raise Violation(f"logits gives {list(logits.shape)} of {logits.dtype}, not {[40, model.vocab_size]} of {dtype}")


@check("load copies the tensors that it is given, which may be views of a file", 1)
def copies(m: Models, draw: random.Random) -> None:
    stage = Stage(m, torch.float32, 1)
    stage.model = m.empty()
    given = {name: torch.zeros(shape) for name, shape in stage.model.expected().items()}
    stage.model.load(given.items())

    def logits() -> Tensor:
        return stage.model.logits(stage.run([(0, [0, 1], 0, 2)]))

    before = logits()
    for name, tensor in given.items():
        tensor.fill_(torch.nan)
        if differs(logits(), before):
            raise Violation(
                f"{name} is written to after load, and logits change: load keeps no tensor that it is given"
            )


@check("Log-probabilities at all positions are those of transformers", 1)
def transformers(m: Models, draw: random.Random) -> None:
    if m.against == "none":
        raise Skipped("not asked for")
    if importlib.util.find_spec("transformers") is None:
        if m.against == "transformers":
            raise InferError("transformers is not installed: pip install transformers, or leave out --against.")
        raise Skipped("transformers is not installed")
    text = text_of(m, min(TEXT, m.longest), draw)
    stage = Stage(m, torch.float32, 1)
    found = stage.model.logits(stage.run([(0, text, 0, len(text))])).log_softmax(-1)
    expected = _of_transformers(m, text)
    if found.shape != expected.shape:
        raise Violation(f"there are {found.shape[1]} logits; transformers has {expected.shape[1]}")
    off = (found - expected).abs().amax(-1)
    wrong = (~(off < TOLERANCE)).nonzero().flatten().tolist()
    if wrong:
        windows = sorted({spec.window for spec in stage.model.attention if spec.window is not None})
        if wrong[0] == 0:
            where = "from the first token on, which sees no other: embedding, norms, projections, MLP or head"
        elif wrong[0] in (1, 2):
            where = "but not for the first token: attention or positions (rotary, scale, order of heads)"
        else:
            where = f"but not before: a window (attention's are {windows or 'none'}) or a change of the rotary scaling"
        raise Violation(
            f"the log-probabilities at position {wrong[0]} are off by {off[wrong[0]]:.3g}, {where}; "
            f"{len(wrong)} of {len(text)} positions are wrong"
        )


def _of_transformers(m: Models, text: list[int]) -> Tensor:
    """Log-probabilities, [T, V]. Raises Violation if transformers finds other tensors than it needs."""
    import transformers as theirs

    theirs.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    theirs.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    kinds: list[Any] = [kind for name in m.checkpoint.architectures if (kind := getattr(theirs, name, None))]
    if not kinds:
        raise Skipped(f"transformers has no {' or '.join(m.checkpoint.architectures)}")
    config = kinds[0].config_class.from_pretrained(m.folder)
    model, info = kinds[0].from_pretrained(
        m.folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    faults = {
        "missing_keys": "it needs {}, which the family does not name",
        "unexpected_keys": "it does not know {}, which the family names",
        "mismatched_keys": "it has other shapes of {}",
    }
    if told := [text.format(_few(info[kind])) for kind, text in faults.items() if info.get(kind)]:
        raise Violation(f"transformers loads other tensors from this checkpoint: {'; '.join(told)}")
    with torch.inference_mode():
        logits: Tensor = model.eval()(torch.tensor([text])).logits[0]
    return logits.float().log_softmax(-1)


def _few(names: Iterable[object]) -> str:
    first, *others = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
    shown = ", ".join([first, *others[:2]])
    return shown if len(others) < 3 else f"{shown} and {len(others) - 2} more"


@check("A text in chunks has the bits that it has in one pass", 8)
def chunks(m: Models, draw: random.Random) -> None:
    dtype, length = draw.choice(DTYPES), draw.choice([2, 17, 60, min(130, m.longest)])
    stage, text = Stage(m, dtype, 2), text_of(m, length, draw)
    whole = stage.run([(0, text, 0, length)])
    bounds = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.randint(1, 6)))})
    for begin, end in itertools.pairwise(bounds):
        found = stage.run([(1, text, begin, end - begin)])
        if wrong := differs(found, whole[begin:end]):
            raise Violation(
                f"position {begin + wrong[0]} has other bits in the chunk [{begin}, {end}) than in one pass of {length}"
            )


@check("A sequence has the bits beside others that it has alone, in prefill and in decodes", 8)
def company(m: Models, draw: random.Random) -> None:
    dtype, count = draw.choice(DTYPES), draw.randint(2, 5)
    alone, together = Stage(m, dtype, count), Stage(m, dtype, count)
    lengths = [draw.randint(5, 50) for _ in range(count)]
    texts = [text_of(m, length, draw) for length in lengths]
    expected = [alone.run([(b, text, 0, len(text))]) for b, text in enumerate(texts)]
    at = [0] * count
    while any(at[b] < lengths[b] for b in range(count)):
        left = [b for b in range(count) if at[b] < lengths[b]]
        parts = []
        for b in draw.sample(left, draw.randint(1, len(left))):
            parts.append((b, texts[b], at[b], draw.choice([1, 1, draw.randint(1, lengths[b] - at[b])])))
        found, row = together.run(parts), 0
        for b, _, start, n in parts:
            if wrong := differs(found[row : row + n], expected[b][start : start + n]):
                raise Violation(
                    f"position {start + wrong[0]} of sequence {b} has other bits in a pass with {len(parts)} sequences "
                    "than alone: something is shared between sequences or passes"
                )
            at[b], row = start + n, row + n


@check("A sequence whose prefix is in the cache goes on with the bits of one that computed it", 4)
def prefix(m: Models, draw: random.Random) -> None:
    dtype, blocks = draw.choice(DTYPES), draw.randint(1, 4)
    stage, text = Stage(m, dtype, 3), text_of(m, blocks * BLOCK + draw.randint(1, 30), draw)
    miss = stage.run([(0, text, 0, len(text))])
    begin = blocks * BLOCK
    stage.share(0, 1, 2, text, begin)
    hit = stage.run([(1, text, begin, len(text) - begin)])
    if wrong := differs(hit, miss[begin:]):
        raise Violation(
            f"position {begin + wrong[0]} has other bits after a prefix of {begin} cached tokens than where they were "
            "computed: forward keeps something of a sequence besides K, V and states"
        )


@check("A decode pass that is recorded and replayed for other sequences has the bits of one that is run", 4)
def recorded(m: Models, draw: random.Random) -> None:
    recorder: RecorderProtocol = m.kernels.recorder() or Repeating()
    rows = draw.randint(1, 4)
    dtype = draw.choice(DTYPES)
    stage = Stage(m, dtype, 8)
    texts = [text_of(m, draw.randint(3, 60), draw) for _ in range(8)]
    for b, text in enumerate(texts):
        stage.run([(b, text, 0, len(text) - 1)])
    ids, positions = (FixedTensor(torch.zeros(rows, dtype=torch.int64)) for _ in range(2))
    replay: Callable[[], Tensor | str] | None = None
    for _ in range(3):
        chosen = draw.sample(range(8), rows)
        starts = [len(texts[b]) - 1 for b in chosen]
        view: Any = stage.storage.fixed_view(stage.table[chosen], starts)
        if stage.states is not None:
            view.states = stage.states.fixed_view(np.array(chosen), np.array(starts), rows)
        ids.write(np.array([texts[b][-1] for b in chosen]))
        positions.write(np.array(starts))
        batch = Pass(ids.tensor, positions.tensor, view)
        if replay is None:
            with torch.inference_mode():
                _, made = recorder(lambda view=batch: stage.model.forward(view))  # type: ignore[misc]
            if isinstance(made, str):
                raise Skipped(f"the pass cannot be recorded: {made}")
            # The reference kernels do read on the host; a repeated call reads anew.
            if (who := read_on_host(view)) and not isinstance(recorder, Repeating):
                raise Skipped(f"the pass cannot be recorded: {who}")
            replay = made
            continue
        with torch.inference_mode():
            with view.rehearsal() if stage.states is not None else nullcontext():
                found = replay()
            if isinstance(found, str):
                raise Skipped(f"the pass cannot be replayed: {found}")
            found, expected = found.clone(), stage.model.forward(batch)
        if wrong := differs(found, expected):
            raise Violation(
                f"row {wrong[0]} of {rows} has other bits in a replay than in a run: forward brings tokens or "
                "positions to Python, or keeps a tensor from pass to pass"
            )


class Repeating:
    """Where the kernels have no recorder: a recording repeats the Python calls with the objects that it was made with,
    so that a model that reads tokens or positions outside of them is found."""

    cheap = True

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor | str] | str]:
        return run(), run
