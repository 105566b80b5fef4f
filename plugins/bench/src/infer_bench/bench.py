"""`infer bench`: plays named workloads over HTTP, against infer or any server that has /v1/completions.

Percentiles are numpy's with linear interpolation. TTFT is the time from sending to the first chunk with text; ITL is
the gap between successive chunks; one chunk carries one token unless a character needs several.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError, SettingsError
from infer.flags import LOADING, add_settings
from infer.settings import load_settings
from infer_bench.energy import UNKNOWN, Meter, Taken
from infer_bench.timeline import new_timeline

if TYPE_CHECKING:
    import aiohttp

READY = "infer: ready on "
AUTO_LOAD = 0.7
"""Without ``--rate``, requests arrive at this fraction of the measured capacity: high, but low enough that the queue
does not keep growing."""
METERED_S = 30.0
"""How often the server's meter is read, in seconds."""
CALIBRATION = 8
"""How many requests the calibration run sends, all at once."""


@dataclass(frozen=True)
class Workload:
    """A kind of traffic. ``mixture`` has (probability, low, high) for each range that prompt lengths are drawn from,
    uniformly; ``output`` is the range of answers' lengths. Lengths are in tokens."""

    requests: int
    mixture: tuple[tuple[float, int, int], ...]
    output: tuple[int, int]
    arrivals: str
    """``sequential``, ``at once``, ``uniform`` or ``poisson``."""
    shared_prefix: int = 0
    """How many tokens all prompts have in common before their own tokens."""


WORKLOADS: Mapping[str, Workload] = {
    "baseline": Workload(10, ((1.0, 256, 256),), (256, 256), "sequential"),
    "continuous_batching": Workload(32, ((1.0, 64, 512),), (64, 256), "uniform"),
    "paged_attention": Workload(48, ((1.0, 128, 384),), (128, 256), "at once"),
    "chunked_prefill": Workload(48, ((0.75, 1024, 2048), (0.25, 64, 128)), (64, 256), "poisson"),
    "prefix_caching": Workload(48, ((1.0, 32, 128),), (256, 256), "uniform", shared_prefix=1024),
}


@dataclass(frozen=True)
class Planned:
    """One request of a plan. ``at`` is its time in seconds after the start, at a rate of one request per second."""

    at: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    user: str = ""


