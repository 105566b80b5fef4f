"""Counters for Prometheus, fed by the hooks that any observer gets."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from infer.hookspecs import RequestRecord, StepRecord, hookimpl


class Metrics:
    """An observer, and the handler of GET /metrics. Tokens are positions of the model's input."""

    INFER_PLUGIN_API = 1

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._passes = self._counter("passes", "Forward passes.")
        self._computed = self._counter("computed_tokens", "Tokens that went through the model.")
        self._padded = self._counter(
            "padded_tokens", "Tokens that would have, were every row of a pass padded to its longest."
        )
        self._useful = self._counter(
            "useful_tokens", "Tokens that finished requests needed: not cached ones, none computed twice or in vain."
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached = self._counter("cached_prompt_tokens", "Those of them that the cache already held.")
        self._generated = self._counter("generation_tokens", "Tokens generated for finished requests.")
        self._preemptions = self._counter("preemptions", "How often a running request lost its room.")

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(f"infer_{name}", description, registry=self._registry)

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self._passes.inc(record.passes)
        self._computed.inc(record.computed_tokens)
        self._padded.inc(record.padded_tokens)

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self._prompt.inc(record.num_prompt)
        self._cached.inc(record.num_cached)
        self._generated.inc(record.num_generated)
        self._preemptions.inc(record.preemptions)
        if record.num_generated:
            self._useful.inc(record.num_prompt - record.num_cached + record.num_generated - 1)

    async def handle(self, http: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
