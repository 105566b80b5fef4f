"""How a checkpoint's weights get into a model: a container holds the tensors, a format makes weights of them, they are
quantized if the settings say so, and the family's model takes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from infer.assemble.kept import KeptWeights, Packing
from infer.assemble.sizes import Meter, Sketch
from infer.checkpoint import Checkpoint, Outlines, dummy_tensors, ending, locate
from infer.checkpoint.quantize import Quantize, Quantizer
from infer.contracts.kernels import KeepingKernels
from infer.contracts.model import (
    DraftingModel,
    LayerReadingHead,
    ModelContext,
    ModelProtocol,
    PackingModel,
    SparingModel,
    UnstackingModel,
)
from infer.contracts.sections import Settings
from infer.contracts.weights import TensorFilesProtocol, WeightFormatProtocol
from infer.device import blocks_given_back
from infer.errors import InferError, PluginError, SettingsError
from infer.plugins.discovery import Offer, Plugins
from infer.plugins.inspection import Named
from infer.progress import track
from infer.weight import GroupedWeight, Weight, form_of, unfilled

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's weights, and who makes a model of them."""

    settings: Settings
    family: Offer
    format: Offer
    checkpoint: Checkpoint

    def load(self, context: ModelContext, kept: KeptWeights | None = None) -> ModelProtocol:
        """The model with its weights, which are packed only if ``kept`` has not got them yet. Raises InferError."""
        with blocks_given_back():
            model, quantizer = self._fill(context) if kept is None else self._kept(context, kept)
        method = self.settings.model.quantization or self.checkpoint.quant_method or "not quantized"
        log.info("weights, %s: %s", method, quantizer)
        return model

    def _kept(self, context: ModelContext, kept: KeptWeights) -> tuple[ModelProtocol, Quantizer]:
        kernels = context.kernels
        assert isinstance(kernels, KeepingKernels)
        if (file := kept.open()) is not None:
            try:
                with kernels.packed_in(file):
                    filled = self._fill(context, kept=True)
                file.finish()
                return filled
            except InferError as error:
                kept.drop(error)
        packing = Packing()
        with kernels.packed_in(packing):
            filled = self._fill(context)
        kept.keep(packing.weights)
        return filled

    def sketch(self, context: ModelContext) -> Sketch:
        """What the model will take once it is loaded. Only headers are read, and, of formats that need them to tell a
        weight's form, zero points and the like. Raises what loading raises, except for what only values show."""
        bare = replace(context, device=torch.device("meta"))
        try:
            with Meter() as meter:
                model, quantizer = self._fill(bare)
            return Sketch(model, quantizer, meter.live, meter.peak)
        except PluginError as error:  # a family, or kernels, that cannot do without values
            model = self._model(context)
            quantizer = self._quantizer(model, unfilled, context.dtype)
            with self.checkpoint.placed(), Named(f"{self.format.whose} cannot be read"):
                for _ in quantizer(self._for_model(model, bare)):
                    pass
            total = sum(quantizer.nbytes.values())
            return Sketch(model, quantizer, total, total, str(error))

    def read(self, bare: Collection[str] | None = ()) -> Iterator[tuple[str, Weight]]:
        """The checkpoint's weights, each read when the iterator reaches it; without values if its name is among
        ``bare``, or if that is None."""
        files = self.checkpoint.container.tensors()
        outlines = Outlines(files)
        if bare is None:
            without = self._format(outlines)
            for name in without.names():
                yield name, outlines.weight(name, without)
            return
        with_values = self._format(files)
        without = self._format(outlines) if bare else with_values
        for name in with_values.names():
            yield name, outlines.weight(name, without) if name in bare else with_values.weight(name)

    def _format(self, tensors: TensorFilesProtocol) -> WeightFormatProtocol:
        made: WeightFormatProtocol = self.format.build(self.settings, self.checkpoint.config, tensors)
        return made

    def _model(self, context: ModelContext) -> ModelProtocol:
        """The model, not loaded yet."""
        with self.checkpoint.placed():
            model: ModelProtocol = self.family.build(self.settings, self.checkpoint.config, context)
            if context.drafts_for is not None and not isinstance(model, LayerReadingHead):
                kinds = ", ".join(self.checkpoint.architectures)
                raise SettingsError(
                    f"{self.checkpoint.path} is no draft head, but a model ({kinds}); give the checkpoint of a head, "
                    "or choose draft as engine.speculation."
                )
            if context.draft_head and not self._has_head(model):
                head = model.draft_head if isinstance(model, DraftingModel) else None
                lacking = "" if head is None else f" (no tensor {next(iter(head.expected()))})"
                raise SettingsError(
                    f'engine.speculation is "{self.settings.engine.speculation}", but the checkpoint has no draft head '
                    f"that {self.family.whose[0].lower()}{self.family.whose[1:]} knows{lacking}; choose ngram or draft."
                )
        self.checkpoint.check_ids(model.vocab_size)
        return model

    def _has_head(self, model: ModelProtocol) -> bool:
        """Whether a model has a draft head, and the checkpoint any of its tensors."""
        if not isinstance(model, DraftingModel) or model.draft_head is None:
            return False
        if self.settings.model.load_format == "dummy":
            return True
        weights: Iterable[tuple[str, Weight]] = self.read(None)
        names = {name for name, _ in (model.unstack(weights) if isinstance(model, UnstackingModel) else weights)}
        return not names.isdisjoint(model.draft_head.expected())

    def _fill(self, context: ModelContext, kept: bool = False) -> tuple[ModelProtocol, Quantizer]:
        """The model with its weights, and what has counted these. On torch's meta device the weights have no values,
        but everything else about them is checked as on another device; of those that are ``kept`` packed, only what
        else the model needs is read."""
        model, bare = self._model(context), context.device.type == "meta"

        def quantize(weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
            return (unfilled if weight_NK.is_meta else context.kernels.quantize)(weight_NK, bits)

        quantizer = self._quantizer(model, quantize, context.dtype)
        with self.checkpoint.placed(), Named(f"{self.family.whose} cannot be loaded"):
            weights = quantizer(self._for_model(model, context, kept))
            model.load(weights if bare else track(weights, "weights", len(model.expected())))
        return model, quantizer

    def _quantizer(self, model: ModelProtocol, quantize: Quantize, dtype: torch.dtype) -> Quantizer:
        asked = self.settings.model
        spared = frozenset(model.spared if isinstance(model, SparingModel) else ())
        return Quantizer(
            asked.quantization, asked.plain_layers, asked.activations, model.vocab_size, quantize, dtype, spared
        )

    def _for_model(
        self, model: ModelProtocol, context: ModelContext, kept: bool = False
    ) -> Iterable[tuple[str, Weight]]:
        """The weights as the checkpoint has them, by the names of the model; on the meta device if the context's is, or
        if they are ``kept`` packed."""
        bare = context.device.type == "meta"
        weights: Iterable[tuple[str, Weight]]
        if self.settings.model.load_format == "dummy":
            shapes, dtype = model.expected(), context.dtype
            weights = dummy_tensors(shapes, dtype)
            if bare:
                weights = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items())
        else:
            packed = frozenset(model.packed if kept and isinstance(model, PackingModel) else ())
            weights = self.read(None if bare else packed)
        return model.unstack(weights) if isinstance(model, UnstackingModel) else weights


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores its weights."""

    method: str | None
    """The hub's name for how they are quantized; None if they are not."""
    forms: Sequence[str]
    nbytes: int
    """Of its files."""

    def __str__(self) -> str:
        return f"{self.method or 'not quantized'}: {', '.join(self.forms)}, {self.nbytes / 2**20:.1f} MiB"


