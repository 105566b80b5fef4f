"""`infer demo`: shows what the engine does, step by step, with chunked prefill and without."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.params import SamplingParams
from infer.contracts.records import RequestRecord, StepRecord
from infer.contracts.registration import hookimpl
from infer.contracts.sections import Settings
from infer.errors import SettingsError
from infer.flags import LOADING, add_settings
from infer.plugins.discovery import Plugins
from infer.settings import load_settings, plugin_settings
from infer_bench.timeline import new_timeline

SNIPPET = "def parse(text):\n    return [int(part) for part in text.split(',')]\n\n"


@dataclass(frozen=True)
class Arrival:
    """A request of the scene. It is submitted as soon as ``step`` steps have finished."""

    id: str
    step: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Latency:
    """One request's times, in milliseconds."""

    ttft: float
    itl_mean: float
    itl_min: float
    itl_max: float
    jitter: float
    """Standard deviation of the inter-token latencies."""


@dataclass
class SceneObserver:
    """An observer that keeps all records and submits the scene's later requests after their steps."""

    INFER_PLUGIN_API = 2
    later: list[Arrival] = field(default_factory=list)
    submit: Any = None
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self.steps.append(record)
        while self.later and self.later[0].step <= len(self.steps):
            self.submit(self.later.pop(0))

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.requests[record.request_id] = record


