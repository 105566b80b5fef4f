"""How long a model that is asked for takes to answer, when another one has to make room for it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from benchmarks.shapes import CONFIGS, write_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

QUIET_S = 6.0
"""Nothing is under way if no process has computed for so long: the next spare process begins two seconds after a load,
and what is known of exactness is confirmed after five without a request."""
QUIET_SHARE = 0.02
LOADED = re.compile(r"(\S+ \S+) INFO (.*)")
STEPS = (
    ("model .* is being loaded", "the other model has ended"),
    ("the ending of the checkpoint's file", "settings are read"),
    ("tokenizer: ", "tokenizer is read"),
    ("kernels ", "backends are chosen"),
    ("weights, ", "weights are mapped"),
    ("cache ", "the cache is allocated"),
    (".* exact: ", "check"),
    ("model .* is loaded", "the server's routes"),
)
"""What the log says, usually in this order, and what is done then. The lines of both processes have one clock."""


def settings(folder: Path, args: argparse.Namespace) -> str:
    lines = [
        *(
            "[server]",
            "port = 0",
            "[server.router]",
            f"memory_gib = {args.memory_gib}",
            f"spare = {str(args.spare).lower()}",
        ),
        *("[engine]", f"max_batch_size = {args.batch}", f"max_seq_len = {args.positions}"),
        *("[model]", f"weight_cache = '{folder / 'packed'}'"),
    ]
    if args.quantization:
        lines.append(f"quantization = '{args.quantization}'")
    for name in "ab":
        lines += [f"[models.{name}.model]", f"path = '{folder / name}'"]
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def served(folder: Path, lines: list[str]) -> AsyncIterator[tuple[str, Process]]:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "infer.commands.cli", "serve"), cwd=folder, stdout=PIPE, stderr=PIPE
    )
    assert server.stdout is not None
    assert server.stderr is not None

    async def read() -> None:
        assert server.stderr is not None
        async for line in server.stderr:
            lines.append(line.decode().rstrip())

    reading = asyncio.create_task(read())
    try:
        ready = (await server.stdout.readline()).decode()
        if not ready:
            await reading
            raise SystemExit("\n".join(lines))
        yield ready.removeprefix("infer: ready on ").strip(), server
    finally:
        server.terminate()
        await server.wait()


async def quiet(server: Process) -> None:
    """Until the next spare process is there, the exactness confirmed, and whatever else goes on in the background."""
    before = -1.0
    while (after := _computed(server.pid)) - before > QUIET_SHARE * QUIET_S or before < 0:
        before = after
        await asyncio.sleep(QUIET_S)


def _computed(pid: int) -> float:
    """The CPU time of a process and its children, in seconds."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def ask(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """Seconds until the first byte of a stream."""
    body = {"model": name, "prompt": [*range(5, 13)], "max_tokens": 2, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(await response.text())
        await response.content.readany()
        took = time.perf_counter() - began
        await response.read()
    return took


def parts(lines: Sequence[str], last: datetime) -> dict[str, float]:
    """Seconds from ``last``, and then from one line of the log to the next one that is known."""
    found: dict[str, float] = {}
    left = [*STEPS]
    for line in lines:
        if (match := LOADED.fullmatch(line)) is None:
            continue
        at = datetime.fromisoformat(match[1].replace(",", "."))
        for i, (begin, what) in enumerate(left):
            if re.match(begin, match[2]):
                found[what] = (at - last).total_seconds()
                last, left = at, left[:i] + left[i + 1 :]
                break
    return found


async def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    lines: list[str] = []
    wakes, warm = [], []
    every: dict[str, list[float]] = defaultdict(list)
    async with aiohttp.ClientSession() as session:
        (folder / "settings.toml").write_text(settings(folder, args))
        async with served(folder, lines) as (url, server):
            for turn in range(2 * (args.repeat + args.untimed)):
                await quiet(server)
                lines.clear()
                began = datetime.now()
                took = await ask(session, url, "ab"[turn % 2])
                if turn > 1 and not any("is being loaded" in line for line in lines):
                    raise SystemExit("both models fit into --memory-gib; give less")
                again = await ask(session, url, "ab"[turn % 2])
                told = parts(lines, began)
                if turn < 2 * args.untimed:
                    print(f"not counted: {took:.3f} s", flush=True)
                    continue
                wakes.append(took)
                warm.append(again)
                for what, seconds in told.items():
                    every[what].append(seconds)
                print(f"wake {took:.3f} s, again {again:.3f} s", flush=True)
    medians = {what: statistics.median(values) for what, values in every.items()}
    return {"wake_s": statistics.median(wakes), "loaded_s": statistics.median(warm), "parts_s": medians, "wakes": wakes}


def write_tokenizer(file: Path, size: int) -> None:
    """A made-up BPE of so many tokens, and nearly as many merges, which take most of the time in which one is read."""
    draw, tokens, merges = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet()), list[tuple[str, str]]()
    known = {*tokens}
    while len(tokens) < size:
        pair = draw.choice(tokens), draw.choice(tokens[:4096])
        if len(token := "".join(pair)) <= 16 and token not in known:
            known.add(token)
            tokens.append(token)
            merges.append(pair)
    made = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="Llama-3.2-1B", choices=sorted(CONFIGS))
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept; a temporary one otherwise")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--memory-gib", type=float, default=4.5, help="for one model and a spare process, not for two")
    parser.add_argument("--batch", type=int, default=4, help="engine.max_batch_size")
    parser.add_argument("--positions", type=int, default=2048, help="engine.max_seq_len")
    parser.add_argument("--repeat", type=int, default=5, help="wakes of each model")
    parser.add_argument("--untimed", type=int, default=2, help="wakes of each before, which pack, check and compare")
    parser.add_argument("--no-spare", dest="spare", action="store_false", help="server.router.spare = false")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in "ab":
            if not (folder / name / "config.json").exists():
                write_weights(folder / name, CONFIGS[args.shape])
                write_tokenizer(folder / name / "tokenizer.json", CONFIGS[args.shape]["vocab_size"])
        found = asyncio.run(measure(folder, args))
    print(f"\n{args.shape}: {found['wake_s']:.3f} s until the first byte; {found['loaded_s']:.3f} s when it is loaded")
    for what, seconds in found["parts_s"].items():
        print(f"{1000 * seconds:7.0f} ms  {what}")
    if args.json:
        args.json.write_text(json.dumps(found | {"shape": args.shape, "spare": args.spare}, indent=1))


if __name__ == "__main__":
    main()
