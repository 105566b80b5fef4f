"""`infer doctor`: what would serve a checkpoint, and whether it fits, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands.arguments import table
from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.model import ModelContext
from infer.errors import InferError
from infer.flags import LOADING, NAMED, add_settings

if TYPE_CHECKING:
    import torch

    from infer.checkpoint import Checkpoint
    from infer.contracts.sections import Settings
    from infer.plugins.discovery import Offer, Plugins

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

    def say(self, part: str, text: str, **data: Any) -> None:
        self.rows[part] = text
        self.data[part] = data

    @contextmanager
    def tried(self) -> Iterator[None]:
        """An InferError becomes a problem."""
        try:
            yield
        except InferError as error:
            self.problems.append(str(error))

    def __str__(self) -> str:
        lines = [table([*self.rows.items()])]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join((*lines, "It would not be served." if self.problems else "It would be served."))


class Doctor:
    """Makes the choices that ``infer.assemble`` makes, by the same functions, and goes on where one of them fails."""

    def __init__(self, settings: Settings, sources: Mapping[str, str], plugins: Plugins) -> None:
        self.settings, self.sources, self.plugins = settings, sources, plugins
        self.report = Report()

    def examine(self) -> Report:
        """Raises InferError if there is no such checkpoint, or the settings cannot be."""
        with tempfile.TemporaryDirectory(prefix="infer-doctor-") as outlines:
            return self._examine(Path(outlines))

    def _examine(self, outlines: Path) -> Report:
        from infer.assemble import assembly

        path = self.settings.model.path
        device = assembly.choose_device(self.settings.model.device)
        checkpoint = assembly.open_checkpoint(self.settings, path, self.plugins, outlines=outlines)
        if checkpoint.path.is_relative_to(outlines):
            size = checkpoint.nbytes
            self.report.say("model", f"{path}: not downloaded, {mib(size)}", path=path, place=None, download_bytes=size)
            note = "Only the checkpoint's small files and the names and shapes of its tensors have been fetched."
            if checkpoint.quant_method:
                note += " The values of quantised weights may change their size a little."
            self.report.notes.append(note)
        else:
            self.report.say("model", f"{path}: {checkpoint.path}", path=path, place=str(checkpoint.path))
        self.report.say("device", str(device), name=str(device), why=self._why("model.device"))
        family = self._chosen("model", "family", checkpoint.architectures or ("not stated",))
        if family is None:
            self.report.notes.append(
                "A plugin serves a new architecture by registering it in infer_models(), with a model that has "
                "ModelProtocol's methods: docs/plugins.md shows one of a page."
            )
        format = self._chosen("weights", "format", [checkpoint.quant_method])
        cache = self._chosen("cache", "pool")
        backend = self._chosen("kernels", "kernels", [device.type])
        self._chosen("scheduler", "scheduler")
        if self.settings.engine.speculation is not None:
            self._chosen("proposer", "proposer")
            self.report.notes.append("What engine.speculation takes is not counted: a draft model's weights and cache.")
        kernels = dtype = None
        if cache and backend:
            with self.report.tried():
                kernels = assembly.make_kernels(self.settings, self.plugins, device, cache)
                self._about(backend, device)
        with self.report.tried():
            dtype = assembly.choose_dtype(self.settings.model.dtype, checkpoint, device)
            self._dtype(checkpoint, dtype)
        if family and format and cache and kernels is not None and dtype is not None:
            with self.report.tried():
                self._sizes(checkpoint, family, format, cache, ModelContext(kernels, dtype, device, 2))
        return self.report

    def _chosen(self, slot: str, part: str, there: Any = ()) -> Offer | None:
        """The offer that a slot's setting chooses; None, with a problem, if it chooses none."""
        from infer.plugins.slots import SLOTS

        about = SLOTS[slot]
        with self.report.tried():
            offer = self.plugins.choose(slot, self.settings, there)
            asked = about.asked(self.settings)
            why = self._why(about.setting) if about.setting else about.when
            if asked == "auto":
                why = "; ".join(filter(None, (why, self.plugins.rank(offer, there))))
            told = f"{offer.name} of {offer.distribution} {offer.version}: {offer.registration.description} ({why})"
            data = {"name": offer.name, "distribution": offer.distribution, "version": offer.version, "why": why}
            self.report.say(part, told, **data, priority=offer.registration.priority)
            return offer
        return None

    def _why(self, key: str) -> str:
        section, name = key.split(".")
        return f"{key} = {getattr(getattr(self.settings, section), name)} (from {self.sources[key]})"

    def _about(self, backend: Offer, device: torch.device) -> None:
        import torch

        if backend.about:
            self.report.rows["kernels"] += f"; {backend.about}"
        self.report.data["kernels"]["about"] = backend.about or None
        if device.type == "cpu":
            threads = self.settings.kernels.threads or torch.get_num_threads()
            self.report.say("threads", f"{threads} ({self._why('kernels.threads')})", count=threads)

    def _dtype(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        name, own = (str(each).removeprefix("torch.") for each in (dtype, checkpoint.dtype))
        why = self._why("model.dtype")
        if self.settings.model.dtype == "auto":
            why += "; the checkpoint's" if name == own else f"; the checkpoint's {own} is slow on this device"
        self.report.say("dtype", f"{name} ({why})", name=name, checkpoint=own, why=why)

    def _sizes(self, checkpoint: Checkpoint, family: Offer, format: Offer, cache: Offer, context: ModelContext) -> None:
        """How much memory weights and cache take, of how much. Raises InferError if a weight is not as it has to be."""
        from infer.assemble import assembly
        from infer.device import free_memory

        settings, report = assembly.for_device(self.settings, context.device), self.report
        free = free_memory(context.device)
        length, why = assembly.longest(settings, family, format, checkpoint, context, cache)
        context = replace(context, max_seq_len=length)
        sketch = assembly.sketch(settings, family, format, checkpoint, context)
        if sketch.approximate is not None:
            report.notes.append(f"The weights' size is that before they are packed: {sketch.approximate}")
        method = settings.model.quantization or checkpoint.quant_method or None
        report.say(
            "weights",
            f"{method or 'not quantised'}: {sketch.quantiser}; {mib(sketch.nbytes)} packed, at most "
            f"{mib(sketch.peak)} while they are loaded",
            method=method,
            forms=dict(sketch.quantiser.nbytes),
            file_bytes=checkpoint.nbytes,
            bytes=sketch.nbytes,
            peak_bytes=sketch.peak,
            exact=sketch.approximate is None,
        )
        sizes = self._quantizations(checkpoint, family, format, context, sketch.nbytes)
        report.say(
            "memory",
            f"{mib(free)} free, {mib(max(0, free - sketch.nbytes))} of it once the weights are loaded",
            free_bytes=free,
        )
        if sketch.peak > free:
            smaller = [name for name, size in sizes.items() if size < free]
            way_out = f"model.quantization = {smaller[0]} would fit" if smaller else "a smaller checkpoint is needed"
            report.problems.append(f"Loading takes {mib(sketch.peak)}, but {mib(free)} are free: {way_out}.")
            return
        pool = assembly.make_pool(settings, cache, sketch.model, context, sketch.nbytes)
        positions = pool.free_tokens()
        each = pool.nbytes // positions
        if positions < length:
            length, why = positions, f"{positions} positions, since the cache has no more"
        holds = max(0, free - sketch.nbytes) // each
        batch = settings.engine.max_batch_size
        report.say("sequences", f"{batch} at a time, each of at most {why}", max_seq_len=length, max_batch_size=batch)
        report.say(
            "cache",
            f"{assembly.in_words(settings, pool, context.dtype)}; free memory would hold {holds} positions",
            positions=positions,
            bytes=pool.nbytes,
            bytes_per_token=each,
            kv_dtype=settings.cache.kv_dtype,
            fits_tokens=holds,
        )
        if sketch.nbytes + pool.nbytes > free:
            report.problems.append(
                f"Weights and cache take {mib(sketch.nbytes + pool.nbytes)}, but {mib(free)} are free: lower "
                'engine.max_batch_size or engine.max_seq_len, or set cache.kv_dtype = "int8".'
            )
        tokenizer, template, _ = assembly.texts(settings, self.plugins, checkpoint, sketch.model.vocab_size)
        told = f"{tokenizer.get_vocab_size()} tokens, {'a' if template else 'no'} chat template"
        report.say("texts", told, tokens=tokenizer.get_vocab_size(), chat_template=template is not None)
        if template is None:
            report.notes.append("Without a chat template, chats are refused; set model.chat_template to a file.")

    def _quantizations(
        self, checkpoint: Checkpoint, family: Offer, format: Offer, context: ModelContext, nbytes: int
    ) -> dict[str, int]:
        """The bytes of the weights by what else ``model.quantization`` could say."""
        from infer.assemble import assembly

        asked, why = self.settings.model.quantization, self._why("model.quantization")
        sizes: dict[str, int] = {}
        if checkpoint.quant_method:
            told = f"the checkpoint is quantised ({checkpoint.quant_method}), and only plain weights are ({why})"
        else:
            for name in QUANTIZATIONS:
                if name != asked:
                    model = self.settings.model.model_copy(update={"quantization": name})
                    other = self.settings.model_copy(update={"model": model})
                    sizes[str(name).lower()] = assembly.sketch(other, family, format, checkpoint, context).nbytes
            told = ", ".join(f"{name} would take {mib(size)}" for name, size in sizes.items()) + f" ({why})"
        self.report.say("quantization", told, asked=asked, bytes={str(asked).lower(): nbytes} | sizes)
        return sizes


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