def latencies(steps: Sequence[StepRecord], requests: dict[str, RequestRecord]) -> dict[str, Latency]:
    """The latencies of each request, by its id. A token's time is the end of the step that drew it."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for work in step.work:
            if work.sampled:
                times.setdefault(work.request_id, []).extend([step.finished * 1e3] * (1 + work.accepted))
    result = {}
    for id, at in times.items():
        gaps = [b - a for a, b in itertools.pairwise(at)] or [0.0]
        arrival = requests[id].arrival * 1e3
        result[id] = Latency(at[0] - arrival, statistics.fmean(gaps), min(gaps), max(gaps), statistics.pstdev(gaps))
    return result


def render(steps: Sequence[StepRecord], names: Sequence[str], budget: int | None) -> list[str]:
    """The timeline: one line per step and one column per request, ``start:end`` for a chunk, ``*`` for a token and
    ``*3/8`` for one and 3 more of 8 draft tokens."""
    width = 11
    lines = ["step       ms  tokens  " + "".join(name.ljust(width) for name in names)]
    for index, step in enumerate(steps):
        cells = dict.fromkeys(names, "")
        for work in step.work:
            chunk = f"{work.start}:{work.start + work.length}" if work.kind == "prefill" else ""
            token = "*" * work.sampled + f"{work.accepted}/{work.proposed}" * bool(work.proposed)
            cells[work.request_id] = f"{chunk} {token}".strip()
        total = sum(work.length for work in step.work)
        of = f"{total}" if budget is None else f"{total}/{budget}"
        elapsed = (step.finished - step.started) * 1e3
        row = "".join(cells[name].ljust(width) for name in names)
        lines.append(f"{index:4d} {elapsed:8.1f}  {of:>6}  {row}".rstrip())
    return lines


def compare(chunked: dict[str, Latency], whole: dict[str, Latency]) -> list[str]:
    """The latencies of both runs side by side, one line per request."""
    head = f"{'':8}{'TTFT':>9}{'ITL mean':>10}{'min':>8}{'max':>8}{'jitter':>8}"
    lines = [
        f"{'milliseconds':14}{'chunked prefill':^43}   {'whole prefill':^43}",
        f"{'':8}{head[8:]}   {head[8:]}",
    ]
    for id in chunked:
        both = [
            f"{x.ttft:9.1f}{x.itl_mean:10.1f}{x.itl_min:8.1f}{x.itl_max:8.1f}{x.jitter:8.1f}"
            for x in (chunked[id], whole[id])
        ]
        lines.append(f"{id:8}{both[0]}   {both[1]}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunk", type=int, default=64, help="engine.prefill_chunk_size of the chunked run")
    parser.add_argument("--budget", type=int, help="engine.max_tokens_per_step of the chunked run")
    parser.add_argument("--prompt-tokens", type=int, default=1200, help="length of the long prompt")
    parser.add_argument("--json", action="store_true", help="print the records instead")
    parser.add_argument("--html", metavar="FILE", help="write a page of the steps of both runs, too (infer-console)")
    add_settings(parser, LOADING)


def scene(prompt_tokens: int) -> list[Arrival]:
    """Three short requests decode while a request with a long prompt arrives, and another short one after it."""
    short = [Arrival(name, 0, 12, 40) for name in "ABC"]
    return [*short, Arrival("LONG", 6, prompt_tokens, 8), Arrival("D", 10, 20, 16)]


def play(settings: Settings, plugins: Plugins, arrivals: Sequence[Arrival]) -> SceneObserver:
    """Run the scene on the model that the settings name."""
    from infer.llm import LLM

    observer = SceneObserver([arrival for arrival in arrivals if arrival.step > 0])
    with LLM.from_settings(settings, plugins) as llm:
        longest, room = max(arrivals, key=lambda arrival: arrival.prompt_tokens), llm.served.max_seq_len
        if longest.prompt_tokens + longest.max_tokens > room:
            raise SettingsError(
                f"--prompt-tokens is {longest.prompt_tokens}, and with the answer's {longest.max_tokens} that is more "
                f"than the model's {room} positions; lower it."
            )
        tokenizer = llm.served.tokenizer
        ids = tokenizer.encode(SNIPPET).ids if tokenizer else [1, 2, 3]

        def submit(arrival: Arrival) -> Any:
            prompt = (ids * (arrival.prompt_tokens // len(ids) + 1))[: arrival.prompt_tokens]
            params = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True)
            return llm.submit(prompt, params, id=arrival.id, cache_salt=arrival.id)  # nothing is shared

        llm.generate([ids], SamplingParams(max_tokens=2))  # first passes are slower than the rest
        observer.submit = submit
        plugins.manager.register(observer)
        try:
            handles = [submit(a) for a in arrivals if a.step == 0]
            for handle in handles:
                for _ in handle.events():
                    pass
            llm.close(drain_s=60.0)
        finally:
            plugins.manager.unregister(observer)
    return observer


def run(args: argparse.Namespace, context: CommandContext) -> int:
    arrivals = scene(args.prompt_tokens)
    names = [arrival.id for arrival in arrivals]
    runs = {}
    settings = context.settings
    page = new_timeline("--html", args.html, context.plugins) if args.html else None
    chunking: dict[str, Any] = {
        "use_chunked_prefill": True,
        "prefill_chunk_size": args.chunk,
        "max_tokens_per_step": args.budget,
    }
    if args.prompt_tokens < 1:
        raise SettingsError(f"--prompt-tokens is {args.prompt_tokens}; a prompt has at least 1.")
    few = {"engine": chunking | {"max_batch_size": 1}}  # the scene has few requests, however many the settings allow
    load_settings(context.plugins, file=args.settings, argv=context.argv, overrides=few)  # checks chunk and budget
    for title, keys in (("chunked prefill", chunking), ("whole prefill", {"use_chunked_prefill": False})):
        update: dict[str, Any] = {"engine": settings.engine.model_copy(update=keys)}
        if page is not None:
            table = plugin_settings(settings, "observer", "timeline")
            said = {"file": page, "title": title, "budget": keys.get("max_tokens_per_step")}
            update["observers"] = settings.observers.model_copy(update={"timeline": table.model_copy(update=said)})
        runs[title] = play(settings.model_copy(update=update), context.plugins, arrivals)
    if args.json:
        print(json.dumps({title: [asdict(step) for step in run.steps] for title, run in runs.items()}))
        return 0
    for title, run in runs.items():
        print(f"{title}: start:end a chunk of a prompt, * a token\n")
        print("\n".join(render(run.steps, names, args.budget if title == "chunked prefill" else None)) + "\n")
    both = [latencies(run.steps, run.requests) for run in runs.values()]
    print("\n".join(compare(*both)))
    return 0


COMMAND = CommandRegistration(
    "demo",
    run,
    "print a timeline of steps, chunked prefill on and off side by side",
    add_arguments=add_arguments,
)
