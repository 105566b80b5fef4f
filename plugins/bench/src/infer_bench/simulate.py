"""`infer simulate`: plays workloads on the engine without a model, on a clock of its own. The scheduler and the cache
pool are those that settings choose; what a pass takes, a cost model says."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.sections import Settings
from infer.errors import SettingsError
from infer.flags import LOADING, add_settings
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_bench.bench import AUTO_LOAD, CALIBRATION, WORKLOADS, Planned, aligned, plan
from infer_bench.timeline import new_timeline
from infer_bench.trace import Row, check, read, requests

if TYPE_CHECKING:
    from infer_bench.costs import Costs

log = logging.getLogger(__name__)

FIT_S = 30.0
VOCABULARY = 32768
"""Token ids that workloads are drawn from: enough that no two blocks are alike by chance."""


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as text, with one column per run."""
    cells = [["", *columns]]

    def line(title: str, form: str, *path: str, scale: float = 1) -> None:
        found = []
        for figures in columns.values():
            value: Any = figures
            for key in path:
                value = value.get(key) if value is not None else None
            found.append("-" if value is None else f"{value * scale:{form}}")
        cells.append([title, *found])

    line("requests", "d", "requests")
    line("refused", "d", "refused")
    line("seconds", ".1f", "wall_s")
    line("output tok/s", ".1f", "output_tok_s")
    line("total tok/s", ".1f", "total_tok_s")
    line("requests/s", ".2f", "requests_s")
    for title, key, shown in (
        ("TTFT", "ttft_ms", ("p50", "p90", "p99", "max")),
        ("ITL", "itl_ms", ("p50", "p99", "max")),
        ("latency", "latency_ms", ("p50", "p99", "max")),
        ("queue", "queue_ms", ("p50", "p99", "max")),
    ):
        for percent in shown:
            line(f"{title} {percent} ms", ".1f", key, percent)
    line("waiting, most", "d", "most_waiting")
    line("passes", "d", "passes")
    line("sequences/pass", ".1f", "sequences_per_pass")
    line("tokens/pass", ".1f", "tokens_per_pass")
    line("prompt cached %", ".1f", "cache_hits", scale=100)
    line("preemptions", "d", "preemptions")
    return aligned(cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(WORKLOADS)
    parser.add_argument(
        "--workload",
        metavar="NAME",
        action="append",
        help=f"one of {names}, or a trace, FILE.csv; may be repeated; default: all that have a name",
    )
    add_costs(parser)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests and all lengths")
    parser.add_argument("--rate", type=float, help="requests per second; default: a fraction of the capacity")
    parser.add_argument(
        "--shared", type=float, help="the part of every prompt that all have in common; default: the workload's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the plans that are drawn (default: 0)")
    parser.add_argument(
        "--compare",
        metavar="KEY=VALUE",
        action="append",
        help="simulate as set and with this setting too, side by side; repeated, all of them together",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything to a file, or - for standard output")
    parser.add_argument("--timeline", metavar="FILE", help="write a page of the simulated steps (infer-console)")
    add_settings(parser, {"--scheduler": "engine.batching_mode"} | LOADING)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what passes cost, for ``costs_of``."""
    parser.add_argument("--costs", metavar="FILE", help="what passes cost; with --fit, the file to write")
    parser.add_argument(
        "--fit",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=FIT_S,
        help=f"measure what passes cost here, for so long (default: {FIT_S:g})",
    )


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Simulate the workloads and print a table for each."""
    _check(args)
    names = args.workload or [*WORKLOADS]
    settings_argv = [*(("--settings", args.settings) if args.settings else ()), *context.argv]
    variants = {"as set": context.settings}
    if args.compare:
        words = [*context.argv, *(f"--{setting}" for setting in args.compare)]
        variants["compared"] = load_settings(context.plugins, file=args.settings, argv=words).settings
    traces = {name: read(name) for name in names if name not in WORKLOADS}
    page = new_timeline("--timeline", args.timeline, context.plugins) if args.timeline else None
    costs = costs_of(args, context, settings_argv)
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"costs of {costs.model or 'a model'} on {costs.machine or 'a machine'}: {fitted(costs)}", file=out)
    report: dict[str, Any] = {
        "costs": costs.model_dump(),
        "scale": args.scale,
        "shared": args.shared,
        "seed": args.seed,
        "settings": settings_argv,
        "compared": args.compare,
        "workloads": {},
    }
    for name in names:
        rate: float | None = args.rate
        columns = {}
        for title, settings in variants.items():
            began = time.perf_counter()
            watch = partial(_observer, context.plugins, settings, page, f"{name}, {title}")
            columns[title], rate = simulated(name, args, settings, context.plugins, costs, rate, traces, watch)
            log.info("%s, %s: simulated in %.1f s", name, title, time.perf_counter() - began)
        report["workloads"][name] = {"rate": rate, "runs": columns}
        of = f"scale {args.scale}, {rate or 0:.2f} requests/s" if name in WORKLOADS else "a trace"
        print(f"\n{name} ({of})\n{table(columns)}", file=out)
    if args.json == "-":
        print(json.dumps(report, indent=2))
    elif args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    traces = [name for name in args.workload or () if name not in WORKLOADS]
    for name in traces:
        if not name.endswith(".csv"):
            raise SettingsError(f"--workload {name}: there are {', '.join(WORKLOADS)}, and files that end in .csv.")
    if args.scale <= 0 or (args.rate is not None and args.rate <= 0):
        raise SettingsError("--scale and --rate must be positive.")
    if args.shared is not None and not 0 <= args.shared <= 1:
        raise SettingsError(f"--shared is {args.shared}; it is a part of a prompt, from 0 to 1.")
    if traces and (args.scale != 1 or args.rate is not None or args.shared is not None):
        raise SettingsError(f"--workload {traces[0]} is a trace; leave out --scale, --rate and --shared.")


def costs_of(args: argparse.Namespace, context: CommandContext, settings_argv: list[str]) -> Costs:
    """What passes cost, read or measured. Raises InferError."""
    from infer_bench.costs import Costs
    from infer_bench.fitting import measured

    if args.fit is not None and args.fit <= 0:
        raise SettingsError(f"--fit is {args.fit:g}; it is seconds, more than 0.")
    if args.fit is None:
        if args.costs is None:
            raise SettingsError(
                "What do passes cost? --costs FILE names a file that says it; --fit measures it on this machine, and "
                "writes such a file if --costs names one."
            )
        return Costs.read(args.costs)
    costs = measured(context.settings, context.plugins, settings_argv, args.fit)
    if args.costs is not None:
        try:
            Path(args.costs).write_text(costs.text())
        except OSError as error:
            raise SettingsError(f"--costs {args.costs} cannot be written: {error.strerror}.") from None
    return costs


def fitted(costs: Costs) -> str:
    """Where costs come from, and how far they are off."""
    return (
        f"fitted to {costs.passes} passes, half of them within {100 * costs.error:.0f} %" if costs.passes else "given"
    )


def _observer(plugins: Plugins, settings: Settings, page: Path | None, title: str) -> Any:
    """Who writes the page of a run; None if nobody asks for one."""
    if page is None:
        return None
    offer = plugins.get("observer", "timeline", "--timeline")
    own = offer.own(settings).model_copy(update={"file": page, "title": title})
    return offer.registration.factory(own)


def simulated(
    name: str,
    args: argparse.Namespace,
    settings: Settings,
    plugins: Plugins,
    costs: Costs,
    rate: float | None,
    traces: Mapping[str, Sequence[Row]],
    observer: Any = lambda: None,
) -> tuple[dict[str, Any], float | None]:
    """Play a workload or a trace. Returns its figures and, of a workload, its rate in requests per second, which is
    chosen as `infer bench` chooses it."""
    from infer_bench.simulation import Simulation

    watching = observer()
    simulation = Simulation(settings, plugins, costs, watching)
    try:
        if name not in WORKLOADS:
            check(name, traces[name], simulation.max_seq_len)
            return simulation.play(requests(traces[name])), None
        workload = WORKLOADS[name]

        def drawn(seed: int) -> list[Planned]:
            return plan(workload, scale=args.scale, seed=seed, vocab_size=VOCABULARY, shared=args.shared)

        planned = drawn(args.seed)
        longest = max(len(p.prompt_token_ids) + p.max_tokens for p in planned)
        if longest > simulation.max_seq_len:
            raise SettingsError(
                f"{name} at --scale {args.scale} needs {longest} positions, but a sequence has at most "
                f"{simulation.max_seq_len}; use --scale {args.scale * simulation.max_seq_len / longest:.2f} or less."
            )
        if rate is None and workload.arrivals in ("uniform", "poisson"):
            others = [Planned(0.0, p.prompt_token_ids, p.max_tokens) for p in drawn(args.seed + 1)[:CALIBRATION]]
            rate = AUTO_LOAD * simulation.play(others)["requests_s"]
        rate = rate or 1.0
        return simulation.play(planned, rate, sequential=workload.arrivals == "sequential"), rate
    finally:
        if watching is not None:
            watching.close()


COMMAND = CommandRegistration(
    "simulate", run, "play workloads without a model, on a clock of its own", add_arguments=add_arguments
)
