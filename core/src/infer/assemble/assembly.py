"""Makes a running engine from settings. Every backend is chosen here, once, and the log says which."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from infer.assemble.sizes import Meter, Sketch
from infer.checkpoint import Checkpoint, Outlines, dummy_tensors, ending, locate
from infer.checkpoint.quantise import Quantise, Quantiser
from infer.contracts.cache import CacheContext, CachePoolProtocol, TruncatingPool
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import ModelContext, ModelProtocol, SparingModel, UnstackingModel
from infer.contracts.params import SamplingParams
from infer.contracts.proposer import ProposerContext, ProposerProtocol, SecondModel
from infer.contracts.request import Request, too_long
from infer.contracts.scheduler import SchedulerContext, SchedulerProtocol
from infer.contracts.sections import EngineSettings, Settings, slow_dtype
from infer.contracts.text import PartProtocol, ReasoningTags
from infer.contracts.weights import ContainerProtocol, TensorFilesProtocol, WeightFormatProtocol
from infer.device import blocks_given_back
from infer.engine.checked import CheckedPool, CheckedScheduler
from infer.engine.engine import Engine
from infer.engine.exactness import LENGTH, self_check
from infer.engine.graphs import DecodeGraphs
from infer.engine.largest import activation_bytes
from infer.engine.loop import EngineLoop
from infer.engine.payoff import Costs, Payoff, measure
from infer.engine.runner import Runner
from infer.engine.speculation import Speculation
from infer.errors import CheckpointError, InferError, PluginError, SettingsError
from infer.kernels.quantise import unfilled
from infer.plugins import inspection
from infer.plugins.discovery import Offer, Plugins
from infer.plugins.inspection import CheckedPart, Named
from infer.plugins.slots import SLOTS
from infer.progress import track
from infer.settings import compose, plugin_settings
from infer.text.encoding import Encoder, TooLongError
from infer.text.grammar import Grammar, Grammars
from infer.text.templates import ChatTemplate
from infer.text.tool_formats import ToolFormat
from infer.weight import Weight, form_of

log = logging.getLogger(__name__)

GPU_STEP, GPU_CHUNK = 8192, 2048
"""``engine.max_tokens_per_step`` and ``engine.prefill_chunk_size`` on a GPU if the settings do not say: enough tokens
to keep it busy, and a bound on the memory that a pass takes."""
DEFAULT_MAX_SEQ_LEN = 4096
"""``engine.max_seq_len`` if neither settings nor checkpoint nor cache limit it. If the settings do not ask for longer
sequences, this is also how many positions per sequence of a full batch the cache should hold."""


@dataclass(frozen=True)
class Served:
    """What the client's side needs to know about the served model."""

    name: str
    tokenizer: Tokenizer
    encoder: Encoder
    template: ChatTemplate | None
    tool_formats: Sequence[ToolFormat]
    """How the model may write tool calls: as the settings say, or all that are installed, in the order to try."""
    reasoning: ReasoningTags | None
    """The tags around the model's reasoning; None if it does not reason."""
    grammars: Grammars
    vocab_size: int
    max_seq_len: int
    cache_tokens: int
    """How many positions the cache holds."""
    sampling: Mapping[str, Any]
    """Default sampling parameters: the checkpoint's, or none if ``model.generation_config`` says so."""
    quantization: str | None
    """How the weights are quantised: as ``model.quantization`` or the checkpoint says; None if they are not."""
    hidden_size: int | None
    """Of the hidden states, of which embeddings are made; None if config.json does not say."""
    pooling: str
    """What embeddings are made of: ``last``, ``mean``, or what the checkpoint says and infer does not know."""
    exact: bool
    """Whether the start-up check found that answers do not depend, bit for bit, on batching and chunking."""
    engine: EngineSettings
    """As they are on this device: see ``for_device``."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text. Raises RequestError if it is too long for the model."""
        try:
            return self.encoder(text, special=special, most=self.max_seq_len - 1)
        except TooLongError as error:
            raise too_long(error.count, self.max_seq_len) from None

    def defaulted(self, params: SamplingParams | None = None) -> SamplingParams:
        """``params`` with the default sampling parameters for those that are not set."""
        params = params or SamplingParams()
        unset = {name: value for name, value in self.sampling.items() if name not in params.model_fields_set}
        return params.model_copy(update=unset) if unset else params

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        special: bool = True,
        grammar: Grammar | None = None,
        **fields: Any,
    ) -> Request:
        """Make a checked Request: tokenise the prompt, with the tokenizer's leading special tokens if ``special``, and
        compile its structured outputs unless ``grammar`` is given. ``fields`` are passed to ``Request.make``. A long
        text or a new grammar takes a while. Raises RequestError."""
        ids = self.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        if grammar is None and params.structured_outputs is not None:
            grammar = self.grammars.compile(params.structured_outputs)
        return Request.make(
            tuple(ids), params, vocab_size=self.vocab_size, max_seq_len=self.max_seq_len, grammar=grammar, **fields
        )


