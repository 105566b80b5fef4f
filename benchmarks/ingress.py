"""python -m benchmarks.ingress [--scale X] [--rounds N] [--json FILE]

What infer-router's ingress costs and saves: a real Ray with two engines of the demo model, a thread each, asked
directly, by way of a plain proxy that only passes bytes, and by way of the ingress. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from infer.contracts.command import CommandContext
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_bench.bench import AUTO_LOAD, WORKLOADS, Planned, machine, plan
from infer_ray import command

GROUPS, EACH = 8, 6
"""Groups of prompts, and how many of each are asked: as many in all as the workload has."""
STREAMS = 32
VOCABULARY = 1000
TARGETS = {
    "added to a request of one token, p50": "<= 3 ms",
    "tokens per second, ingress / proxy": ">= 0.9",
    "tokens computed, ingress / one engine": "<= 1.15",
    "load, most / mean": "<= 1.3",
}


def proxy(urls: Sequence[str], key: str) -> None:
    """A server that sends each request to the next URL and passes bytes on."""
    turns = itertools.cycle(urls)

    async def handle(http: web.Request) -> web.StreamResponse:
        data, headers = await http.read(), {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        async with session.request(http.method, next(turns) + http.path, data=data, headers=headers) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(http)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    session: aiohttp.ClientSession

    async def serve() -> None:
        nonlocal session
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def proxying(urls: Sequence[str], key: str) -> Iterator[str]:
    words = (sys.executable, "-m", "benchmarks.ingress", "--proxy", *urls, "--key", key)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@dataclass(eq=False)
class Stream(asyncio.Protocol):
    """A streamed answer: when its events came. It costs as little as possible, since it shares the machine."""

    request: bytes
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    first: bytes = b""
    last: bytes = b""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent = time.perf_counter()
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.first = self.first or data
        cut = b"\n" if self.last.endswith(b"\n") and not self.last.endswith(b"\n\n") else b""
        self.times += [time.perf_counter()] * (cut + data).count(b"\n\n")
        self.last = (self.last + data)[-40:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


async def stream(url: str, key: str, prompt: Sequence[int], tokens: int) -> Stream:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 1, "ignore_eos": True, "stream": True}
    data, where = json.dumps(body).encode(), urlsplit(url)
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {where.netloc}", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {key}", "Connection: close", f"Content-Length: {len(data)}"]
    assert where.hostname is not None
    assert where.port is not None
    made = Stream("\r\n".join([*lines, "", ""]).encode() + data)
    await asyncio.get_running_loop().create_connection(lambda: made, where.hostname, where.port)
    await made.done
    assert made.first.startswith(b"HTTP/1.1 200"), made.first[:300]
    assert b"[DONE]" in made.last, made.last[-300:]
    return made


def spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(values) * 1e3, [50, 99]).tolist()
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "n": len(values)}


class Bench:
    """``ways`` has the URLs by which engines are asked, in turns."""

    def __init__(self, engines: dict[str, str], ways: Mapping[str, Sequence[str]], key: str) -> None:
        self.engines, self.key = engines, key
        self.turns = {way: itertools.cycle(urls) for way, urls in ways.items()}
        self.draw = random.Random(0)

    def prompt(self, tokens: int = 24) -> list[int]:
        return [self.draw.randrange(16, VOCABULARY) for _ in range(tokens)]

    async def ask(self, way: str, prompt: Sequence[int], tokens: int) -> Stream:
        return await stream(next(self.turns[way]), self.key, prompt, tokens)

    async def alone(self, requests: int) -> dict[str, Any]:
        """Requests of one token, one at a time, by each way in turn: from sending until the token is there."""
        found: dict[str, list[float]] = {way: [] for way in self.turns}
        for _ in range(requests):
            for way, times in found.items():
                made = await self.ask(way, self.prompt(), 1)
                times.append(made.times[0] - made.sent)
        return {way: spread(times[len(times) // 10 :]) for way, times in found.items()}

    async def gaps(self, rounds: int, tokens: int) -> dict[str, Any]:
        """Times between the tokens of one stream, which leaves a core to what is between engine and client."""
        found: dict[str, list[float]] = {way: [] for way in self.turns}
        for _ in range(rounds):
            for way, times in found.items():
                made = await self.ask(way, self.prompt(), tokens)
                times += np.diff(made.times[:tokens]).tolist()
        return {way: spread(times) for way, times in found.items()}

    async def carried(self, rounds: int, tokens: int) -> dict[str, Any]:
        """Tokens per second of many streams at once."""
        found: dict[str, list[float]] = {way: [] for way in self.turns}
        for turn in range(rounds + 1):
            for way, rates in found.items():
                began = time.perf_counter()
                await asyncio.gather(*(self.ask(way, self.prompt(), tokens) for _ in range(STREAMS)))
                if turn:
                    rates.append(STREAMS * tokens / (time.perf_counter() - began))
        ratios = [a / b for a, b in zip(found["ingress"], found["proxy"], strict=True)]
        return {
            "tokens_per_s": {way: [round(rate) for rate in rates] for way, rates in found.items()},
            "medians": {way: round(statistics.median(rates)) for way, rates in found.items()},
            "ingress_over_proxy": {"rounds": [round(r, 3) for r in ratios], "median": statistics.median(ratios)},
        }

    async def shared(self, scale: float, seed: int) -> dict[str, Any]:
        """``prefix_caching`` in several groups, each with a beginning of its own, at an even rate: what the engines
        compute for it, and how the load is divided."""
        ways = ("ingress", "proxy", "one engine")
        self.turns["one engine"] = itertools.cycle([next(iter(self.engines.values()))])
        first, found = self.requests(scale, seed)[: 2 * GROUPS], dict[str, Any]()
        began = time.perf_counter()
        await asyncio.gather(*(self.ask("proxy", each.prompt_token_ids, each.max_tokens) for each in first))
        rate = AUTO_LOAD * len(first) / (time.perf_counter() - began)

        async def later(at: float, way: str, one: Planned) -> None:
            await asyncio.sleep(at)
            await self.ask(way, one.prompt_token_ids, one.max_tokens)

        for i, way in enumerate(ways, 1):  # other tokens for each, which no cache holds
            requests = self.requests(scale, seed + GROUPS * i)
            before = await self.counters()
            await asyncio.gather(*(later(k / rate, way, each) for k, each in enumerate(requests)))
            after = await self.counters()
            rose = {name: {key: after[name][key] - n for key, n in counts.items()} for name, counts in before.items()}
            total = {key: sum(counts[key] for counts in rose.values()) for key in next(iter(rose.values()))}
            loads = [counts["generation_tokens"] for counts in rose.values()]
            found[way] = {
                "requests": len(requests),
                "prompt_tokens": total["prompt_tokens"],
                "prompt_tokens_computed": total["prompt_tokens"] - total["prefix_cache_hits"],
                "tokens_computed": total["computed_tokens"],
                "load_most_over_mean": round(max(loads) / statistics.mean(loads), 3),
            }
        del self.turns["one engine"]
        for way in ("ingress", "proxy"):
            for key in ("prompt_tokens_computed", "tokens_computed"):
                # Plans differ a little in length: as parts of what was asked for.
                parts = [found[each][key] / found[each]["prompt_tokens"] for each in (way, "one engine")]
                found[way][f"{key}_over_one_engine"] = round(parts[0] / parts[1], 3)
        return {"requests_per_s": round(rate, 2), **found}

    def requests(self, scale: float, seed: int) -> list[Planned]:
        workload = WORKLOADS["prefix_caching"]
        groups = [plan(workload, scale=scale, seed=seed + g, vocab_size=VOCABULARY) for g in range(GROUPS)]
        made = [one for group in groups for one in group[:EACH]]
        random.Random(seed).shuffle(made)
        return made

    async def counters(self) -> dict[str, dict[str, float]]:
        names = ("prompt_tokens", "prefix_cache_hits", "computed_tokens", "generation_tokens")
        found = {}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}) as session:
            for engine, url in self.engines.items():
                async with session.get(f"{url}/metrics") as response:
                    families = text_string_to_metric_families(await response.text())
                    values = {sample.name: sample.value for family in families for sample in family.samples}
                found[engine] = {name: values[f"infer_{name}_total"] for name in names}
        return found


async def measure(bench: Bench, rounds: int, scale: float) -> dict[str, Any]:
    for way in bench.turns:
        await asyncio.gather(*(bench.ask(way, bench.prompt(), 64) for _ in range(STREAMS)))  # to be warm
    alone = await bench.alone(max(20, round(400 * scale)))
    gaps = await bench.gaps(rounds, max(20, round(600 * scale)))
    carried = await bench.carried(rounds, max(20, round(300 * scale)))
    shared = await bench.shared(max(0.1, scale), 1)

    def added(figures: dict[str, Any], to: str) -> dict[str, float]:
        return {p: round(figures["ingress"][p] - figures[to][p], 3) for p in ("p50_ms", "p99_ms")}

    return {
        "one token": alone | {"added to direct": added(alone, "direct"), "added to proxy": added(alone, "proxy")},
        "between tokens": gaps | {"added to direct": added(gaps, "direct"), "added to proxy": added(gaps, "proxy")},
        f"{STREAMS} streams": carried,
        f"prefix_caching in {GROUPS} groups": shared,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingress", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number and the length of requests")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--proxy", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.proxy:
        proxy(args.proxy, args.key)
        return 0
    plugins = Plugins.discover()
    words = ["--model.path=demo", "--kernels.threads=1", "--server.port=0", "--server.access_log=false"]
    words += ["--ray.replicas=2", "--log.level=warning"]
    loaded = load_settings(plugins, env={}, argv=words, read_file=False)
    made = command.plan(CommandContext(loaded.settings, loaded.sources, plugins, tuple(words)), local=True)
    with tempfile.TemporaryDirectory(prefix="infer-", ignore_cleanup_errors=True) as folder:
        try:
            url = command.start(made, folder)
            import ray  # not before ``start`` has set what Ray reads when it is imported

            from infer_ray import application

            directory = ray.get_actor(made["name"], namespace=application.NAMESPACE)
            engines = {name: entry["url"] for name, entry in ray.get(directory.table.remote(0))[1].items()}
            with proxying([*engines.values()], made["key"]) as plain:
                ways = {"direct": [*engines.values()], "proxy": [plain], "ingress": [url]}
                figures = asyncio.run(measure(Bench(engines, ways, made["key"]), args.rounds, args.scale))
        finally:
            command.end()
    result = {"machine": machine(), "ray": ray.__version__, "targets": TARGETS, **figures}
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
