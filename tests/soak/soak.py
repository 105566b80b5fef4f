"""Rounds of ordinary and hostile clients and of faults, and what has to hold after each round."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.serving import HANG_S
from tests.soak.clients import HOSTILE, KNOWN, ORDINARY, Client, Site, ask, chained, plain
from tests.soak.process import Server

INSIDE = ("infer_num_requests_running{", "infer_num_requests_waiting{")
FULL = 1 << 16
"""Bytes that a file may have while the disk is full."""


@dataclass
class Report:
    violations: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    taking_part: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    """Bytes that the server holds after each round; killing it begins anew."""
    canary: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        mib = [round(nbytes / 2**20, 1) for nbytes in self.memory]
        return {
            "rounds": len(self.memory) - 1,
            "statuses": dict(sorted(self.statuses.items())),
            "clients_seen": dict(self.taking_part),
            "memory_mib": {"at first": mib[0], "most": max(mib), "at last": mib[-1]} if mib else {},
            "canary": {key: value for key, value in self.canary.items() if key != "texts"},
            "violations": len(self.violations),
        }


async def soak(
    folder: Path,
    draw: random.Random,
    rounds: int,
    report: Report,
    clients: Sequence[Client] | None = None,
    *,
    faults: bool = True,
    seconds: float = math.inf,
) -> None:
    """Run rounds on a server of their own in ``folder``, of which none begins after so many seconds. ``clients`` take
    part in each round; None: some that are drawn for each. What must not be is noted in ``report``; after it, no
    further round is run."""
    with Server(folder) as server:
        # aiohttp would wait for a place among 100 connections, and a burst is to be one.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            site = Site(server.url, session, {})
            for name, (path, body) in KNOWN.items():
                site.wanted[name] = plain(await ask(site, path, body))
            report.memory.append(server.memory())
            canary = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.soak.canary", server.url),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert canary.stdout is not None
            await canary.stdout.readline()
            end = time.monotonic() + seconds
            for _ in range(rounds):
                if time.monotonic() >= end:
                    break
                await _round(server, site, draw, report, clients, faults)
                if report.violations:
                    break
                report.memory.append(server.memory())
            output, _ = await canary.communicate(b"")
            report.canary = json.loads(output) if canary.returncode == 0 else {"texts": []}
            if len(report.canary["texts"]) != 1 or report.canary["cut"] > 2 * report.taking_part["kill -9"]:
                report.violations.append(f"the canary: {report.canary}, exit {canary.returncode}")
            report.statuses.update(site.statuses)
            if not report.violations:
                report.violations += await _rest(server, site)


async def _round(
    server: Server, site: Site, draw: random.Random, report: Report, chosen: Sequence[Client] | None, faults: bool
) -> None:
    """Let clients do what they do, and perhaps something fail meanwhile."""
    clients = [*draw.choices(ORDINARY, k=2), *draw.choices(HOSTILE, k=draw.randrange(4))] if chosen is None else chosen
    fault = draw.choice([server.kill, server.limit_files, *[None] * 8]) if faults else None
    if fault == server.limit_files:
        server.limit_files(FULL)
    tasks = {asyncio.ensure_future(client(site, random.Random(draw.random()))): client for client in clients}
    if fault == server.kill and tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=draw.random())
        await asyncio.to_thread(server.kill)
    done, hanging = await asyncio.wait(tasks, timeout=HANG_S) if tasks else (set(), set())
    for task in hanging:
        task.cancel()
        report.violations.append(f"{tasks[task].__name__} had no end")
    for task in done:
        name, error = tasks[task].__name__, task.exception()
        report.taking_part[name] += 1
        lost = fault == server.kill and isinstance(error, (aiohttp.ClientError, OSError, asyncio.IncompleteReadError))
        if error is not None and not lost and not (fault == server.limit_files and tasks[task] is chained):
            report.violations.append(f"{name}: {error!r}")
    if fault == server.kill:
        report.taking_part["kill -9"] += 1
        await asyncio.to_thread(server.start)
    elif fault == server.limit_files:
        report.taking_part["full disk"] += 1
        server.limit_files(None)
    if not server.alive:
        report.violations.append("the server ended")
        return
    for id in site.responses[-20:]:
        async with site.session.get(f"{site.url}/v1/responses/{id}") as answer:
            if answer.status != 200:
                report.violations.append(f"the stored response {id} is lost: {answer.status}")


async def _rest(server: Server, site: Site) -> list[str]:
    """What must not be when all clients have gone, or do not read: an open request, another answer than at first, or an
    end that is not clean."""
    found = []
    async with asyncio.timeout(HANG_S):
        while True:
            async with site.session.get(site.url + "/metrics") as answer:
                lines = (await answer.text()).splitlines()
            inside = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(INSIDE)]
            assert len(inside) == len(INSIDE)
            if not any(inside):
                break
    for name, (path, body) in KNOWN.items():
        if plain(await ask(site, path, body)) != site.wanted[name]:
            found.append(f"{name} is answered otherwise than at first")
    if (status := await asyncio.to_thread(server.end)) != 0:
        found.append(f"the server ended with status {status}")
    return found