def start(settings: Settings, plugins: Plugins) -> tuple[EngineLoop, Served]:
    """Start the engine's thread, and load the model in it. torch's operations run on OpenMP, which gives every thread
    that computes a team of its own; with more than one team, the members would sleep after every operation."""
    served: Served

    def make_engine(publish: Callable[..., None]) -> Engine:
        nonlocal served
        engine, served = _load(settings, plugins, publish)
        return engine

    settings = compose(settings, plugins)
    close_observers = plugins.observe(settings)
    try:
        max_open = settings.engine.max_batch_size + settings.engine.max_waiting_requests
        return EngineLoop(make_engine, max_open, close_observers), served
    except BaseException:
        close_observers()
        raise


def _load(settings: Settings, plugins: Plugins, publish: Callable[..., None]) -> tuple[Engine, Served]:
    began = time.perf_counter()
    if settings.kernels.threads is not None:
        torch.set_num_threads(settings.kernels.threads)
    device = choose_device(settings.model.device)
    plugins.check_names(settings)
    settings = for_device(settings, device)
    formats = plugins.candidates("tool_format", settings)
    checkpoint = open_checkpoint(settings, settings.model.path, plugins)
    family = plugins.choose("model", settings, checkpoint.architectures)
    format = plugins.choose("weights", settings, [checkpoint.quant_method])
    dtype = choose_dtype(settings.model.dtype, checkpoint, device)
    sampling = checkpoint.sampling if settings.model.generation_config == "auto" else {}
    cache = plugins.choose("cache", settings)
    kernels = make_kernels(settings, plugins, device, cache)
    max_seq_len, why = longest(settings, family, format, checkpoint, ModelContext(kernels, dtype, device, 2), cache)
    log.info("engine.max_seq_len: %s", why)
    model = _loaded(settings, family, format, checkpoint, ModelContext(kernels, dtype, device, max_seq_len))
    context = ModelContext(kernels, dtype, device, max_seq_len)
    pool = make_pool(settings, cache, model, context, _activations(settings, model, context))
    log.info("cache %s: %s", cache.name, in_words(settings, pool, dtype))
    if settings.engine.max_seq_len is None and pool.free_tokens() < max_seq_len:
        max_seq_len = pool.free_tokens()
        log.info("engine.max_seq_len: %d positions, since the cache has no more", max_seq_len)
    tokenizer, template, reasoning = texts(settings, plugins, checkpoint, model.vocab_size)
    with Named("The check at the start failed"):
        graphs = _graphs(settings, model, pool, kernels, device)
        faults = self_check(
            model,
            pool,
            kernels,
            graphs,
            max_batch_size=settings.engine.max_batch_size,
            max_seq_len=max_seq_len,
            max_chunk=_max_chunk(settings),
            max_tokens=settings.engine.max_tokens_per_step,
            max_drafts=0 if settings.engine.speculation is None else settings.engine.max_draft_tokens,
            device=device,
        )
    exact = not faults
    for fault in faults:
        log.warning("not exact: %s", fault)
    scheduler = _scheduler(settings, plugins, pool, cache)
    lag = 0 if device.type == "cpu" else 1

    proposing = ProposerContext(
        settings.engine,
        tokenizer,
        model.vocab_size,
        max_seq_len,
        device,
        kernels,
        lambda path: _second(settings, plugins, path, kernels, device, max_seq_len),
    )
    runner = Runner(model, pool, kernels, device, settings.engine.max_batch_size, graphs)
    speculation = _speculation(settings, plugins, proposing, runner, pool, lag)

    engine = Engine(
        runner,
        scheduler,
        pool,
        tokenizer=tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        max_seq_len=max_seq_len,
        lag=lag,
        publish=publish,
        notify=plugins.notify,
        speculation=speculation,
    )
    log.info(
        "%s: %s on %s, %d positions, exact: %s, loaded in %.1f s",
        settings.model.path,
        str(dtype).removeprefix("torch."),
        device,
        max_seq_len,
        str(exact).lower(),
        time.perf_counter() - began,
    )
    return engine, Served(
        name=settings.server.served_model_name or str(settings.model.path),
        tokenizer=tokenizer,
        encoder=Encoder(tokenizer),
        template=template,
        tool_formats=[_tool_format(settings, offer) for offer in formats],
        reasoning=reasoning,
        grammars=Grammars(tokenizer, model.vocab_size, checkpoint.eos_token_ids),
        vocab_size=model.vocab_size,
        max_seq_len=max_seq_len,
        cache_tokens=pool.free_tokens(),
        sampling=sampling,
        quantization=settings.model.quantization or checkpoint.quant_method or None,
        hidden_size=checkpoint.hidden_size,
        pooling=checkpoint.pooling,
        exact=exact,
        engine=settings.engine,
    )


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores its weights."""

    method: str | None
    """The hub's name for how they are quantised; None if they are not."""
    forms: Sequence[str]
    nbytes: int
    """Of its files."""

    def __str__(self) -> str:
        return f"{self.method or 'not quantised'}: {', '.join(self.forms)}, {self.nbytes / 2**20:.1f} MiB"