def stored(settings: Settings, format: Offer, checkpoint: Checkpoint) -> Stored:
    """What the checkpoint has in store, by the headers of a few weights of each kind. Raises CheckpointError."""
    kinds: dict[str, list[str]] = {}
    forms: dict[str, None] = {}
    with checkpoint.placed():
        outlines = Outlines(checkpoint.container.tensors())
        read: WeightFormatProtocol = format.build(settings, checkpoint.config, outlines)
        for name in read.names():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        for names in kinds.values():
            for name in {names[0], names[len(names) // 2], names[-1]}:
                forms[form_of(outlines.weight(name, read))] = None
    return Stored(checkpoint.quant_method or None, sorted(forms), checkpoint.nbytes)


def open_checkpoint(
    settings: Settings, path: str | None, plugins: Plugins, *, outlines: Path | None = None
) -> Checkpoint:
    """The checkpoint of that name, downloaded if it has to be, into the folder ``outlines`` without the weights' values
    if it is given. Raises SettingsError, CheckpointError and PluginError."""
    if path is None:
        raise SettingsError("model.path is not set: give a folder, file, hub id or bundled name, e.g. --model demo.")
    plugins.check_bundled(path)
    place = locate(
        path,
        bundled=plugins.checkpoints,
        suffixes=plugins.suited("container"),
        tokenizers=plugins.suited("tokenizer"),
        revision=settings.model.revision,
        outlines=outlines,
    )
    return Checkpoint(plugins.choose("container", settings, [ending(place)]).build(settings, place))
