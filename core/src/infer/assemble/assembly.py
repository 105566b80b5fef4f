"""Makes a running engine from settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from infer.assemble.adapters import LoadedAdapters, PreparedAdapter
from infer.assemble.blueprint import Blueprint, attach, draft_head, dtype_name
from infer.assemble.drafts import speculation
from infer.assemble.kept import KeptVerdict
from infer.assemble.served import Served
from infer.assemble.texts import Texts, check_tokenizer, grammars, read_tokenizer, tool_format
from infer.contracts.cache import CachePoolProtocol, ForkingPool, LastingPool
from infer.contracts.model import ModelProtocol
from infer.contracts.proposer import OwnHead, ProposerProtocol, SecondModel
from infer.contracts.scheduler import SchedulerContext
from infer.contracts.sections import Settings
from infer.engine.adapters import AdapterSlots
from infer.engine.checked import CheckedPool, CheckedScheduler
from infer.engine.confirmation import Confirmation, Verdict
from infer.engine.engine import Engine
from infer.engine.exactness import checking, self_check
from infer.engine.graphs import DecodeGraphs
from infer.engine.largest import activation_bytes
from infer.engine.lasting import computing
from infer.engine.loop import EngineLoop
from infer.engine.pace import Pace
from infer.engine.runner import Runner
from infer.engine.speculation import Speculation
from infer.errors import SettingsError
from infer.plugins.discovery import Offer, Plugins
from infer.plugins.inspection import Named
from infer.settings import compose
from infer.text.encoding import Encoder
from infer.text.grammars import vocabulary

log = logging.getLogger(__name__)


def start(
    settings: Settings, plugins: Plugins, await_memory: Callable[[], object] | None = None
) -> tuple[EngineLoop, Served]:
    """Start the engine's thread, and load the model in it. torch's operations run on OpenMP, which gives every thread
    that computes a team of its own; with more than one team, the members would sleep after every operation.
    ``await_memory`` returns when there is memory for weights and cache; what takes little is done before."""
    served: Served
    settings = compose(settings, plugins)
    assembly, slots = Assembly(settings, plugins), AdapterSlots(settings.adapters.slots)

    def make_engine(publish: Callable[..., None]) -> Engine:
        nonlocal served
        engine, served = assembly.load(publish, await_memory)
        return engine

    close_observers = plugins.observe(settings)
    try:
        max_open = settings.engine.max_batch_size + settings.engine.max_waiting_requests
        engine_loop = EngineLoop(
            make_engine,
            max_open,
            close_observers,
            step_timeout_s=settings.engine.step_timeout_s,
            adapters=slots,
            max_open_tokens=settings.engine.max_open_tokens,
        )
    except BaseException:
        close_observers()
        raise
    if not settings.adapters.slots:
        return engine_loop, served
    model, config = assembly.model, assembly.checkpoint.config
    try:
        first = assembly.first_adapters
        del assembly.first_adapters  # an adapter that is unloaded leaves no memory behind
        adapters = LoadedAdapters(engine_loop, slots, model, settings, plugins, served.name, config, first)
    except BaseException:
        engine_loop.close()
        raise
    return engine_loop, replace(served, adapters=adapters)


class Assembly(Blueprint):
    """An engine in the making: the parts of its blueprint and those that need the weights. ``load`` makes them all."""

    def load(
        self, publish: Callable[..., None], await_memory: Callable[[], object] | None = None
    ) -> tuple[Engine, Served]:
        """The engine with its model, tried out. What the settings and the checkpoint say is refused before the weights
        are loaded, if it can be. Raises InferError."""
        began, settings = time.perf_counter(), self.settings
        if settings.kernels.threads is not None:
            torch.set_num_threads(settings.kernels.threads)
        self.plugins.check_names(settings)
        formats = self.plugins.candidates("tool_format", settings)
        weights, dtype = self.weights, self.dtype
        sampling = weights.checkpoint.sampling if settings.model.generation_config == "auto" else {}
        if await_memory is not None:
            self._prepare()
            await_memory()
        log.info("engine.max_seq_len: %s", self.length[1])
        max_seq_len, texts = self.max_seq_len, self.texts(self.model.vocab_size)
        graphs, verdict, confirmation = self._checked()
        engine = self._engine(publish, texts, graphs, confirmation)
        log.info(
            "%s: %s on %s, %d positions, exact: %s, loaded in %.1f s",
            *(settings.model.path, dtype_name(dtype), self.device, max_seq_len, str(verdict.exact).lower()),
            time.perf_counter() - began,
        )
        return engine, self._served(texts, formats, sampling, verdict)

    def _prepare(self) -> None:
        """Do what takes little memory. The pages of packed weights are the system's, which has them from the file. On a
        GPU, kernels take memory there as soon as they are made."""
        if self.device.type == "cpu" and self.kept_weights is not None:
            self.kept_weights.open()
        if self.small_tokenizer is not None:
            _ = self._texts

    # What runs, once the model is loaded

    @cached_property
    def model(self) -> ModelProtocol:
        if self.wants_head and not self._wants_own_head:
            self.sketch(self.context)  # a head that does not fit is refused before any weights are loaded
        model = self.weights.load(self.context, self.kept_weights)
        self._loaded.append(self)
        if (other := self._head(model, self.context, self.settings)) is not None:
            attach(model, other.model)
            self._loaded.append(other)
        return model

    @cached_property
    def _loaded(self) -> list[Blueprint]:
        """What has been loaded before the cache is made."""
        return []

    @cached_property
    def pool(self) -> CachePoolProtocol:
        model = self.model
        besides = self._activations + sum(self.adapter_sizes(self.first_adapters).values())
        besides += sum(each.kept_weights.mapped for each in self._loaded if each.kept_weights is not None)
        return self.make_pool(model, besides, lasting=True)

    @cached_property
    def first_adapters(self) -> Mapping[str, PreparedAdapter]:
        """Those that are loaded at the start."""
        return self.adapters(self.model)

    @cached_property
    def max_seq_len(self) -> int:
        """How many positions a sequence may have: those of ``length``, or all that the pool has if they are fewer."""
        length, held = self.context.max_seq_len, self.pool.free_tokens()
        if self.settings.engine.max_seq_len is not None or held >= length:
            return length
        log.info("engine.max_seq_len: %d positions, since the cache has no more", held)
        return held

    @property
    def _lag(self) -> int:
        """How many passes may be in flight while the next is planned."""
        return 0 if self.device.type == "cpu" else 1

    @cached_property
    def _activations(self) -> int:
        """The most bytes that a pass takes besides weights and cache. Raises InferError if there are not that many."""
        given = self._cache_context(self.model, self.context)
        chunk = given.max_chunk or given.max_seq_len
        nbytes = activation_bytes(self.model, given, self.settings.engine.max_tokens_per_step, chunk)
        if nbytes:
            log.info("a pass of the largest size takes %.1f MiB besides weights and cache", nbytes / 2**20)
        return nbytes

    def _checked(self) -> tuple[DecodeGraphs | None, Verdict, Confirmation | None]:
        """The recorded decode passes, if there are any, and whether answers are exact: as was found at an earlier
        start, which is to be confirmed, or as is found now. Raises InferError if the model cannot compute."""
        engine, confirmation = self.settings.engine, None
        with Named("The check at the start failed"):
            graphs = self._graphs()
            parts = self.model, self.pool, self.kernels, graphs
            sizes: dict[str, Any] = {
                "max_batch_size": engine.max_batch_size,
                "max_seq_len": self.max_seq_len,
                "max_chunk": self._max_chunk,
                "max_tokens": engine.max_tokens_per_step,
                "max_drafts": 0 if engine.speculation is None else engine.max_draft_tokens,
                "device": self.device,
            }
            kept = self._kept_verdict(sizes)
            if kept is not None and (faults := kept.read()) is not None:
                verdict = Verdict(faults)
                settled = partial(_settled, verdict, kept)
                confirmation = Confirmation(partial(checking, *parts, **sizes), settled)
                log.info("exactness: as was found at an earlier start; it is confirmed while nothing is asked")
            else:
                verdict = Verdict(self_check(*parts, **sizes))
                if kept is not None:
                    kept.write(verdict.faults)
            if isinstance(self.pool, LastingPool):
                compute = computing(self.model, self.pool, self.device, self.max_seq_len, self._max_chunk)
                self.pool.verify(compute)
        for fault in verdict.faults:
            log.warning("not exact: %s", fault)
        return graphs, verdict, confirmation

    def _kept_verdict(self, sizes: Mapping[str, Any]) -> KeptVerdict | None:
        """Where the verdict on this engine is kept; None if its weights are not."""
        if self.kept_weights is None:
            return None
        cache, settings = self.chosen("cache"), self.settings
        positions = min(self.pool.free_tokens(), 2 * self.max_seq_len)  # the check tries no more
        return self.kept_weights.verdict(
            {
                **sizes,
                "cache": [cache.name, cache.distribution, cache.version, cache.own(settings).model_dump_json()],
                "kv_dtype": settings.cache.kv_dtype,
                "positions": positions,
                "graphs": settings.engine.graphs,
                "threads": torch.get_num_threads(),
            }
        )

    def _graphs(self) -> DecodeGraphs | None:
        asked = self.settings.engine.graphs
        recorder = None if asked == "off" else self.kernels.recorder()
        if recorder is None:
            if asked == "on":
                raise SettingsError(
                    'engine.graphs is "on", but these kernels cannot be recorded; use "auto", or another '
                    "kernels.backend."
                )
            return None
        began = time.perf_counter()
        graphs = DecodeGraphs(self.model, self.pool, self.device, self.settings.engine.max_batch_size, recorder)
        if not recorder.cheap:
            seconds = time.perf_counter() - began
            log.info("decode passes of %d batch sizes recorded in %.1f s", len(graphs.sizes), seconds)
        return graphs

    def _engine(
        self,
        publish: Callable[..., None],
        texts: Texts,
        graphs: DecodeGraphs | None,
        confirmation: Confirmation | None,
    ) -> Engine:
        scheduler = self._scheduler()
        size, keep = self.settings.engine.max_batch_size, self.wants_head
        whose = self.chosen("kernels").whose
        runner = Runner(
            self.model, self.pool, self.kernels, self.device, size, graphs, keep_hidden=keep, whose_kernels=whose
        )
        return Engine(
            runner,
            scheduler,
            self.pool,
            tokenizer=texts.tokenizer,
            eos_token_ids=self.checkpoint.eos_token_ids,
            max_seq_len=self.max_seq_len,
            lag=self._lag,
            publish=publish,
            notify=self.plugins.notify,
            speculation=self._speculation(runner, texts),
            confirmation=confirmation,
            pace=Pace.of(self.settings.engine),
            priority_aging_s=self.settings.engine.priority_aging_s,
        )

    def _scheduler(self) -> CheckedScheduler:
        offer = self.chosen("scheduler")
        pool: Any = CheckedPool(self.pool, self.chosen("cache").whose)
        made = offer.build(self.settings, SchedulerContext(pool, self.settings.engine))
        # Core's own schedulers are tested, and checking their plans would take longer than planning.
        thorough, loading = offer.distribution != "infer-core", lambda: getattr(self.pool, "loading", False)
        return CheckedScheduler(made, offer.whose, thorough=thorough, loading=loading)

    # Speculation

    def _speculation(self, runner: Runner, texts: Texts) -> Speculation | None:
        """None if the settings ask for no speculation."""
        engine, vocab_size, max_seq_len = self.settings.engine, self.model.vocab_size, self.max_seq_len
        if engine.speculation is None:
            return None
        offer = self.chosen("proposer")

        def make() -> ProposerProtocol:
            head, own = draft_head(self.model), None
            if head is not None:
                own = OwnHead(head, self.make_pool(head, self._activations, "the draft head's cache"), self.dtype)
            given = self._proposer_context(texts, vocab_size, max_seq_len, self.second, own)
            proposer: ProposerProtocol = offer.build(self.settings, given)
            return proposer

        bounds = {"max_seq_len": max_seq_len, "vocab_size": vocab_size, "lag": self._lag}
        return speculation(offer, make, runner, self.pool, engine, **bounds)

    def second(self, path: str) -> SecondModel:
        """A further checkpoint, loaded as the first except for what the settings say of that one alone."""
        other = self._second(path, self.max_seq_len)
        model = other.model
        tokenizer = read_tokenizer(None, self.settings, self.plugins, other.checkpoint, frozenset())
        check_tokenizer(tokenizer, None, other.checkpoint, model.vocab_size)
        return SecondModel(model, other.make_pool(model), tokenizer, other.context.max_seq_len, other._max_chunk)

    def _served(self, texts: Texts, formats: Sequence[Offer], sampling: Mapping[str, Any], verdict: Verdict) -> Served:
        settings, checkpoint, vocab_size = self.settings, self.checkpoint, self.model.vocab_size
        tokens = vocabulary(texts.tokenizer, vocab_size, checkpoint.eos_token_ids)
        return Served(
            name=settings.server.served_model_name or str(settings.model.path),
            tokenizer=texts.tokenizer,
            encoder=Encoder(texts.tokenizer),
            template=texts.template,
            tool_formats=[tool_format(settings, offer, texts.tokenizer) for offer in formats],
            reasoning=texts.reasoning,
            grammars=grammars(settings, self.plugins, tokens),
            vocab_size=vocab_size,
            max_seq_len=self.max_seq_len,
            cache_tokens=self.pool.free_tokens(),
            sampling=sampling,
            quantization=settings.model.quantization or checkpoint.quant_method or None,
            hidden_size=checkpoint.hidden_size,
            pooling=checkpoint.pooling,
            verdict=verdict,
            engine=settings.engine,
            forking=isinstance(self.pool, ForkingPool),
        )


def _settled(verdict: Verdict, kept: KeptVerdict, faults: list[str]) -> None:
    """The check that an earlier start spared this one has been made."""
    if faults == verdict.faults:
        log.info("exactness: the check finds what an earlier start had found")
        return
    log.error(
        "exactness: the check finds what an earlier start had not: %s; from now on, /v1/models says so",
        "; ".join(faults) or "nothing varies",
    )
    verdict.faults = faults
    kept.write(faults)