def stored(settings: Settings, plugins: Plugins, checkpoint: Checkpoint) -> Stored:
    """What the checkpoint has in store, by the headers of a few weights of each kind. Raises CheckpointError."""
    format = plugins.choose("weights", settings, [checkpoint.quant_method])
    kinds: dict[str, list[str]] = {}
    forms: dict[str, None] = {}
    with checkpoint.placed():
        outlines = Outlines(checkpoint.container.tensors())
        read = _weight_format(settings, format, checkpoint, outlines)
        for name in read.names():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        for names in kinds.values():
            for name in {names[0], names[len(names) // 2], names[-1]}:
                forms[form_of(outlines.weight(name, read))] = None
    return Stored(checkpoint.quant_method or None, sorted(forms), checkpoint.nbytes)


def choose_device(name: str) -> torch.device:
    """The device that ``model.device`` stands for. Raises SettingsError."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingsError('model.device is "cuda", but torch sees no GPU here; use "cpu" or "auto".')
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def for_device(settings: Settings, device: torch.device) -> Settings:
    """The settings with the device's defaults: on a GPU, longer chunks, and a limit on the tokens of a step."""
    engine, more = settings.engine, {"prefill_chunk_size": GPU_CHUNK}
    if device.type == "cpu" or not engine.use_chunked_prefill:
        return settings
    more["max_tokens_per_step"] = max(GPU_STEP, engine.max_batch_size)
    unset = {name: value for name, value in more.items() if name not in engine.model_fields_set}
    return settings.model_copy(update={"engine": engine.model_copy(update=unset)})


def open_checkpoint(
    settings: Settings, path: str | None, plugins: Plugins, *, outlines: Path | None = None
) -> Checkpoint:
    """The checkpoint of that name, downloaded if it has to be, into the folder ``outlines`` without the weights' values
    if it is given. Raises SettingsError, CheckpointError and PluginError."""
    if path is None:
        raise SettingsError("model.path is not set: give a folder, file, hub id or bundled name, e.g. --model demo.")
    plugins.check_bundled(path)
    slot = SLOTS["container"]
    suffixes = [suffix for offer in plugins.offers["container"] for suffix in slot.named(offer.registration)]
    revision = settings.model.revision
    place = locate(path, bundled=plugins.checkpoints, suffixes=suffixes, revision=revision, outlines=outlines)
    offer = plugins.choose("container", settings, [ending(place)])
    return Checkpoint(offer.make(ContainerProtocol, place, plugin_settings(settings, "container", offer.name)))


def choose_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The type that ``model.dtype`` stands for. Raises SettingsError and CheckpointError."""
    dtype = checkpoint.dtype if name == "auto" else getattr(torch, name)
    if why := slow_dtype(str(dtype).removeprefix("torch."), device.type):
        if name != "auto":
            raise SettingsError(why)
        log.info("model.dtype: the checkpoint's float16 is slow on a CPU; using bfloat16")
        return torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    return dtype


def make_kernels(settings: Settings, plugins: Plugins, device: torch.device, cache: Offer) -> KernelsProtocol:
    """The kernels that the settings choose. Raises PluginError, and SettingsError if they or the cache do not know
    ``cache.kv_dtype``."""
    backend = plugins.choose("kernels", settings, [device.type])
    _check_kv_dtype(settings, backend, cache)
    made: KernelsProtocol = backend.make(KernelsProtocol, device, plugin_settings(settings, "kernels", backend.name))
    log.info("kernels %s: %s", backend.name, backend.about or backend.registration.description)
    return made


def longest(
    settings: Settings, family: Offer, format: Offer, checkpoint: Checkpoint, context: ModelContext, cache: Offer
) -> tuple[int, str]:
    """``engine.max_seq_len``, or else as many positions as the checkpoint was made for and the cache can hold, and a
    sentence that says which. Raises InferError."""
    asked, own = settings.engine.max_seq_len, checkpoint.max_positions
    if asked is not None:
        if asked > own:
            raise SettingsError(
                f"engine.max_seq_len is {asked}, but the checkpoint was made for {own} positions; lower it or leave it "
                "out."
            )
        return asked, f"{asked} positions, as set"
    held, why = DEFAULT_MAX_SEQ_LEN, f"cache.backend {cache.name} reserves them for every request"
    if own == sys.maxsize:
        own, why = DEFAULT_MAX_SEQ_LEN, "config.json does not say how many there are"
    elif own > DEFAULT_MAX_SEQ_LEN and cache.longest is not None:
        sketched = sketch(settings, family, format, checkpoint, context)
        pool = _cache_context(settings, sketched.model, replace(context, max_seq_len=own))
        with Named(f"{cache.whose} cannot say how long a sequence may be"):
            held = cache.longest(pool, plugin_settings(settings, "cache", cache.name), sketched.nbytes)
        why = "memory holds no more"
    length = max(2, min(held, own))
    if length < checkpoint.max_positions:
        return length, f"{length} positions, fewer than the checkpoint may allow: {why}"
    return length, f"{length} positions, all that the checkpoint was made for"


def _max_chunk(settings: Settings) -> int | None:
    """The most positions by which a pass extends a sequence, also in the check at the start; None: any number."""
    engine = settings.engine
    if not engine.use_chunked_prefill:
        return None
    return max(LENGTH, min(engine.prefill_chunk_size, engine.max_tokens_per_step or sys.maxsize))


def _activations(settings: Settings, model: ModelProtocol, context: ModelContext) -> int:
    """The most bytes that a pass takes besides weights and cache. Raises InferError if there are not that many."""
    pool = _cache_context(settings, model, context)
    nbytes = activation_bytes(model, pool, settings.engine.max_tokens_per_step, pool.max_chunk or context.max_seq_len)
    if nbytes:
        log.info("a pass of the largest size takes %.1f MiB besides weights and cache", nbytes / 2**20)
    return nbytes


def _check_kv_dtype(settings: Settings, *offers: Offer) -> None:
    """Raises SettingsError unless all offers know ``cache.kv_dtype``."""
    asked = settings.cache.kv_dtype
    for offer in offers:
        if asked not in ("auto", *offer.kv_dtypes):
            raise SettingsError(
                f'cache.kv_dtype is "{asked}", which {offer.slot}.backend {offer.name!r} of {offer.distribution} does '
                f'not know: it has K and V in the model\'s dtype; use "auto", or another {offer.slot}.backend.'
            )


def _scheduler(settings: Settings, plugins: Plugins, pool: CachePoolProtocol, cache: Offer) -> SchedulerProtocol:
    offer = plugins.choose("scheduler", settings)
    own = plugin_settings(settings, "scheduler", offer.name)
    named: Any = CheckedPool(pool, cache.whose)
    made: SchedulerProtocol = offer.make(SchedulerProtocol, SchedulerContext(named, settings.engine), own)
    # Core's own schedulers are tested, and checking their plans would take longer than planning.
    return CheckedScheduler(made, offer.whose, thorough=offer.distribution != "infer-core")


def _speculation(
    settings: Settings,
    plugins: Plugins,
    context: ProposerContext,
    runner: Runner,
    pool: CachePoolProtocol,
    lag: int,
) -> Speculation | None:
    """None if the settings ask for no speculation."""
    if settings.engine.speculation is None:
        return None
    offer = plugins.choose("proposer", settings)
    if not isinstance(pool, TruncatingPool):
        raise SettingsError(
            f'engine.speculation is "{offer.name}", but {type(pool).__name__} cannot take positions back (truncate), '
            "as wrong draft tokens require; choose another cache.backend, or none."
        )
    proposer = offer.make(ProposerProtocol, context, plugin_settings(settings, "proposer", offer.name))
    most, began = settings.engine.max_draft_tokens, time.perf_counter()
    rows = min(settings.engine.max_batch_size * (1 + most), context.max_seq_len)
    plain, drafts = measure(runner, pool, pool.truncate, rows)
    times = ", ".join(f"{1e3 * plain[rows]:.1f} or {1e3 * drafts[rows]:.1f} for {rows}" for rows in plain)
    seconds = time.perf_counter() - began
    log.info("speculation by %s; ms of a pass without or with drafts, by rows: %s (%.1f s)", offer.name, times, seconds)
    return Speculation(
        proposer,
        offer.whose,
        pool,
        Payoff(Costs(plain, drafts), waits=lag > 0),
        truncate=pool.truncate,
        most=most,
        max_tokens_per_step=settings.engine.max_tokens_per_step,
        vocab_size=context.vocab_size,
    )


def _model(settings: Settings, family: Offer, checkpoint: Checkpoint, context: ModelContext) -> ModelProtocol:
    """The model, not loaded yet."""
    own = plugin_settings(settings, "model", family.name)
    with checkpoint.placed():
        model: ModelProtocol = family.make(ModelProtocol, checkpoint.config, context, own)
    checkpoint.check_ids(model.vocab_size)
    return model


def _fill(
    settings: Settings, family: Offer, format: Offer, checkpoint: Checkpoint, context: ModelContext
) -> tuple[ModelProtocol, Quantiser]:
    """The model with its weights, and what has counted these. On torch's meta device the weights have no values, but
    everything else about them is checked as on another device."""
    model, bare = _model(settings, family, checkpoint, context), context.device.type == "meta"
    quantiser = _quantiser(settings, model, unfilled if bare else context.kernels.quantise, context.dtype)
    with checkpoint.placed(), Named(f"{family.whose} cannot be loaded"):
        weights = quantiser(_weights(settings, format, checkpoint, model, context))
        model.load(weights if bare else track(weights, "weights", len(model.expected())))
    return model, quantiser


def _quantiser(settings: Settings, model: ModelProtocol, quantise: Quantise, dtype: torch.dtype) -> Quantiser:
    asked = settings.model
    spared = frozenset(model.spared if isinstance(model, SparingModel) else ())
    return Quantiser(
        asked.quantization, asked.plain_layers, asked.activations, model.vocab_size, quantise, dtype, spared
    )


def _weights(
    settings: Settings, format: Offer, checkpoint: Checkpoint, model: ModelProtocol, context: ModelContext
) -> Iterable[tuple[str, Weight]]:
    """The weights as the checkpoint has them, by the names of the model; on the meta device if the context's is."""
    bare = context.device.type == "meta"
    weights: Iterable[tuple[str, Weight]]
    if settings.model.load_format == "dummy":
        shapes, dtype = model.expected(), context.dtype
        weights = dummy_tensors(shapes, dtype)
        if bare:
            weights = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items())
    else:
        weights = _read(settings, format, checkpoint, bare)
    return model.unstack(weights) if isinstance(model, UnstackingModel) else weights


def _loaded(
    settings: Settings, family: Offer, format: Offer, checkpoint: Checkpoint, context: ModelContext
) -> ModelProtocol:
    """The model with its weights."""
    with blocks_given_back():
        model, quantiser = _fill(settings, family, format, checkpoint, context)
    log.info("weights, %s: %s", settings.model.quantization or checkpoint.quant_method or "not quantised", quantiser)
    return model


def sketch(settings: Settings, family: Offer, format: Offer, checkpoint: Checkpoint, context: ModelContext) -> Sketch:
    """What the model will take once it is loaded. Only headers are read, and, of formats that need them to tell a
    weight's form, zero points and the like. Raises what loading raises, except for what only values show."""
    bare = replace(context, device=torch.device("meta"))
    try:
        with Meter() as meter:
            model, quantiser = _fill(settings, family, format, checkpoint, bare)
        return Sketch(model, quantiser, meter.live, meter.peak)
    except PluginError as error:  # a family, or kernels, that cannot do without values
        model = _model(settings, family, checkpoint, context)
        quantiser = _quantiser(settings, model, unfilled, context.dtype)
        with checkpoint.placed(), Named(f"{format.whose} cannot be read"):
            for _ in quantiser(_weights(settings, format, checkpoint, model, bare)):
                pass
        total = sum(quantiser.nbytes.values())
        return Sketch(model, quantiser, total, total, str(error))


def _second(
    settings: Settings, plugins: Plugins, path: str, kernels: KernelsProtocol, device: torch.device, max_seq_len: int
) -> SecondModel:
    """A further checkpoint, loaded as the first except for what the settings say of that one alone."""
    own = {"path": path, "family": "auto", "tokenizer": None, "revision": None}
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=own)})
    checkpoint = open_checkpoint(settings, path, plugins)
    family = plugins.choose("model", settings, checkpoint.architectures)
    format = plugins.choose("weights", settings, [checkpoint.quant_method])
    max_seq_len = min(max_seq_len, checkpoint.max_positions)
    context = ModelContext(kernels, choose_dtype(settings.model.dtype, checkpoint, device), device, max_seq_len)
    model = _loaded(settings, family, format, checkpoint, context)
    pool = make_pool(settings, cache := plugins.choose("cache", settings), model, context)
    log.info("cache %s: %s", cache.name, in_words(settings, pool, context.dtype))
    return SecondModel(model, pool, _tokenizer(None, checkpoint, model.vocab_size, frozenset()), max_seq_len)


