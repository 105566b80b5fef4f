"""Fits costs to passes that a server on this machine computes for traffic drawn at random."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from infer.assemble.blueprint import Blueprint
from infer.contracts.model import ModelContext, StatefulModel
from infer.contracts.sections import Settings
from infer.errors import InferError
from infer.plugins.discovery import Plugins
from infer_bench.bench import Planned, Sample, machine, send, served, server
from infer_bench.costs import Costs, fit

ALONE = 9
"""How many requests come one after the other, to see what one costs besides its passes. The first is not counted."""
TOKENS = 8192
"""How many prompt tokens the requests have at most that come together."""
Steps = Sequence[tuple[float, list[int], list[int], bool, bool]]


def measured(settings: Settings, plugins: Plugins, settings_argv: Sequence[str], seconds: float) -> Costs:
    """Send a server with these settings traffic for about as many seconds, and fit its costs. Raises InferError."""
    blueprint = Blueprint(settings, plugins)
    least = ModelContext(blueprint.kernels, blueprint.dtype, blueprint.device, 2)
    model = blueprint.weights.sketch(least).model
    if isinstance(model, StatefulModel) and model.states:
        raise InferError(
            f"--fit: {settings.model.path} has recurrent layers, whose states infer simulate does not know; use "
            "infer bench."
        )
    with TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        with server(settings_argv, ("infer_bench.watched", str(file))) as url:
            entry = asyncio.run(served(url))
            alone = asyncio.run(_traffic(url, entry, settings.engine.max_batch_size, seconds))
        seen = json.loads(file.read_text())
    passes = measured_passes(seen["steps"], lag=0 if blueprint.device.type == "cpu" else 1)
    if not passes:
        raise InferError(f"--fit {seconds:g}: the server has computed no two passes in a row; give it more seconds.")
    inside = [first - arrival for arrival, first in sorted(seen["requests"])[1:ALONE]]
    outside = [sample.chunks[0] - sample.sent for sample in alone[1:]]
    coefficients, error = fit(passes)
    return Costs(
        model=str(settings.model.path),
        machine=f"{machine()['cpu']}, {machine()['cores']} cores",
        device=blueprint.device.type,
        max_seq_len=entry["max_model_len"],
        cache_tokens=seen["free_tokens"],
        windows=tuple(spec.window or 0 for spec in model.attention),
        passes=len(passes),
        error=error,
        seconds=coefficients.model_copy(update={"request": max(0.0, median(outside) - median(inside))}),
    )


def measured_passes(steps: Steps, lag: int) -> list[tuple[list[int], list[int], float]]:
    """(starts, lens, seconds) of passes. While passes follow each other, one takes from the beginning of its step to
    that of the next; with a ``lag`` of 1, a step waits for the pass of the one before."""
    return [
        (steps[i][1], steps[i][2], steps[i + lag + 1][0] - steps[i + lag][0])
        for i in range(len(steps) - lag - 1)
        if all(whole and followed for *_, whole, followed in steps[i : i + lag + 1])
    ]


async def _traffic(url: str, entry: dict[str, Any], most: int, seconds: float) -> list[Sample]:
    """Requests one by one, then groups of up to ``most`` that come together or shortly after each other. Returns the
    samples of the former. Raises InferError if one fails."""
    import aiohttp

    rng = np.random.default_rng(0)
    longest = min(TOKENS, entry["max_model_len"] - 33)
    end = time.perf_counter() + seconds

    def drawn(high: float, low: float = 1.0) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(min(16, entry["vocab_size"] - 1), entry["vocab_size"], length).tolist())

    async def later(session: aiohttp.ClientSession, one: Planned) -> Sample:
        await asyncio.sleep(one.at)
        sample = await send(session, url, entry["id"], one)
        if sample.error is not None:
            raise InferError(f"--fit: a request failed: {sample.error}")
        return sample

    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        alone = [await later(session, Planned(0.0, prompt(min(longest, 256)), 8)) for _ in range(ALONE)]
        while time.perf_counter() < end:
            batch = drawn(most)
            high = max(1, min(longest, TOKENS // batch))
            delay = rng.choice([0.0, 0.02])
            group = [Planned(i * delay, prompt(drawn(high)), drawn(32, 4)) for i in range(batch)]
            await asyncio.gather(*(later(session, one) for one in group))
    return [sample for sample in alone if sample.chunks]
