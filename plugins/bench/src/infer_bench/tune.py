"""`infer tune`: finds the batch, chunk and budget with which simulated traffic may come fastest while its latencies
keep to goals."""

from __future__ import annotations

import argparse
import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.sections import Settings
from infer.errors import SettingsError
from infer.flags import LOADING, add_settings
from infer.settings import load_settings
from infer_bench.bench import WORKLOADS, Planned, plan
from infer_bench.simulate import VOCABULARY, add_costs, costs_of, fitted
from infer_bench.trace import check, read, requests

if TYPE_CHECKING:
    from infer_bench.costs import Costs

log = logging.getLogger(__name__)

CANDIDATES: Mapping[str, tuple[int | None, ...]] = {
    "max_tokens_per_step": (*(2**n for n in range(5, 14)), None),
    "max_batch_size": tuple(2**n for n in range(2, 10)),
    "prefill_chunk_size": tuple(2**n for n in range(5, 14)),
}
"""What is tried for each key of [engine]: the budget first, because it bounds a pass whatever the others are."""
PRECISION = 1.05
"""A rate is found up to this factor."""
BETTER = 1.1
"""Another value is better only if it allows a rate so many times as high."""
MOST, LEAST = 2.0**14, 2.0**-10
"""Between these rates, one is looked for."""
NAMED = [name for name, workload in WORKLOADS.items() if workload.arrivals in ("uniform", "poisson")]