def _read(settings: Settings, format: Offer, checkpoint: Checkpoint, bare: bool) -> Iterator[tuple[str, Weight]]:
    """The checkpoint's weights, each read when the iterator reaches it; without values if ``bare``."""
    files = checkpoint.container.tensors()
    if not bare:
        read = _weight_format(settings, format, checkpoint, files)
        for name in read.names():
            yield name, read.weight(name)
        return
    outlines = Outlines(files)
    read = _weight_format(settings, format, checkpoint, outlines)
    for name in read.names():
        yield name, outlines.weight(name, read)


def _weight_format(
    settings: Settings, format: Offer, checkpoint: Checkpoint, files: TensorFilesProtocol
) -> WeightFormatProtocol:
    own = plugin_settings(settings, "weights", format.name)
    made: WeightFormatProtocol = format.make(WeightFormatProtocol, checkpoint.config, files, own)
    return made


def _cache_context(
    settings: Settings, model: ModelProtocol, context: ModelContext, yet_to_take: int = 0, enough: int | None = None
) -> CacheContext:
    return CacheContext(
        model.attention,
        settings.engine.max_batch_size,
        context.max_seq_len,
        context.dtype,
        context.device,
        context.kernels,
        enough,
        settings.cache.kv_dtype,
        _max_chunk(settings),
        yet_to_take,
    )


