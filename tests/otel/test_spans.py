"""Spans arrive at a collector: a socket that accepts OTLP."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import infer_otel
from infer.contracts.records import RequestRecord
from infer.contracts.request import FinishReason
from infer.errors import SettingsError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings

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


Collected = tuple[str, list[Span], list[str]]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Its address, the spans that have come in, and the services that they name."""
    spans: list[Span] = []
    services: list[str] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans)
            for resource in sent.resource_spans:
                services.extend(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(infer_otel, "LAST_S", 300.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield f"http://127.0.0.1:{server.server_port}", spans, services
    server.shutdown()
    server.server_close()


def observe(*argv: str, record: RequestRecord = RECORD) -> None:
    """A request finishes, and the engine closes."""
    plugins = Plugins.discover()
    close = plugins.observe(load_settings(plugins, argv=argv, env={}, read_file=False).settings)
    plugins.notify("infer_request_finished", record)
    close()
    plugins.notify("infer_request_finished", record)


def test_a_request_is_a_span_of_its_clients_trace(collector: Collected) -> None:
    url, spans, services = collector
    observe("--observers.otel.endpoint", url, "--observers.otel.service_name", "mine")
    (span,) = spans
    assert span.trace_id.hex() == TRACE
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2_000_000_000
    found = {a.key: a.value.int_value or a.value.double_value for a in span.attributes}
    assert found["gen_ai.usage.input_tokens"] == 7
    assert found["gen_ai.latency.time_in_queue"] == 0.5
    assert found["gen_ai.latency.time_to_first_token"] == 1.0
    assert services == ["mine"]


@pytest.mark.parametrize("reason", ["error", "timeout"])
def test_a_request_without_its_answer_has_failed(reason: FinishReason, collector: Collected) -> None:
    url, spans, _ = collector
    observe("--observers.otel.endpoint", url, record=replace(RECORD, finish_reason=reason))
    assert [span.status.code for span in spans] == [Status.STATUS_CODE_ERROR]


def test_the_standard_variables_say_it_too(collector: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    url, spans, services = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    observe()
    assert (len(spans), services) == (1, ["infer"])


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_otel, "LAST_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        observe("--observers.otel.endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert any(thread.name == "spans" for thread in threading.enumerate()), "it waits for the collector still"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "collector", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_spans_cannot_go_to_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"observers\.otel\.endpoint = .*http://localhost:4318"):
        load_settings(Plugins.discover(), argv=["--observers.otel.endpoint", endpoint], env={}, read_file=False)


def test_without_an_endpoint_nothing_is_sent(collector: Collected) -> None:
    _, spans, _ = collector
    observe()
    assert not spans
