"""Spans that arrive at a collector: a socket that takes what OTLP sends."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import infer_otel
from infer.hookspecs import RequestRecord

TRACE = "0af7651916cd43dd8448eb211c80319c"
RECORD = RequestRecord(
    request_id="cmpl-1",
    num_prompt=7,
    num_generated=3,
    num_cached=2,
    finish_reason="length",
    arrival=10.0,
    started=10.5,
    first_token=11.0,
    finished=12.0,
    preemptions=0,
    trace={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    """What has come in; filled when the exporter sends."""
    spans: list[Span] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    infer_otel._tracer.cache_clear()
    yield spans
    infer_otel._tracer.cache_clear()
    server.shutdown()


def test_a_request_is_a_span_of_its_clients_trace(received: list[Span]) -> None:
    infer_otel.infer_request_finished(RECORD)
    tracer = infer_otel._tracer()
    assert tracer is not None
    tracer.span_processor.force_flush()  # type: ignore[attr-defined]
    (span,) = received
    assert span.trace_id.hex() == TRACE
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2_000_000_000
    found = {a.key: a.value.int_value or a.value.double_value for a in span.attributes}
    assert found["gen_ai.usage.input_tokens"] == 7
    assert found["gen_ai.latency.time_in_queue"] == 0.5
    assert found["gen_ai.latency.time_to_first_token"] == 1.0


def test_without_an_endpoint_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    infer_otel._tracer.cache_clear()
    infer_otel.infer_request_finished(RECORD)
    assert infer_otel._tracer() is None