def make_pool(
    settings: Settings, offer: Offer, model: ModelProtocol, context: ModelContext, yet_to_take: int = 0
) -> CachePoolProtocol:
    """The cache pool for ``context.max_seq_len``, which others leave ``yet_to_take`` bytes less than are free now.
    Raises InferError if there is too little memory."""
    batch, max_seq_len, enough = settings.engine.max_batch_size, context.max_seq_len, None
    if settings.engine.max_seq_len is None and max_seq_len > DEFAULT_MAX_SEQ_LEN:
        # Unless the settings ask for long sequences, the cache takes no more memory than it would for shorter ones.
        enough = max(batch * DEFAULT_MAX_SEQ_LEN, max_seq_len)
    given = _cache_context(settings, model, context, yet_to_take, enough)
    try:
        pool: CachePoolProtocol = offer.make(CachePoolProtocol, given, plugin_settings(settings, "cache", offer.name))
    except (MemoryError, RuntimeError, OSError) as error:
        raise InferError(
            f"The cache for engine.max_batch_size {settings.engine.max_batch_size} and {max_seq_len} positions does "
            f"not fit into memory ({error}); lower engine.max_batch_size or engine.max_seq_len."
        ) from error
    if pool.free_tokens() < (2 if settings.engine.max_seq_len is None else max_seq_len):
        raise SettingsError(
            f"The cache has room for {pool.free_tokens()} positions, but one sequence may need engine.max_seq_len = "
            f"{max_seq_len}; enlarge the cache or lower engine.max_seq_len."
        )
    return pool


