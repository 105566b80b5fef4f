"""A span per finished request, by OTLP over HTTP to where the standard OTEL_* variables point."""

from __future__ import annotations

import os
import time
from functools import cache

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from infer import hookimpl
from infer.hookspecs import RequestRecord

INFER_PLUGIN_API = 1

_EPOCH_NS = time.time_ns() - time.perf_counter_ns()
"""When ``time.perf_counter`` was zero."""


@hookimpl
def infer_request_finished(record: RequestRecord) -> None:
    tracer = _tracer()
    if tracer is None:
        return
    span = tracer.start_span(
        "llm_request",
        context=TraceContextTextMapPropagator().extract(record.trace),
        kind=SpanKind.SERVER,
        start_time=_ns(record.arrival),
    )
    span.set_attributes(
        {
            "gen_ai.request.id": record.request_id,
            "gen_ai.usage.input_tokens": record.num_prompt,
            "gen_ai.usage.output_tokens": record.num_generated,
            "gen_ai.usage.cached_tokens": record.num_cached,
            "gen_ai.response.finish_reasons": [record.finish_reason],
            "gen_ai.latency.e2e": record.finished - record.arrival,
        }
    )
    if record.started is not None:
        span.set_attribute("gen_ai.latency.time_in_queue", record.started - record.arrival)
    if record.first_token is not None:
        span.set_attribute("gen_ai.latency.time_to_first_token", record.first_token - record.arrival)
        span.add_event("first token", timestamp=_ns(record.first_token))
    if record.finish_reason == "error":
        span.set_status(Status(StatusCode.ERROR))
    span.end(_ns(record.finished))


@cache
def _tracer() -> Tracer | None:
    """None where no endpoint is named. Spans go out in a thread of the SDK's own, in batches."""
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return None
    resource = Resource.create({} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "infer"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("infer")


def _ns(seconds: float) -> int:
    return _EPOCH_NS + int(seconds * 1e9)
