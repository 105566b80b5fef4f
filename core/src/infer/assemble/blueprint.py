"""What an engine is to be made of, found without loading it. Every backend is chosen here, once, and the log says
which."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch

from infer import device as devices
from infer.assemble.adapters import PreparedAdapter, adapters_to_load
from infer.assemble.devices import choose_device, for_device
from infer.assemble.identity import identity, packed_identity
from infer.assemble.kept import KeptWeights, weights_folder
from infer.assemble.sizes import Sketch, Taken
from infer.assemble.texts import Texts, check_tokenizer, read_texts
from infer.assemble.texts import read_beforehand as read_beforehand  # for processes that wait for a model
from infer.assemble.weights import Weights, open_checkpoint
from infer.checkpoint import Checkpoint, ending
from infer.contracts.cache import CacheContext, CachePoolProtocol, StatefulPool
from infer.contracts.kernels import KeepingKernels, KernelsProtocol
from infer.contracts.model import (
    DraftHead,
    DraftingModel,
    LayerReadingHead,
    ModelContext,
    ModelProtocol,
    ReadableModel,
    StatefulModel,
)
from infer.contracts.proposer import OwnHead, ProposerContext, ProposerRegistration, SecondModel
from infer.contracts.sections import AdaptersSettings, Settings, slow_dtype
from infer.engine.exactness import LENGTH
from infer.errors import InferError, SettingsError
from infer.plugins.discovery import Offer, Plugins
from infer.plugins.inspection import Named

log = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LEN = 4096
"""``engine.max_seq_len`` if neither settings nor checkpoint nor cache limit it. If the settings do not ask for longer
sequences, this is also how many positions per sequence of a full batch the cache should hold."""


SMALL_TOKENIZER_BYTES = 16 << 20
"""Of tokenizer.json. Reading one takes some twelve times as much."""


def free_memory(settings: Settings) -> int:
    """Bytes that are free where the model would be."""
    return devices.free_memory(choose_device(settings.model.device))


def bound_memory(least: int, most: int) -> None:
    """Have every engine of this process reckon with no less and no more free memory than this."""
    devices.bound_memory(least, most)


class Blueprint:
    """What settings, checkpoint and device choose for an engine, without the weights' values: ``infer doctor`` and the
    arithmetic of several models ask for no more. Each part is chosen and made when it is first asked for, and kept;
    what keeps a part from being made raises an InferError, and the others can still be asked for."""

    def __init__(self, settings: Settings, plugins: Plugins, *, outlines: Path | None = None) -> None:
        """A checkpoint that has to be downloaded goes into the folder ``outlines``, without the weights' values, if one
        is given. Raises SettingsError if there is no such device."""
        self.device = choose_device(settings.model.device)
        self.settings, self.plugins = for_device(settings, self.device), plugins
        self._outlines = outlines
        self._chosen: dict[str, Offer] = {}

    # Choices

    def there(self, point: str) -> Sequence[str]:
        """What decides among an extension point's offers: the device, or what the checkpoint says."""
        if point == "kernels":
            return [self.device.type]
        if point == "container":
            return [ending(self.checkpoint.path)]
        if point == "model":
            return self.checkpoint.architectures or ["not stated"]
        return [self.checkpoint.quant_method] if point == "weights" else []

    def chosen(self, point: str) -> Offer:
        """The offer that settings, device and checkpoint choose for an extension point."""
        if point not in self._chosen:
            self._chosen[point] = self.plugins.choose(point, self.settings, self.there(point))
        return self._chosen[point]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.settings, self.settings.model.path, self.plugins, outlines=self._outlines)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.settings, self.chosen("model"), self.chosen("weights"), self.checkpoint)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that ``model.dtype`` stands for."""
        name = self.settings.model.dtype
        dtype = self.checkpoint.dtype if name == "auto" else getattr(torch, name)
        if why := slow_dtype(dtype_name(dtype), self.device.type):
            if name != "auto":
                raise SettingsError(why)
            log.info("model.dtype: the checkpoint's float16 is slow on a CPU; using bfloat16")
            return torch.bfloat16
        assert isinstance(dtype, torch.dtype)
        return dtype

    @cached_property
    def kernels(self) -> KernelsProtocol:
        cache, backend = self.chosen("cache"), self.chosen("kernels")
        self._check_kv_dtype(backend, cache)
        made: KernelsProtocol = backend.build(self.settings, self.device)
        log.info("kernels %s: %s", backend.name, backend.about or backend.registration.description)
        return made

    @cached_property
    def kept_weights(self) -> KeptWeights | None:
        """Where packed weights are kept, if there are enough of them; None if they are not."""
        asked, kernels = self.settings.model, self.kernels
        if asked.weight_cache is None or asked.load_format == "dummy" or not isinstance(kernels, KeepingKernels):
            return None
        chosen = [self.chosen(point) for point in ("model", "weights", "kernels")]
        identity = packed_identity(self.settings, self.checkpoint, self._shortest, chosen, kernels.layout)
        folder = weights_folder() if asked.weight_cache == "auto" else Path(asked.weight_cache).expanduser()
        return KeptWeights(folder, int(asked.weight_cache_gib * 2**30), identity)

    @cached_property
    def length(self) -> tuple[int, str]:
        """``engine.max_seq_len``, or else as many positions as the checkpoint was made for and the cache can hold, and
        a sentence that says which."""
        least = self._shortest
        asked, own, cache = self.settings.engine.max_seq_len, self.checkpoint.max_positions, self.chosen("cache")
        if asked is not None:
            if asked > own:
                raise SettingsError(
                    f"engine.max_seq_len is {asked}, but the checkpoint was made for {own} positions; lower it or "
                    "leave it out."
                )
            return asked, f"{asked} positions, as set"
        held, why = DEFAULT_MAX_SEQ_LEN, f"cache.backend {cache.name} reserves them for every request"
        if own == sys.maxsize:
            own, why = DEFAULT_MAX_SEQ_LEN, "config.json does not say how many there are"
        elif own > DEFAULT_MAX_SEQ_LEN and cache.longest is not None:
            sketch = self.sketch(least)
            pool = self._cache_context(sketch.model, replace(least, max_seq_len=own))
            with Named(f"{cache.whose} cannot say how long a sequence may be"):
                held = cache.longest(pool, cache.own(self.settings), self._besides(sketch.model, sketch.nbytes))
            why = "memory holds no more"
        length = max(2, min(held, own))
        if length < self.checkpoint.max_positions:
            return length, f"{length} positions, fewer than the checkpoint may allow: {why}"
        return length, f"{length} positions, all that the checkpoint was made for"

    @cached_property
    def context(self) -> ModelContext:
        """What the model is made from."""
        return replace(self._shortest, max_seq_len=self.length[0])

    @property
    def _shortest(self) -> ModelContext:
        """The context for sequences of two tokens. It is known before there is memory to tell how long they may be."""
        slots = self.settings.adapters.slots
        return ModelContext(self.kernels, self.dtype, self.device, 2, self._wants_own_head, slots)

    @property
    def _proposer(self) -> ProposerRegistration | None:
        """The chosen proposer's registration, if it may need a draft head."""
        return None if self.settings.engine.speculation is None else self.chosen("proposer").proposer

    @property
    def _wants_own_head(self) -> bool:
        """Whether the model is to have the draft head of its checkpoint."""
        return self._proposer is not None and self._proposer.draft_head

    @property
    def wants_head(self) -> bool:
        """Whether the model is to have a draft head."""
        return self._proposer is not None and self._proposer.reads

    def sketch(self, context: ModelContext, settings: Settings | None = None) -> Sketch:
        """What the model will take, with its draft head if that has a checkpoint of its own; by other ``settings`` if
        they are given. Raises what loading raises, except for what only values show."""
        settings = settings or self.settings
        sketch = replace(self.weights, settings=settings).sketch(context)
        if (other := self._head(sketch.model, context, settings)) is not None:
            head = other.weights.sketch(other.context)
            attach(sketch.model, head.model)
            peak = max(sketch.peak, sketch.nbytes + head.peak)
            sketch = replace(sketch, nbytes=sketch.nbytes + head.nbytes, peak=peak)
        return sketch

    @cached_property
    def _texts(self) -> Texts:
        return read_texts(self.settings, self.plugins, self.checkpoint)

    @property
    def small_tokenizer(self) -> Path | None:
        """The tokenizer.json, unless there is none or it takes more memory than a process without a model may have
        to read it."""
        asked = self.settings.model.tokenizer
        file = Path(self.checkpoint.path) / "tokenizer.json" if asked is None else Path(asked)
        if file.name in self.plugins.suited("tokenizer"):
            return None
        return file if file.is_file() and file.stat().st_size <= SMALL_TOKENIZER_BYTES else None

    def texts(self, vocab_size: int) -> Texts:
        """How a model of so many tokens reads and writes."""
        check_tokenizer(self._texts.tokenizer, self.settings.model.tokenizer, self.checkpoint, vocab_size)
        return self._texts

    def _check_kv_dtype(self, *offers: Offer) -> None:
        """Raises SettingsError unless all offers know ``cache.kv_dtype``."""
        asked = self.settings.cache.kv_dtype
        for offer in offers:
            if asked not in ("auto", *offer.kv_dtypes):
                setting = f"{offer.point}.backend"
                raise SettingsError(
                    f'cache.kv_dtype is "{asked}", which {setting} {offer.name!r} of {offer.distribution} does not '
                    f'know: it has K and V in the model\'s dtype; use "auto", or another {setting}.'
                )

    # The cache, for a model with weights or a sketch of one

    def make_pool(
        self, model: ModelProtocol | DraftHead, yet_to_take: int = 0, what: str = "cache", *, lasting: bool = False
    ) -> CachePoolProtocol:
        """The cache pool of the model, or of its draft head, which others leave ``yet_to_take`` bytes less than are
        free now. The log calls it ``what``. What is in it may outlive the process if it is ``lasting``. Raises
        InferError if there is too little memory."""
        engine, offer, context = self.settings.engine, self.chosen("cache"), self.context
        batch, max_seq_len, enough = engine.max_batch_size, context.max_seq_len, None
        if engine.max_seq_len is None and max_seq_len > DEFAULT_MAX_SEQ_LEN:
            # Unless the settings ask for long sequences, the cache takes no more memory than it would for shorter ones.
            enough = max(batch * DEFAULT_MAX_SEQ_LEN, max_seq_len)
        given = self._cache_context(model, context, self._besides(model, yet_to_take), enough)
        if lasting:
            chosen = [self.chosen(point) for point in ("model", "weights", "kernels")]
            given = replace(given, identity=partial(identity, self.settings, self.checkpoint, context, chosen))
        if given.states and not offer.states:
            raise SettingsError(
                f'The model has recurrent layers, whose states cache.backend "{offer.name}" of {offer.distribution} '
                "does not keep; choose another."
            )
        try:
            pool: CachePoolProtocol = offer.build(self.settings, given)
        except (MemoryError, RuntimeError, OSError) as error:
            raise InferError(
                f"The cache for engine.max_batch_size {batch} and {max_seq_len} positions does "
                f"not fit into memory ({error}); lower engine.max_batch_size or engine.max_seq_len."
            ) from error
        if pool.free_tokens() < (2 if engine.max_seq_len is None else max_seq_len):
            raise SettingsError(
                f"The cache has room for {pool.free_tokens()} positions, but one sequence may need engine.max_seq_len "
                f"= {max_seq_len}; enlarge the cache or lower engine.max_seq_len."
            )
        log.info("%s %s: %s", what, offer.name, self.in_words(pool))
        return pool

    def _besides(self, model: ModelProtocol | DraftHead, yet_to_take: int) -> int:
        """``yet_to_take``, and of the rest of memory what the K and V of the model's draft head need if the two pools
        have as many positions."""
        head = draft_head(model)
        if head is None:
            return yet_to_take
        own, others = (
            sum(spec.num_kv_heads * spec.head_size * (2 - spec.v_is_k) for spec in x.attention) for x in (head, model)
        )
        return yet_to_take + max(0, devices.free_memory(self.device) - yet_to_take) * own // (own + others)

    def in_words(self, pool: CachePoolProtocol) -> str:
        """How large a pool is."""
        positions, kv_dtype = pool.free_tokens(), self.settings.cache.kv_dtype
        states = pool.state_bytes if isinstance(pool, StatefulPool) else 0
        nbytes = pool.nbytes - states
        how = dtype_name(self.dtype) if kv_dtype == "auto" else kv_dtype
        text = f"{positions} positions of {nbytes // positions} bytes ({how}) = {nbytes / 2**20:.1f} MiB"
        return f"{text}, and states of recurrent layers = {states / 2**20:.1f} MiB" if states else text

    @property
    def _max_chunk(self) -> int | None:
        """The most positions by which a pass extends a sequence, also in the check at the start; None: any number."""
        engine = self.settings.engine
        if not engine.use_chunked_prefill:
            return None
        return max(LENGTH, min(engine.prefill_chunk_size, engine.max_tokens_per_step or sys.maxsize))

    def _cache_context(
        self, model: ModelProtocol | DraftHead, context: ModelContext, yet_to_take: int = 0, enough: int | None = None
    ) -> CacheContext:
        engine = self.settings.engine
        return CacheContext(
            model.attention,
            engine.max_batch_size,
            context.max_seq_len,
            context.dtype,
            context.device,
            context.kernels,
            enough,
            self.settings.cache.kv_dtype,
            self._max_chunk,
            yet_to_take,
            model.states if isinstance(model, StatefulModel) else (),
            0 if engine.speculation is None else engine.max_draft_tokens,
        )

    def adapters(self, model: ModelProtocol) -> Mapping[str, PreparedAdapter]:
        """The adapters that are loaded at the start; a sketch of the model will do for their sizes. Raises
        SettingsError if one cannot be."""
        return adapters_to_load(model, self.settings, self.plugins, self.checkpoint.config)

    def adapter_sizes(self, adapters: Mapping[str, PreparedAdapter]) -> Mapping[str, int]:
        """The bytes of each."""
        return {name: adapter.values * self.dtype.itemsize for name, adapter in adapters.items()}

    def taken(self, most: int) -> Taken:
        """What the model would take of ``most`` bytes, found without its weights. Where these are too few for the
        weights, the rest is not counted. Raises InferError."""
        sketch = self.sketch(self.context)
        peak, held, positions = sketch.peak, sketch.nbytes, self.length[0]
        if peak <= most:
            held += sum(self.adapter_sizes(self.adapters(sketch.model)).values())
            pool = self.make_pool(sketch.model, held)
            positions, held = min(positions, pool.free_tokens()), held + pool.nbytes
            if (head := draft_head(sketch.model)) is not None:
                held += self.make_pool(head, held).nbytes
            for other in self._others(sketch.model, positions):
                draft = other.weights.sketch(other.context)
                peak, held = max(peak, held + draft.peak), held + draft.nbytes
                if max(peak, held) <= most:
                    held += other.make_pool(draft.model, held).nbytes
        return Taken(max(peak, held), sketch.nbytes, positions)

    # What drafts for the model

    def _proposer_context(
        self,
        texts: Texts,
        vocab_size: int,
        max_seq_len: int,
        load: Callable[[str], SecondModel],
        own: OwnHead | None = None,
    ) -> ProposerContext:
        engine, tokenizer = self.settings.engine, texts.tokenizer
        return ProposerContext(engine, tokenizer, vocab_size, max_seq_len, self.device, self.kernels, load, own)

    def _beside(self, path: str, settings: Settings) -> Self:
        """A further checkpoint, loaded as the first except for what the settings say of that one alone."""
        own = {"path": path, "family": "auto", "tokenizer": None, "revision": None}
        update = {
            "model": settings.model.model_copy(update=own),
            "engine": settings.engine.model_copy(update={"speculation": None}),
            "adapters": AdaptersSettings(),
        }
        return type(self)(settings.model_copy(update=update), self.plugins, outlines=self._outlines)

    def _second(self, path: str, max_seq_len: int) -> Self:
        """The checkpoint of a second model."""
        other = self._beside(path, self.settings)
        positions = min(max_seq_len, other.checkpoint.max_positions)
        other.context = ModelContext(self.kernels, other.dtype, self.device, positions)
        return other

    def _head(self, model: ModelProtocol, context: ModelContext, settings: Settings) -> Self | None:
        """The checkpoint of the model's draft head, if it has one of its own."""
        if self._proposer is None or self._proposer.head_path is None:
            return None
        path = self._proposer.head_path(self.chosen("proposer").own(settings))
        if not isinstance(model, ReadableModel):
            whose = self.weights.family.whose
            raise SettingsError(
                f'engine.speculation is "{settings.engine.speculation}", whose head reads hidden states from between '
                f"the model's layers, but {whose[0].lower()}{whose[1:]} does not yield them; choose ngram or draft."
            )
        other = self._beside(path, settings)
        other.dtype = self.dtype
        other.context = replace(context, draft_head=False, adapter_slots=0, drafts_for=model)
        return other

    def _others(self, sketch: ModelProtocol, max_seq_len: int) -> list[Self]:
        """Those of the checkpoints that the proposer would load besides the model, found without weights: it is made up
        to where it asks for the first of them."""
        found = list[Self]()
        if self.settings.engine.speculation is None or self.wants_head:
            return found

        def load(path: str) -> SecondModel:
            found.append(self._second(path, max_seq_len))
            raise InferError("There are no weights yet.")

        texts = self.texts(sketch.vocab_size)
        given = self._proposer_context(texts, sketch.vocab_size, max_seq_len, load)
        try:
            self.chosen("proposer").build(self.settings, given)
        except InferError:
            if not found:
                raise
        return found


def draft_head(model: ModelProtocol | DraftHead) -> DraftHead | None:
    """The model's draft head, if it is loaded."""
    return model.draft_head if isinstance(model, DraftingModel) else None


def attach(model: ModelProtocol, head: ModelProtocol) -> None:
    """Give the model a draft head of another checkpoint; both have been checked."""
    assert isinstance(model, ReadableModel)
    assert isinstance(head, LayerReadingHead)
    model.attach(head)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