def in_words(settings: Settings, pool: CachePoolProtocol, dtype: torch.dtype) -> str:
    """How large a pool is."""
    positions, nbytes = pool.free_tokens(), pool.nbytes
    how = str(dtype).removeprefix("torch.") if settings.cache.kv_dtype == "auto" else settings.cache.kv_dtype
    return f"{positions} positions of {nbytes // positions} bytes ({how}) = {nbytes / 2**20:.1f} MiB"


def _graphs(
    settings: Settings,
    model: ModelProtocol,
    pool: CachePoolProtocol,
    kernels: KernelsProtocol,
    device: torch.device,
) -> DecodeGraphs | None:
    asked = settings.engine.graphs
    recorder = None if asked == "off" else kernels.recorder()
    if recorder is None:
        if asked == "on":
            raise SettingsError(
                'engine.graphs is "on", but these kernels cannot be recorded; use "auto", or another kernels.backend.'
            )
        return None
    began = time.perf_counter()
    graphs = DecodeGraphs(model, pool, device, settings.engine.max_batch_size, recorder)
    if not recorder.cheap:
        seconds = time.perf_counter() - began
        log.info("decode passes of %d batch sizes recorded in %.1f s", len(graphs.sizes), seconds)
    return graphs


def texts(
    settings: Settings, plugins: Plugins, checkpoint: Checkpoint, vocab_size: int
) -> tuple[Tokenizer, ChatTemplate | None, ReasoningTags | None]:
    """The tokenizer, the chat template and the reasoning's tags. Raises CheckpointError and SettingsError."""
    template = _template(settings.model.chat_template, checkpoint)
    reasoning, reasonings = _reasoning(settings, plugins, template.source if template else "")
    marks = {mark for offer in plugins.offers["tool_format"] for mark in getattr(offer.registration, "marks", ())}
    marks.update(*(tags[:2] for tags in reasonings))
    return _tokenizer(settings.model.tokenizer, checkpoint, vocab_size, marks), template, reasoning


