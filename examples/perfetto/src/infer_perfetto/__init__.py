"""An observer that writes a trace for ui.perfetto.dev or chrome://tracing (Chrome's trace event format, in JSON).

One track has the steps, each request has a track of its own with its time in the queue, its prefill and its decode, and
counters show who runs and waits and how many positions of the cache are free.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PositiveInt

from infer import SettingsError, hookimpl
from infer.contracts.records import ObserverFactory, RequestRecord, StepRecord
from infer.contracts.registration import Registration

INFER_PLUGIN_API = 2
log = logging.getLogger(__name__)


class PerfettoSettings(BaseModel, extra="forbid"):
    path: Path | None = Field(None, description="the file to write; none: no trace")
    most_mib: PositiveInt = Field(256, description="MiB after which nothing more is written")


class Trace:
    """Writes events as they come: a trace may end anywhere, so one of a server that was killed can be read, too."""

    def __init__(self, settings: PerfettoSettings) -> None:
        self._left, self._file = settings.most_mib << 20, None
        if settings.path is not None:
            try:
                self._file = settings.path.open("w", encoding="utf-8")
            except OSError as error:
                raise SettingsError(f"observers.perfetto.path = {str(settings.path)!r}: {error.strerror}.") from None
            self._file.write("[")
            self._write(ph="M", name="process_name", args={"name": "infer"})
            self._write(ph="M", name="thread_name", args={"name": "steps"})

    def infer_step_finished(self, record: StepRecord) -> None:
        counts = {name: getattr(record, name) for name in ("decodes", "chunks", "computed_tokens", "passes")}
        name = "prefill" if not record.decodes else "decode and prefill" if record.chunks else "decode"
        self._span(name, record.started, record.finished, step=record.index, **counts)
        at = _us(record.finished)
        self._write(ph="C", name="requests", ts=at, args={"running": record.running, "waiting": record.waiting})
        self._write(ph="C", name="free positions", ts=at, args={"free": record.free_tokens})

    def infer_request_finished(self, record: RequestRecord) -> None:
        begun = record.finished if record.started is None else record.started
        first = record.finished if record.first_token is None else record.first_token
        parts = {"queue": (record.arrival, begun), "prefill": (begun, first), "decode": (first, record.finished)}
        about = {"prompt": record.num_prompt, "cached": record.num_cached, "generated": record.num_generated}
        about |= {"preemptions": record.preemptions}
        self._nested(record.request_id, record.arrival, record.finished, record.request_id, about)
        for name, (start, end) in parts.items():
            if end > start:
                self._nested(name, start, end, record.request_id, {})
        if record.finish_reason in ("abort", "error", "timeout"):
            at = _us(record.finished)
            self._write(ph="n", cat="request", name=record.finish_reason, id=record.request_id, ts=at)

    def close(self) -> None:
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()

    def _span(self, name: str, start: float, end: float, **args: int) -> None:
        self._write(ph="X", cat="step", name=name, ts=_us(start), dur=_us(end) - _us(start), args=args)

    def _nested(self, name: str, start: float, end: float, id: str, args: dict[str, int]) -> None:
        self._write(ph="b", cat="request", name=name, id=id, ts=_us(start), args=args)
        self._write(ph="e", cat="request", name=name, id=id, ts=_us(end))

    def _write(self, **event: Any) -> None:
        if self._file is None or self._left <= 0:
            return
        comma = "" if self._file.tell() == 1 else ","
        self._left -= self._file.write(f"{comma}\n{json.dumps(event | {'pid': 1, 'tid': 1})}")
        if self._left <= 0:
            log.warning("observers.perfetto: the trace is full, as most_mib says; nothing more is written")


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


@hookimpl
def infer_observers() -> list[Registration[ObserverFactory]]:
    return [Registration("perfetto", Trace, "a trace of steps and requests for ui.perfetto.dev", PerfettoSettings)]
