"""`infer doctor`: what would serve a checkpoint, and whether it fits, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands.arguments import table
from infer.contracts.cache import StatefulPool
from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError
from infer.flags import LOADING, NAMED, add_settings

if TYPE_CHECKING:
    from infer.assemble.blueprint import Blueprint
    from infer.assemble.sizes import Sketch
    from infer.contracts.model import ModelContext
    from infer.contracts.sections import Settings
    from infer.plugins.discovery import Plugins

QUANTIZATIONS = (None, "int8", "int4")
"""The values of ``model.quantization``."""


@dataclass
class Report:
    """What is known of a checkpoint on this machine."""

    rows: dict[str, str] = field(default_factory=dict)
    """A line for each part of the engine."""
    data: dict[str, Any] = field(default_factory=dict)
    """The same for ``--json``: bytes, positions and names."""
    problems: list[str] = field(default_factory=list)
    """Why it would not be served, a sentence each."""
    notes: list[str] = field(default_factory=list)
    """What else to know, a sentence each."""

    def add(self, part: str, text: str, **data: Any) -> None:
        self.rows[part] = text
        self.data[part] = data

    def __str__(self) -> str:
        lines = [table([*self.rows.items()])]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join((*lines, "It would not be served." if self.problems else "It would be served."))


class Doctor:
    """Asks an ``Assembly`` for the parts that need no weights, and goes on where one of them fails."""

    def __init__(self, settings: Settings, sources: Mapping[str, str], plugins: Plugins) -> None:
        self.settings, self.sources, self.plugins = settings, sources, plugins
        self.report = Report()
        self.blueprint: Blueprint

    def examine(self) -> Report:
        """Raises InferError if there is no such checkpoint, or the settings cannot be."""
        from infer.assemble.blueprint import Blueprint

        with tempfile.TemporaryDirectory(prefix="infer-doctor-") as outlines:
            self.blueprint = Blueprint(self.settings, self.plugins, outlines=Path(outlines))
            self._place(Path(outlines))
            self._parts()
        return self.report

    def _parts(self) -> None:
        family = self._tries(self._choice, "model", "family")
        if not family:
            self.report.notes.append(
                "A plugin serves a new architecture by registering it in infer_models(), with a model that has "
                "ModelProtocol's methods: docs/plugins.md shows one of a page."
            )
        format = self._tries(self._choice, "weights", "format")
        cache = self._tries(self._choice, "cache", "pool")
        backend = self._tries(self._choice, "kernels", "kernels")
        self._tries(self._choice, "scheduler", "scheduler")
        proposer = True
        if self.settings.engine.speculation is not None:
            proposer = self._tries(self._choice, "proposer", "proposer")
            if not (proposer and self.blueprint.wants_head):
                self.report.notes.append(
                    "What engine.speculation takes is not counted: a draft model's weights and cache."
                )
        kernels = cache and backend and self._tries(lambda: self.blueprint.kernels)
        if kernels:
            self._kernels()
        dtype = self._tries(lambda: self.blueprint.dtype)
        if dtype:
            self._tries(self._dtype)
        if family and format and kernels and dtype and proposer:
            self._tries(self._sizes)

    def _tries(self, step: Callable[..., object], *given: str) -> bool:
        """Whether a step succeeds. What keeps it from that becomes a problem."""
        try:
            step(*given)
        except InferError as error:
            self.report.problems.append(str(error))
            return False
        return True

    def _place(self, outlines: Path) -> None:
        """Where the checkpoint is, and where the model would be."""
        path, checkpoint, device = self.settings.model.path, self.blueprint.checkpoint, self.blueprint.device
        if checkpoint.path.is_relative_to(outlines):
            size = checkpoint.nbytes
            self.report.add("model", f"{path}: not downloaded, {mib(size)}", path=path, place=None, download_bytes=size)
            note = "Only the checkpoint's small files and the names and shapes of its tensors have been fetched."
            if checkpoint.quant_method:
                note += " The values of quantized weights may change their size a little."
            self.report.notes.append(note)
        else:
            self.report.add("model", f"{path}: {checkpoint.path}", path=path, place=str(checkpoint.path))
        self.report.add("device", str(device), name=str(device), why=self._why("model.device"))

    def _choice(self, point: str, part: str) -> None:
        """The offer that is chosen for an extension point, and why."""
        from infer.plugins.extension_points import EXTENSION_POINTS

        about, offer = EXTENSION_POINTS[point], self.blueprint.chosen(point)
        why = self._why(about.setting) if about.setting else about.when
        if about.chosen(self.settings) == "auto":
            why = "; ".join(filter(None, (why, self.plugins.rank(offer, self.blueprint.there(point)))))
        summary = f"{offer.name} of {offer.distribution} {offer.version}: {offer.registration.description} ({why})"
        data = {"name": offer.name, "distribution": offer.distribution, "version": offer.version, "why": why}
        self.report.add(part, summary, **data, priority=offer.registration.priority)

    def _why(self, key: str) -> str:
        section, name = key.split(".")
        return f"{key} = {getattr(getattr(self.settings, section), name)} (from {self.sources[key]})"

    def _kernels(self) -> None:
        import torch

        backend = self.blueprint.chosen("kernels")
        if backend.about:
            self.report.rows["kernels"] += f"; {backend.about}"
        self.report.data["kernels"]["about"] = backend.about or None
        if self.blueprint.device.type == "cpu":
            threads = self.settings.kernels.threads or torch.get_num_threads()
            self.report.add("threads", f"{threads} ({self._why('kernels.threads')})", count=threads)

    def _dtype(self) -> None:
        dtype, stored = self.blueprint.dtype, self.blueprint.checkpoint.dtype
        name, own = (str(each).removeprefix("torch.") for each in (dtype, stored))
        why = self._why("model.dtype")
        if self.settings.model.dtype == "auto":
            why += "; the checkpoint's" if name == own else f"; the checkpoint's {own} is slow on this device"
        self.report.add("dtype", f"{name} ({why})", name=name, checkpoint=own, why=why)

    def _sizes(self) -> None:
        """How much memory weights and cache take, of how much. Raises InferError if a weight is not as it has to be."""
        from infer.device import free_memory

        free = free_memory(self.blueprint.device)
        context = self.blueprint.context
        sketch = self.blueprint.sketch(context)
        self._weights(sketch)
        sizes = self._quantizations(context, sketch.nbytes)
        self.report.add(
            "memory",
            f"{mib(free)} free, {mib(max(0, free - sketch.nbytes))} of it once the weights are loaded",
            free_bytes=free,
        )
        if sketch.peak > free:
            smaller = [name for name, size in sizes.items() if size < free]
            way_out = f"model.quantization = {smaller[0]} would fit" if smaller else "a smaller checkpoint is needed"
            self.report.problems.append(f"Loading takes {mib(sketch.peak)}, but {mib(free)} are free: {way_out}.")
            return
        self._cache(sketch, free)
        self._texts(sketch.model.vocab_size)

    def _weights(self, sketch: Sketch) -> None:
        if sketch.approximate is not None:
            self.report.notes.append(f"The weights' size is that before they are packed: {sketch.approximate}")
        checkpoint = self.blueprint.checkpoint
        method = self.settings.model.quantization or checkpoint.quant_method or None
        self.report.add(
            "weights",
            f"{method or 'not quantized'}: {sketch.quantizer}; {mib(sketch.nbytes)} packed, at most "
            f"{mib(sketch.peak)} while they are loaded",
            method=method,
            forms=dict(sketch.quantizer.nbytes),
            file_bytes=checkpoint.nbytes,
            bytes=sketch.nbytes,
            peak_bytes=sketch.peak,
            exact=sketch.approximate is None,
        )
        kept = self.blueprint.kept_weights
        if kept is not None and ((there := kept.path.exists()) or kept.worth(sketch.nbytes)):
            words = f"mapped from {kept.path}" if there else f"the first start may write them to {kept.path}"
            self.report.add("packed", words, path=str(kept.path), there=there)

    def _quantizations(self, context: ModelContext, nbytes: int) -> dict[str, int]:
        """The bytes of the weights by what else ``model.quantization`` could say."""
        asked, why = self.settings.model.quantization, self._why("model.quantization")
        sizes: dict[str, int] = {}
        if method := self.blueprint.checkpoint.quant_method:
            summary = f"the checkpoint is quantized ({method}), and only plain weights are ({why})"
        else:
            for name in QUANTIZATIONS:
                if name != asked:
                    model = self.settings.model.model_copy(update={"quantization": name})
                    other = self.settings.model_copy(update={"model": model})
                    sizes[str(name).lower()] = self.blueprint.sketch(context, other).nbytes
            summary = ", ".join(f"{name} would take {mib(size)}" for name, size in sizes.items()) + f" ({why})"
        self.report.add("quantization", summary, asked=asked, bytes={str(asked).lower(): nbytes} | sizes)
        return sizes

    def _cache(self, sketch: Sketch, free: int) -> None:
        """How many positions there would be, and whether they fit beside the weights."""
        from infer.assemble.blueprint import draft_head

        report, (length, why) = self.report, self.blueprint.length
        taken = sketch.nbytes
        if adapters := self.blueprint.adapter_sizes(self.blueprint.adapters(sketch.model)):
            taken += sum(adapters.values())
            words = ", ".join(f"{name} takes {mib(size)}" for name, size in adapters.items())
            report.add("adapters", words, bytes=dict(adapters))
        pool = self.blueprint.make_pool(sketch.model, taken)
        positions = pool.free_tokens()
        states = pool.state_bytes if isinstance(pool, StatefulPool) else 0
        each = (pool.nbytes - states) // positions
        if positions < length:
            length, why = positions, f"{positions} positions, since the cache has no more"
        holds = max(0, free - taken - states) // each
        batch = self.settings.engine.max_batch_size
        report.add("sequences", f"{batch} at a time, each of at most {why}", max_seq_len=length, max_batch_size=batch)
        report.add(
            "cache",
            f"{self.blueprint.in_words(pool)}; free memory would hold {holds} positions",
            positions=positions,
            bytes=pool.nbytes,
            bytes_per_token=each,
            state_bytes=states,
            kv_dtype=self.settings.cache.kv_dtype,
            fits_tokens=holds,
        )
        taken += pool.nbytes
        if (head := draft_head(sketch.model)) is not None:
            other = self.blueprint.make_pool(head, taken, "the draft head's cache")
            taken += other.nbytes
            words = f"{self.blueprint.in_words(other)}; its weights are among the model's"
            report.add("draft head", words, positions=other.free_tokens(), bytes=other.nbytes)
        if taken > free:
            what = "Weights, adapters and cache" if adapters else "Weights and cache"
            report.problems.append(
                f"{what} take {mib(taken)}, but {mib(free)} are free: lower "
                'engine.max_batch_size or engine.max_seq_len, or set cache.kv_dtype = "int8".'
            )

    def _texts(self, vocab_size: int) -> None:
        tokenizer, template, _ = self.blueprint.texts(vocab_size)
        summary = f"{tokenizer.get_vocab_size()} tokens, {'a' if template else 'no'} chat template"
        self.report.add("texts", summary, tokens=tokenizer.get_vocab_size(), chat_template=template is not None)
        if template is None:
            self.report.notes.append("Without a chat template, chats are refused; set model.chat_template to a file.")


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


@contextmanager
def warnings_noted(notes: list[str]) -> Iterator[None]:
    """Until the context ends, what is logged goes into ``notes`` if it is a warning, and nowhere else."""
    root = logging.getLogger()
    noting = logging.Handler(logging.WARNING)
    noting.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    before, root.handlers = root.handlers, [noting]
    try:
        yield
    finally:
        root.handlers = before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, NAMED | LOADING)
    parser.add_argument("--json", action="store_true", help="print it as JSON, sizes in bytes")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Print the report. Returns 0 if the checkpoint would be served, otherwise 1. Raises InferError if there is no such
    checkpoint."""
    doctor = Doctor(context.settings, context.sources, context.plugins)
    with warnings_noted(doctor.report.notes):
        report = doctor.examine()
    if args.json:
        whole = report.data | {"problems": report.problems, "notes": report.notes, "serves": not report.problems}
        print(json.dumps(whole, indent=2, default=str))
    else:
        print(report)
    return int(bool(report.problems))


COMMAND = CommandRegistration(
    "doctor",
    run,
    "say what would serve a checkpoint, and whether it fits, without loading it",
    add_arguments=add_arguments,
)