def _tool_format(settings: Settings, offer: Offer) -> ToolFormat:
    own = plugin_settings(settings, "tool_format", offer.name)
    return ToolFormat(offer.name, lambda tools: CheckedPart(offer.make(PartProtocol, tools, own), offer.whose))


def _reasoning(settings: Settings, plugins: Plugins, template: str) -> tuple[ReasoningTags | None, list[ReasoningTags]]:
    """The model's tags, and all that are installed. One that cannot be made is left out, unless it is asked for."""
    chosen, auto = plugins.candidates("reasoning", settings), settings.model.reasoning == "auto"
    made: dict[str, ReasoningTags] = {}
    for offer in plugins.offers["reasoning"]:
        try:
            made[offer.whose] = _tags(settings, offer)
        except PluginError as error:
            if not auto and offer in chosen:
                raise
            log.warning("%s", error)
    wanted = [made[offer.whose] for offer in chosen if offer.whose in made]
    return next((tags for tags in wanted if not auto or tags.closing in template), None), [*made.values()]


def _tags(settings: Settings, offer: Offer) -> ReasoningTags:
    with Named(f"{offer.whose} cannot be used"):
        tags = offer.registration.factory(plugin_settings(settings, "reasoning", offer.name))
        if not isinstance(tags, ReasoningTags) or not all(isinstance(tag, str) and tag.strip() for tag in tags[:2]):
            raise TypeError("its factory made no ReasoningTags of two texts")
    if (reader := tags.reader) is None:
        return tags
    return tags._replace(
        reader=lambda tools: CheckedPart(inspection.make(offer.whose, PartProtocol, reader, tools), offer.whose)
    )


