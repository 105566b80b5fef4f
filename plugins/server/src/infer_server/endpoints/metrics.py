"""GET /metrics for Prometheus, made from the records that observers get."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from infer.contracts.records import RequestRecord, StepRecord, Totals
from infer.contracts.server import Route
from infer_server.http.streams import Turn

if TYPE_CHECKING:
    from infer_server.service import Service

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG_SECONDS = (*SECONDS[6:], 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
POWERS = tuple(float(2**i) for i in range(17))
FEW = tuple(map(float, (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)))
FILL = tuple(i / 10 for i in range(1, 11))
REASONS = ("stop", "length", "abort", "error", "timeout")


def routes(service: Service, settings: object) -> list[Route]:
    metrics = Metrics(service)
    service.observe(metrics)
    return [Route("GET", "/metrics", metrics.handle, "Figures for Prometheus.", "text/plain")]


class Histogram:
    """Counts observed values by the bucket that they fall into."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Each bucket's bound with the number of values up to it, and the sum of all values."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum


class Metrics:
    """An observer, a Prometheus collector, and the handler of GET /metrics. The engine's thread writes and others read,
    without a lock: a reader may see a part of a step's numbers, and the rest of them the next time.

    Computed tokens are positions of the model's input; times are in seconds. Metrics that vLLM has too have its names.
    """

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._turn = Turn()
        self._engine_loop, settings = service.engine_loop, service.settings
        self._prefix = "vllm:" if settings.server.metrics_names == "vllm" else "infer_"
        self._model, self._cache_tokens = service.served.name, service.served.cache_tokens
        self._budget = service.served.engine.max_tokens_per_step or 0
        self._passes = self._computed = self._padded = self._useful = 0
        self._preemptions = self._failed_passes = 0
        self._totals = Totals()
        self._running = self._waiting = self._used_tokens = 0
        self._finished = dict.fromkeys(REASONS, 0)
        self._last_step: float | None = None
        self._time_to_first_token = Histogram(LONG_SECONDS)
        self._inter_token_latency = Histogram(SECONDS)
        self._e2e = Histogram(LONG_SECONDS)
        self._queue = Histogram(LONG_SECONDS)
        self._prefill = Histogram(LONG_SECONDS)
        self._decode = Histogram(LONG_SECONDS)
        self._prompt_tokens = Histogram(POWERS)
        self._generation_tokens = Histogram(POWERS)
        self._step_tokens = Histogram(POWERS)
        self._step_seconds = Histogram(SECONDS)
        self._step_chunks = Histogram(FEW)
        self._step_fill = Histogram(FILL)
        self._registry.register(self)

    def infer_step_finished(self, record: StepRecord) -> None:
        self._passes += record.passes
        self._failed_passes += record.failed_passes
        self._computed += record.computed_tokens
        self._padded += record.padded_tokens
        self._running, self._waiting = record.running, record.waiting
        self._used_tokens = self._cache_tokens - record.free_tokens
        self._totals = record.totals
        self._step_tokens.observe(record.computed_tokens)
        self._step_seconds.observe(record.finished - record.started)
        self._step_chunks.observe(record.chunks)
        if self._budget:
            self._step_fill.observe(record.computed_tokens / self._budget)
        if record.decodes and self._last_step is not None:
            # Every decoding sequence gets a token in each step, so the time between two steps is its ITL. What an
            # answer owes to draft tokens comes at the same time.
            self._inter_token_latency.observe(record.finished - self._last_step, record.decodes)
            self._inter_token_latency.observe(0.0, record.accepted)
        self._last_step = record.finished if record.running else None

    def infer_request_finished(self, record: RequestRecord) -> None:
        self._used_tokens = self._cache_tokens - record.free_tokens
        self._totals = record.totals
        self._preemptions += record.preemptions
        self._finished[record.finish_reason] += 1
        self._prompt_tokens.observe(record.num_prompt)
        self._generation_tokens.observe(record.num_generated)
        self._e2e.observe(record.finished - record.arrival)
        if record.started is not None:
            self._queue.observe(record.started - record.arrival)
        if record.num_generated:
            self._useful += record.num_prompt - record.num_cached + record.num_generated - 1
        if record.first_token is not None and record.started is not None:
            self._time_to_first_token.observe(record.first_token - record.arrival)
            self._prefill.observe(record.first_token - record.started)
            self._decode.observe(record.finished - record.first_token)

    def collect(self) -> Iterator[Metric]:
        if self._engine_loop.num_open == 0:
            self._running = self._waiting = 0  # no step reports the end of the last request
        counters = (
            ("passes", "Forward passes.", self._passes),
            (
                "failed_passes",
                "Forward passes that raised. Those of their requests that are not to blame are computed again.",
                self._failed_passes,
            ),
            ("computed_tokens", "Tokens that went through the model.", self._computed),
            ("padded_tokens", "Tokens that would have, were rows padded to the longest of their pass.", self._padded),
            (
                "useful_tokens",
                "Tokens that finished requests needed: not cached ones, none computed twice or in vain.",
                self._useful,
            ),
            ("prompt_tokens", "Prompt tokens, counted with the first token of the answer.", self._totals.prompt),
            ("prefix_cache_queries", "The same: tokens that were looked up in the cache.", self._totals.prompt),
            ("prefix_cache_hits", "Those of them that the cache already held.", self._totals.cached),
            ("generation_tokens", "Tokens generated, counted in every step.", self._totals.generated),
            (
                "spec_decode_num_draft_tokens",
                "Draft tokens that were verified.",
                self._totals.proposed,
            ),
            (
                "spec_decode_num_accepted_tokens",
                "Tokens generated because a draft token was right.",
                self._totals.accepted,
            ),
            ("num_preemptions", "How often a running request lost its room.", self._preemptions),
        )
        for name, text, value in counters:
            yield self._with(CounterMetricFamily(self._prefix + name, text, labels=["model_name"]), value)
        finished = CounterMetricFamily(
            self._prefix + "request_success", "Finished requests.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([self._model, reason], count)
        yield finished
        gauges = (
            ("num_requests_running", "Requests that have room in the cache.", self._running),
            ("num_requests_waiting", "Requests that wait for it.", self._waiting),
            ("kv_cache_usage_perc", "The cache's share that is taken, 0 to 1.", self._usage()),
        )
        for name, text, level in gauges:
            yield self._with(GaugeMetricFamily(self._prefix + name, text, labels=["model_name"]), level)
        histograms = (
            ("time_to_first_token_seconds", "From arrival to the first token.", self._time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request.", self._inter_token_latency),
            ("e2e_request_latency_seconds", "From arrival to the end.", self._e2e),
            ("request_queue_time_seconds", "From arrival to the first pass.", self._queue),
            ("request_prefill_time_seconds", "From the first pass to the first token.", self._prefill),
            ("request_decode_time_seconds", "From the first token to the end.", self._decode),
            ("request_prompt_tokens", "Prompt tokens per request.", self._prompt_tokens),
            ("request_generation_tokens", "Generated tokens per request.", self._generation_tokens),
            ("iteration_tokens_total", "Tokens per step.", self._step_tokens),
            ("step_seconds", "A step's time.", self._step_seconds),
            ("step_chunks", "Prefill chunks per step.", self._step_chunks),
            ("step_budget_fill", "The share of engine.max_tokens_per_step that steps use.", self._step_fill),
        )
        for name, text, histogram in histograms:
            family = HistogramMetricFamily(self._prefix + name, text, labels=["model_name"])
            buckets, summed = histogram.buckets()
            family.add_metric([self._model], buckets, summed)
            yield family

    def _usage(self) -> float:
        return self._used_tokens / self._cache_tokens if self._cache_tokens else 0.0

    def _with(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family

    async def handle(self, http: web.Request) -> web.Response:
        async with self._turn:  # it takes milliseconds
            body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
