"""python -m infer_bench.watched FILE [--settings FILE] [--section.key value ...]

``infer serve`` that writes what its steps were to a file when it ends: what ``infer simulate --fit`` measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.records import RequestRecord, StepRecord
from infer.contracts.registration import hookimpl
from infer.plugins.discovery import Plugins
from infer.settings import load_settings, split_arguments


class Watcher:
    """A plugin that keeps what a fit needs of the records. Times are in seconds, on ``time.perf_counter``."""

    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[int], list[int], bool, bool]] = []
        """(when it began, starts, lens, whether it was one pass without a fault, whether the next one followed at
        once)."""
        self.requests: list[tuple[float, float]] = []
        """(arrival, first token)."""
        self.free_tokens = 0
        """The most positions that were free."""

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        whole = record.passes == 1 and not record.failed_passes
        starts, lens = [work.start for work in record.work], [work.length for work in record.work]
        self.steps.append((record.started, starts, lens, whole, record.running > 0))

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.free_tokens = max(self.free_tokens, record.free_tokens)
        if record.first_token is not None:
            self.requests.append((record.arrival, record.first_token))


def main(argv: list[str]) -> int:
    watcher = Watcher()
    plugins = Plugins.discover([watcher])
    words, named = split_arguments(argv[1:])
    loaded = load_settings(plugins, file=named[1] if named else None, argv=words)
    loaded.settings.log.begin()
    context = CommandContext(loaded.settings, loaded.sources, plugins, tuple(words))
    serve, parser = plugins.get("command", "serve", "the command line").registration, argparse.ArgumentParser()
    assert isinstance(serve, CommandRegistration)
    if serve.add_arguments is not None:
        serve.add_arguments(parser)
    code: int = serve.factory(parser.parse_args([]), context)
    Path(argv[0]).write_text(json.dumps(vars(watcher)))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