def _tokenizer(path: str | None, checkpoint: Checkpoint, vocab_size: int, marks: Set[str]) -> Tokenizer:
    """The tokenizer, with ``marks`` as ordinary tokens. Raises CheckpointError."""
    whose = "tokenizer " + (path if path is not None else f"of {checkpoint.path}")
    try:
        if path is not None:
            tokenizer = Tokenizer.from_file(path)
        else:
            tokenizer = Tokenizer.from_buffer(checkpoint.container.tokenizer())
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"The {whose} cannot be read: {error}.") from error
    # Added tokens may lie beyond the model's vocabulary: Gemma 3's text models have one for images without an
    # embedding.
    own = tokenizer.get_vocab(with_added_tokens=False).values()
    if own and max(own) >= vocab_size:
        raise CheckpointError(
            f"The {whose} has token ids up to {max(own)}, but the model's end at {vocab_size - 1}: it belongs "
            "to another model."
        )
    for id in sorted(checkpoint.eos_token_ids):
        if tokenizer.id_to_token(id) is None:
            raise CheckpointError(
                f"{checkpoint.path} says that token {id} ends an answer (eos_token_id), but the {whose} has no such "
                "token: it belongs to another model."
            )
    return _telling(tokenizer, marks)


def _telling(tokenizer: Tokenizer, marks: Set[str]) -> Tokenizer:
    """The tokenizer with the marks of tool calls and reasoning as ordinary tokens. Decoding leaves out special tokens,
    but the parsers need these marks, and Mistral's [TOOL_CALLS] and Llama's <|python_tag|>, for example, are
    special."""
    added = tokenizer.get_added_tokens_decoder().values()
    if marks.isdisjoint(token.content for token in added if token.special):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in marks
    return Tokenizer.from_str(json.dumps(state))


def _template(path: str | None, checkpoint: Checkpoint) -> ChatTemplate | None:
    source, tool_source = checkpoint.chat_template, checkpoint.tool_template
    if path is not None:
        try:
            source, tool_source = Path(path).expanduser().read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"model.chat_template = {path!r} cannot be read: {error}.") from None
    return None if source is None else ChatTemplate(source, checkpoint.special_tokens, tool_source)
