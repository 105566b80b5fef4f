"""An observer that sends one OpenTelemetry span per finished request, by OTLP over HTTP."""

from __future__ import annotations

import os
import re
import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import BaseModel, Field, field_validator

from infer import hookimpl
from infer.contracts.records import ObserverFactory, RequestRecord
from infer.contracts.registration import Registration

INFER_PLUGIN_API = 2

_EPOCH_NS = time.time_ns() - time.perf_counter_ns()
"""Unix time, in ns, at which ``time.perf_counter`` was zero."""
LAST_S = 5.0
"""How many seconds the process waits at its end for spans to reach a collector that may be away or hang."""


class OtelSettings(BaseModel, extra="forbid"):
    endpoint: str | None = Field(
        None,
        description="where spans go, e.g. http://localhost:4318; none: what OTEL_EXPORTER_OTLP_ENDPOINT says",
    )
    service_name: str | None = Field(None, description="the service's name; none: OTEL_SERVICE_NAME's, or infer")

    @field_validator("endpoint")
    @classmethod
    def _over_http(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/]", value):
            raise ValueError("it begins with http:// or https://, as in http://localhost:4318")
        return value


class Spans:
    """Makes spans of requests. A thread of the SDK sends them in batches; ``close`` sends those that are left, and
    gives up after ``LAST_S``."""

    def __init__(self, settings: OtelSettings) -> None:
        resource = {}
        if settings.service_name is not None or "OTEL_SERVICE_NAME" not in os.environ:
            resource[SERVICE_NAME] = settings.service_name or "infer"
        exporter = OTLPSpanExporter(endpoint=settings.endpoint and f"{settings.endpoint.rstrip('/')}/v1/traces")
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("infer")
        self._ends = threading.Event()
        self._ending = threading.Thread(target=self._end, name="spans", daemon=True)
        self._ending.start()  # now: an interpreter that is ending starts no more threads

    def infer_request_finished(self, record: RequestRecord) -> None:
        span = self._tracer.start_span(
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
        if record.finish_reason in ("error", "timeout"):
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(record.finished))

    def close(self) -> None:
        self._ends.set()
        self._ending.join(LAST_S)

    def _end(self) -> None:
        self._ends.wait()
        self._provider.shutdown()


class Nowhere:
    """The observer if no endpoint is configured: it does nothing."""

    def infer_request_finished(self, record: RequestRecord) -> None:
        pass


def _make(settings: OtelSettings) -> Spans | Nowhere:
    said = [
        settings.endpoint,
        *map(os.environ.get, ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")),
    ]
    return Spans(settings) if any(said) else Nowhere()


@hookimpl
def infer_observers() -> list[Registration[ObserverFactory]]:
    return [Registration("otel", _make, "an OpenTelemetry span per request", OtelSettings)]


def _ns(seconds: float) -> int:
    return _EPOCH_NS + int(seconds * 1e9)