@dataclass
class Search:
    """Goals, in milliseconds, that 99 of 100 requests, or tokens, have to keep to, and figures by choice and rate."""

    play: Callable[[Mapping[str, int | None], float], dict[str, Any]]
    """Figures for a choice of values and a rate. Raises SettingsError if the values do not go together."""
    goals: Mapping[str, float]
    """By the figure's name, such as ``itl_ms``."""
    runs: int = 0
    best: dict[str, int | None] = field(default_factory=dict)
    """The best choice so far; what it lacks is as set."""
    rate: float = 0.0
    """The highest rate at which it keeps to the goals; 0 if there is none."""
    as_set: float = 0.0
    """That without any choice."""

    def keeps(self, choice: Mapping[str, int | None], rate: float) -> bool:
        found = self.play(choice, rate)
        self.runs += 1
        return not found["refused"] and all(found[name].get("p99", 0.0) <= most for name, most in self.goals.items())

    def highest(self, choice: Mapping[str, int | None], floor: float) -> float:
        """The highest rate up to ``MOST`` at which the choice keeps to the goals, if above ``floor``; else 0."""
        low = high = floor * BETTER or 1.0
        if low > MOST:
            return 0.0
        if self.keeps(choice, low):
            while low < MOST and self.keeps(choice, high := min(2 * low, MOST)):
                low = high
        else:
            while not floor and (low := high / 2) >= LEAST and not self.keeps(choice, low):
                high = low
            if floor or low < LEAST:
                return 0.0
        while high / low > PRECISION:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.keeps(choice, middle) else (low, middle)
        return low

    def run(self, candidates: Mapping[str, Iterable[int | None]]) -> None:
        """Look for a better value of each key in turn, until no key has one."""
        self.rate = self.as_set = self.highest({}, 0.0)
        log.info("as set: %g requests/s", self.rate)
        better = True
        while better:
            better = False
            for key, values in candidates.items():
                for value in values:
                    choice = self.best | {key: value}
                    if choice == self.best:
                        continue
                    try:
                        rate = self.highest(choice, self.rate)
                    except SettingsError as error:
                        log.debug("%s = %s: %s", key, value, error)
                        continue
                    if rate:
                        self.best, self.rate, better = choice, rate, True
                        log.info("%s: %g requests/s", choice, rate)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", metavar="NAME", required=True, help=f"one of {', '.join(NAMED)}, or a trace, FILE.csv"
    )
    parser.add_argument("--goal-ttft-ms", type=float, help="what 99 of 100 first tokens take at most")
    parser.add_argument("--goal-itl-ms", type=float, help="what 99 of 100 further tokens take at most")
    add_costs(parser)
    parser.add_argument("--requests", type=int, default=200, help="how many requests a workload has (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the plan that is drawn (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write what was found to a file, too")
    add_settings(parser, {"--scheduler": "engine.batching_mode"} | LOADING)


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Search, and print the settings to paste. Returns 1 if no settings keep to the goals, else 0."""
    goals = {"ttft_ms": args.goal_ttft_ms, "itl_ms": args.goal_itl_ms}
    goals = {name: goal for name, goal in goals.items() if goal is not None}
    if not goals or min(goals.values()) <= 0 or args.requests < 1:
        raise SettingsError("Give --goal-ttft-ms, --goal-itl-ms or both; they and --requests must be positive.")
    arriving = _arriving(args)
    settings_argv = [*(("--settings", args.settings) if args.settings else ()), *context.argv]
    costs = costs_of(args, context, settings_argv)
    search = Search(_player(args, context, costs, arriving), goals)
    chunked = context.settings.engine.use_chunked_prefill
    search.run({key: values for key, values in CANDIDATES.items() if chunked or key != "prefill_chunk_size"})
    unit = "requests/s" if args.workload in WORKLOADS else "times the trace's pace"
    print(f"costs of {costs.model or 'a model'} on {costs.machine or 'a machine'}: {fitted(costs)}")
    print(f"as set: {search.as_set:.3g} {unit}\ntuned:  {search.rate:.3g} {unit}, found in {search.runs} simulations")
    if args.json:
        found = {"rate": search.rate, "as_set": search.as_set, "engine": search.best, "goals": goals}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    if not search.rate:
        print("No settings that were tried keep to the goals at any rate; set others.")
        return 1
    if search.best:
        print("\n[engine]")
        for key, value in search.best.items():
            print(f"{key} = {json.dumps('none' if value is None else value)}")
    return 0


def _arriving(args: argparse.Namespace) -> Callable[[int], Iterable[Planned]]:
    """The requests, at one per second or at the trace's times, for sequences of at most so many positions."""
    if args.workload in NAMED:
        workload = replace(WORKLOADS[args.workload], requests=args.requests)
        planned = plan(workload, scale=1.0, seed=args.seed, vocab_size=VOCABULARY)
        longest = max(len(p.prompt_token_ids) + p.max_tokens for p in planned)

        def drawn(max_seq_len: int) -> Iterable[Planned]:
            if longest > max_seq_len:
                raise SettingsError(
                    f"{args.workload} needs {longest} positions, but a sequence has at most {max_seq_len}; choose "
                    "another workload, or a trace."
                )
            return planned

        return drawn
    if not args.workload.endswith(".csv"):
        raise SettingsError(
            f"--workload {args.workload}: there are {', '.join(NAMED)}, whose requests come at a rate, and files that "
            "end in .csv."
        )
    rows = read(args.workload)

    def traced(max_seq_len: int) -> Iterable[Planned]:
        check(args.workload, rows, max_seq_len)
        return requests(rows)

    return traced


def _player(
    args: argparse.Namespace, context: CommandContext, costs: Costs, arriving: Callable[[int], Iterable[Planned]]
) -> Callable[[Mapping[str, int | None], float], dict[str, Any]]:
    from infer_bench.simulation import Simulation

    @functools.cache
    def settings(*words: str) -> Settings:
        return load_settings(context.plugins, file=args.settings, argv=[*context.argv, *words]).settings

    def play(choice: Mapping[str, int | None], rate: float) -> dict[str, Any]:
        words = [f"--engine.{key}={'none' if value is None else value}" for key, value in choice.items()]
        simulation = Simulation(settings(*words), context.plugins, costs)
        return simulation.play(arriving(simulation.max_seq_len), rate)

    return play


COMMAND = CommandRegistration(
    "tune", run, "find batch, chunk and budget for latency goals, by simulation", add_arguments=add_arguments
)