@dataclass
class Sample:
    """The measurements of one request, with times in seconds on ``time.perf_counter``."""

    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def plan(workload: Workload, *, scale: float, seed: int, vocab_size: int, shared: float | None = None) -> list[Planned]:
    """The workload's requests, the same for the same arguments. ``scale`` multiplies the number of requests and every
    length. ``shared`` is the fraction of every prompt that all have in common; it does not change lengths."""
    rng = np.random.default_rng(seed)

    def scaled(n: int) -> int:
        return max(1, round(n * scale))

    def ids(n: int) -> tuple[int, ...]:
        # Low ids are special tokens in most vocabularies.
        return tuple(rng.integers(min(16, vocab_size - 1), vocab_size, n).tolist())

    prefix = ids(scaled(workload.shared_prefix)) if workload.shared_prefix else ()
    common = ids(scaled(max(high for _, _, high in workload.mixture))) if shared is not None else ()
    at = 0.0
    planned = []
    for _ in range(scaled(workload.requests)):
        weights = [probability for probability, _, _ in workload.mixture]
        _, low, high = workload.mixture[rng.choice(len(weights), p=weights)]
        prompt = prefix + ids(int(rng.integers(scaled(low), scaled(high) + 1)))
        if shared is not None:
            cut = round(len(prompt) * shared)
            prompt = (prefix + common)[:cut] + ids(len(prompt) - cut)
        planned.append(
            Planned(at, prompt, int(rng.integers(scaled(workload.output[0]), scaled(workload.output[1]) + 1)))
        )
        if workload.arrivals == "poisson":
            at += float(rng.exponential(1.0))
        elif workload.arrivals == "uniform":
            at += 1.0
    return planned


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and max; empty for no values."""
    if not values:
        return {}
    p50, p95, p99 = np.percentile(np.asarray(values), [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": max(values)}


def summarize(samples: Sequence[Sample], counters: Mapping[str, float], taken: Taken = UNKNOWN) -> dict[str, Any]:
    """The figures of a run: latencies in milliseconds, throughput in tokens per second, and what an answer's token has
    taken."""
    good = [s for s in samples if s.error is None]
    wall = max((s.done for s in samples), default=0.0) - min((s.sent for s in samples), default=0.0)
    output = sum(s.output_tokens for s in good)
    prompt = sum(s.prompt_tokens for s in good)
    gaps = [(b - a) * 1e3 for s in good for a, b in zip(s.chunks, s.chunks[1:], strict=False)]
    itl = percentiles(gaps)
    return {
        "requests": len(samples),
        "errors": sorted(s.error for s in samples if s.error is not None),
        "wall_s": wall,
        "output_tok_s": output / wall if wall else 0.0,
        "total_tok_s": (output + prompt) / wall if wall else 0.0,
        "requests_s": len(good) / wall if wall else 0.0,
        "ttft_ms": percentiles([(s.chunks[0] - s.sent) * 1e3 for s in good if s.chunks]),
        "itl_ms": itl,
        "itl_p99_over_p50": itl["p99"] / itl["p50"] if itl else None,
        "latency_ms": percentiles([(s.done - s.sent) * 1e3 for s in good]),
        "joules_per_token": None if taken.joules is None or not output else taken.joules / output,
        "cpu_s_per_1000_tokens": None if taken.cpu_s is None or not output else 1e3 * taken.cpu_s / output,
        "counters": dict(counters),
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as text, with one column per run."""
    lines = {"output tok/s": "output_tok_s", "total tok/s": "total_tok_s", "requests/s": "requests_s"}
    cells = [["", *rows]]
    cells += [[title, *(f"{r[key]:.1f}" for r in rows.values())] for title, key in lines.items()]
    for title, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("latency", "latency_ms")):
        for p in ("p50", "p95", "p99", "max"):
            cells.append([f"{title} {p} ms", *(f"{r[key][p]:.1f}" if r[key] else "-" for r in rows.values())])
    for title, key in (("CPU joules/token", "joules_per_token"), ("CPU s/1000 tokens", "cpu_s_per_1000_tokens")):
        if any(r.get(key) for r in rows.values()):
            cells.append([title, *(f"{x:.2f}" if (x := r.get(key)) else "-" for r in rows.values())])
    cells.append(["ITL p99/p50", *(f"{x:.2f}" if (x := r["itl_p99_over_p50"]) else "-" for r in rows.values())])
    counted = [r["counters"] for r in rows.values()]
    if all(counted):
        cells.append(["passes", *(f"{c['passes']:.0f}" for c in counted)])
        cells.append(["tokens computed", *(f"{c['computed_tokens']:.0f}" for c in counted)])
        cells.append(["computed/needed", *(f"{c['computed_tokens'] / c['useful_tokens']:.3f}" for c in counted)])
        cells.append(["padded/needed", *(f"{c['padded_tokens'] / c['useful_tokens']:.3f}" for c in counted)])
        cells.append(["tokens cached", *(f"{c['prefix_cache_hits']:.0f}" for c in counted)])
    cells.append(["errors", *(str(len(r["errors"])) for r in rows.values())])
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """The rows' cells in columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )


async def send(session: aiohttp.ClientSession, url: str, model: str, planned: Planned) -> Sample:
    """Send one request and read its streamed completion."""
    import aiohttp

    sample = Sample(prompt_tokens=len(planned.prompt_token_ids))
    body = {
        "model": model,
        "prompt": planned.prompt_token_ids,
        "max_tokens": planned.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample.sent = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        sample.error = str(chunk["error"]["message"])
                    elif chunk.get("usage"):
                        sample.output_tokens = chunk["usage"]["completion_tokens"]
                    if chunk.get("choices") and chunk["choices"][0]["text"]:
                        sample.chunks.append(time.perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.done = time.perf_counter()
    return sample


COUNTERS = ("passes", "computed_tokens", "padded_tokens", "useful_tokens", "prefix_cache_hits", "num_preemptions")


async def count(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's counters; empty if the server is not infer."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text() if response.status == 200 else ""
    found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    return {name: found[key] for name in COUNTERS if (key := f"infer_{name}_total") in found}


async def watch(meter: Meter) -> None:
    """Read a meter so often that no counter begins anew twice in between."""
    while True:
        await asyncio.sleep(METERED_S)
        meter.read()


async def play(
    url: str, model: str, planned: Sequence[Planned], arrivals: str, rate: float, warm_up: Planned
) -> tuple[list[Sample], dict[str, float], Taken]:
    """Send a plan at its arrival times. Returns the sample of each request, how much each of the server's counters
    rose, and what the server took."""
    import aiohttp

    async def later(one: Planned) -> Sample:
        await asyncio.sleep(one.at / rate)
        return await send(session, url, model, one)

    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        await send(session, url, model, warm_up)
        before, meter = await count(session, url), Meter(url)
        begun, watching = meter.read(), asyncio.create_task(watch(meter))
        if arrivals == "sequential":
            samples = [await send(session, url, model, one) for one in planned]
        else:
            samples = list(await asyncio.gather(*(later(one) for one in planned)))
        watching.cancel()
        ended = meter.read()
        after = await count(session, url)
    return samples, {name: after[name] - value for name, value in before.items()}, ended.since(begun)


async def served(url: str) -> dict[str, Any]:
    """The first entry of /v1/models. Raises InferError."""
    import aiohttp

    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            entry: dict[str, Any] = (await response.json())["data"][0]
            return entry
    except (aiohttp.ClientError, KeyError, IndexError, ValueError) as error:
        raise InferError(f"--url {url}: /v1/models does not answer as expected ({error}).") from None


LIMITS = ("requests_per_minute", "tokens_per_minute", "request_timeout_s")
"""Settings of a server that protect it from its clients, and would keep it from being measured. They are off, unless
the command line has them."""


@contextmanager
def server(settings_argv: Sequence[str], program: Sequence[str] = ("infer.commands.cli", "serve")) -> Iterator[str]:
    """Start an `infer serve` with these settings, yield its URL, and stop it at the end. ``program`` is a module that
    serves, and its arguments. Raises InferError."""
    unlimited = [word for name in LIMITS for word in (f"--server.{name}", "none")]
    command = [sys.executable, "-m", *program, *unlimited, *settings_argv, "--server.port", "0"]
    env = os.environ | {"INFER_SERVER__ACCESS_LOG": "false"}  # which would bury the tables; a setting still asks for it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith(READY):
            raise InferError(f"The server did not start (exit code {process.wait()}); its reason is above.")
        yield line.removeprefix(READY).strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def measure(url: str, name: str, args: argparse.Namespace, rate: float | None) -> tuple[dict[str, Any], float]:
    """Play a workload. Returns its figures and its rate in requests per second."""
    entry = asyncio.run(served(url))
    vocab_size = args.vocab_size or entry.get("vocab_size") or 1000
    workload = WORKLOADS[name]

    def drawn(seed: int) -> list[Planned]:
        return plan(workload, scale=args.scale, seed=seed, vocab_size=vocab_size, shared=args.shared)

    planned = drawn(args.seed)
    # Requests of the same kind for calibration, with other tokens, so that the cache holds nothing of the plan.
    others = [Planned(0.0, p.prompt_token_ids, p.max_tokens) for p in drawn(args.seed + 1)[:CALIBRATION]]
    warm_up = Planned(0.0, others[-1].prompt_token_ids, 2)
    longest = max(len(p.prompt_token_ids) + p.max_tokens for p in planned)
    limit = entry.get("max_model_len") or longest
    if longest > limit:
        raise SettingsError(
            f"{name} at --scale {args.scale} needs {longest} positions, but the server has {limit}; "
            f"use --scale {args.scale * limit / longest:.2f} or less."
        )
    if rate is None and workload.arrivals in ("uniform", "poisson"):
        capacity = summarize(*asyncio.run(play(url, entry["id"], others, "at once", 1.0, warm_up)))["requests_s"]
        if not capacity:
            raise InferError("The calibration failed: no request was answered; give a --rate.")
        rate = AUTO_LOAD * capacity
    rate = rate or 1.0
    return summarize(*asyncio.run(play(url, entry["id"], planned, workload.arrivals, rate, warm_up))), rate


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over repeated runs, and the errors of all runs."""
    first = runs[0]
    merged: dict[str, Any] = {}
    for key, value in first.items():
        column = [run[key] for run in runs]
        if key == "errors":
            merged[key] = [error for errors in column for error in errors]
        elif isinstance(value, dict):
            merged[key] = {p: float(np.median([c[p] for c in column if p in c])) for p in value}
        else:
            merged[key] = None if value is None else float(np.median([c for c in column if c is not None]))
    return merged


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures were measured with."""
    from importlib.metadata import version

    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "infer": version("infer-core"),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, "all"], help="may be repeated; default: all"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests and all lengths")
    parser.add_argument("--rate", type=float, help="requests per second; default: a fraction of the measured capacity")
    parser.add_argument(
        "--shared", type=float, help="the part of every prompt that all have in common; default: the workload's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the plans that are drawn (default: 0)")
    parser.add_argument("--repeat", type=int, default=1, help="runs per variant, alternating; medians are reported")
    parser.add_argument(
        "--compare",
        metavar="KEY=VALUE",
        action="append",
        help="measure as set and with this setting too, side by side; repeated, all of them together",
    )
    parser.add_argument("--url", help="a running server; default: one of our own with the settings given")
    parser.add_argument("--vocab-size", type=int, help="token ids to draw from; default: what the server says")
    parser.add_argument("--json", metavar="FILE", help="write everything to a file, or - for standard output")
    parser.add_argument("--timeline", metavar="FILE", help="write a page of the servers' steps (infer-console)")
    add_settings(parser, LOADING)


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Run the workloads and print a table for each. Returns 1 if a request failed, else 0."""
    settings_argv = [*(("--settings", args.settings) if args.settings else ()), *context.argv]
    if args.scale <= 0 or args.repeat < 1 or (args.rate is not None and args.rate <= 0):
        raise SettingsError("--scale, --rate and --repeat must be positive.")
    if args.shared is not None and not 0 <= args.shared <= 1:
        raise SettingsError(f"--shared is {args.shared}; it is a part of a prompt, from 0 to 1.")
    if args.url and args.compare:
        raise SettingsError("--compare starts servers of its own; leave out --url.")
    if args.url and args.timeline:
        raise SettingsError("--timeline shows the steps of servers that infer bench starts; leave out --url.")
    page = new_timeline("--timeline", args.timeline, context.plugins) if args.timeline else None
    names = list(WORKLOADS) if not args.workload or "all" in args.workload else args.workload
    variants: dict[str, list[str]] = {"as set": []}
    if args.compare:
        variants["compared"] = [f"--{setting}" for setting in args.compare]
        # A mistake is said before anything is measured.
        load_settings(context.plugins, file=args.settings, argv=[*context.argv, *variants["compared"]])
    report: dict[str, Any] = {
        "machine": machine(),
        "scale": args.scale,
        "shared": args.shared,
        "seed": args.seed,
        "settings": [*settings_argv],
        "compared": args.compare,
        "workloads": {},
    }
    for name in names:
        runs: dict[str, list[dict[str, Any]]] = {title: [] for title in variants}
        rate: float | None = args.rate
        for turn in range(args.repeat):
            for title, extra in variants.items():
                if args.url:
                    figures, rate = measure(args.url.rstrip("/"), name, args, rate)
                else:
                    run = {"file": page, "title": f"{name}, {title}, {turn + 1} of {args.repeat}"}
                    seen = [f"--observers.timeline.{key}={value}" for key, value in run.items() if page is not None]
                    with server([*settings_argv, *extra, *seen]) as url:
                        figures, rate = measure(url, name, args, rate)
                runs[title].append(figures)
        merged = {title: median_run(each) for title, each in runs.items()}
        report["workloads"][name] = {
            "workload": asdict(WORKLOADS[name]),
            "rate": rate,
            "runs": runs,
            "median": merged,
        }
        out = sys.stderr if args.json == "-" else sys.stdout
        print(f"\n{name} (scale {args.scale}, {rate or 0:.2f} requests/s)\n{table(merged)}", file=out)
        for error in sorted({e for m in merged.values() for e in m["errors"]}):
            print(f"error: {error}", file=out)
    if args.json == "-":
        print(json.dumps(report, indent=2))
    elif args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return int(any(m["errors"] for w in report["workloads"].values() for m in w["median"].values()))


COMMAND = CommandRegistration("bench", run, "measure the workloads over HTTP", add_arguments=add_arguments)
