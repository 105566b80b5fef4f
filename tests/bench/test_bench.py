"""Plans, figures, and the client against a server in the test's own event loop."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_bench import bench
from infer_bench.bench import WORKLOADS, Planned, Sample, median_run, percentiles, plan, play, served, summarize, table
from infer_bench.energy import Meter, Taken


def test_plans_are_drawn_from_the_seed_within_the_ranges() -> None:
    for workload in WORKLOADS.values():
        one, same, other = (plan(workload, scale=1.0, seed=s, vocab_size=500) for s in (1, 1, 2))
        assert one == same != other
        assert len(one) == workload.requests
        for p in one:
            own = len(p.prompt_token_ids) - workload.shared_prefix
            assert any(low <= own <= high for _, low, high in workload.mixture)
            assert workload.output[0] <= p.max_tokens <= workload.output[1]
            assert all(16 <= t < 500 for t in p.prompt_token_ids)


def test_three_quarters_of_chunked_prefill_are_long() -> None:
    big = plan(WORKLOADS["chunked_prefill"], scale=1.0, seed=0, vocab_size=500) * 1
    long = sum(len(p.prompt_token_ids) >= 1024 for p in big)
    assert 0.5 < long / len(big) < 0.95


def test_its_own_server_has_no_access_log_and_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of lines of JSON would come before the tables, and what is refused cannot be measured. Limits that are
    given explicitly hold."""

    class Started:
        def __init__(self, command: Sequence[str], env: Mapping[str, str], **more: object) -> None:
            env = {**env, "INFER_SERVER__REQUESTS_PER_MINUTE": "5"}
            found = load_settings(Plugins.discover(), argv=command[command.index("serve") + 1 :], env=env)
            own = found.settings.server
            assert (own.access_log, own.requests_per_minute, own.tokens_per_minute) == (False, None, 9)
            assert own.request_timeout_s == 1
            self.stdout = io.StringIO("infer: ready on http://here\n")

        def send_signal(self, number: int) -> None: ...

        def wait(self) -> int:
            return 0

    monkeypatch.setattr("infer_bench.bench.subprocess.Popen", Started)
    with bench.server(["--server.tokens_per_minute=9", "--server.request_timeout_s", "1"]) as url:
        assert url == "http://here"


def test_when_requests_arrive() -> None:
    """In units of the mean distance: evenly, at random, or all at once."""
    workload = replace(WORKLOADS["baseline"], requests=500)
    for arrivals, spread in (("uniform", 0.0), ("poisson", 1.0)):
        planned = plan(replace(workload, arrivals=arrivals), scale=1.0, seed=0, vocab_size=500)
        gaps = np.diff([p.at for p in planned])
        assert planned[0].at == 0
        assert gaps.mean() == pytest.approx(1, rel=0.1)
        assert gaps.std() == pytest.approx(spread, rel=0.15)
    assert {p.at for p in plan(replace(workload, arrivals="at once"), scale=1.0, seed=0, vocab_size=500)} == {0}


def test_prefix_is_shared_and_scale_applies_to_counts_and_lengths() -> None:
    some = plan(WORKLOADS["prefix_caching"], scale=0.25, seed=0, vocab_size=500)
    assert len(some) == 12
    assert len({p.prompt_token_ids[:256] for p in some}) == 1
    assert all(264 <= len(p.prompt_token_ids) <= 288 for p in some)
    tiny = plan(WORKLOADS["baseline"], scale=1e-6, seed=0, vocab_size=500)
    assert [(len(p.prompt_token_ids), p.max_tokens) for p in tiny] == [(1, 1)]


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 9.0, 2.5, 7.0]
    assert percentiles(values)["p95"] == pytest.approx(np.percentile(values, 95))
    assert percentiles([]) == {}


def test_figures_of_two_requests() -> None:
    good = Sample(sent=1.0, chunks=[1.5, 1.6, 1.8], done=2.0, prompt_tokens=10, output_tokens=3)
    bad = Sample(sent=1.0, done=3.0, output_tokens=2, error="HTTP 503")
    figures = summarize([good, bad], {})
    assert figures["errors"] == ["HTTP 503"]
    assert figures["output_tok_s"] == pytest.approx(1.5)
    assert figures["ttft_ms"]["p50"] == pytest.approx(500)
    assert figures["itl_ms"]["max"] == pytest.approx(200)
    assert figures["latency_ms"]["p50"] == pytest.approx(1000)
    assert median_run([figures, figures, figures])["errors"] == ["HTTP 503"] * 3
    assert "ITL p99 ms" in table({"as set": figures})
    assert "padded" not in table({"as set": figures})


def test_arithmetic_against_padded_arithmetic() -> None:
    counters = {
        "passes": 3,
        "computed_tokens": 20,
        "useful_tokens": 20,
        "padded_tokens": 50,
        "prefix_cache_hits": 16,
    }
    lines = table({"as set": summarize([], counters)}).splitlines()
    found = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in lines[1:]}
    assert (found["computed/needed"], found["padded/needed"], found["passes"]) == ("1.000", "2.500", "3")


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9, 1.0])
def test_shared_is_a_part_of_every_prompt(shared: float) -> None:
    given = plan(WORKLOADS["prefix_caching"], scale=1.0, seed=0, vocab_size=5000, shared=shared)
    prompts = [p.prompt_token_ids for p in given]
    assert all(1024 + 32 <= len(p) <= 1024 + 128 for p in prompts)
    for a, b in itertools.pairwise(prompts):
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert abs(common - shared * min(len(a), len(b))) <= 2


async def test_the_client_against_a_server_that_streams_fails_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, metered, read = list[Any](), list[Meter](), Meter.read

    def counted_read(meter: Meter) -> Taken:
        metered.append(meter)
        return read(meter)

    monkeypatch.setattr(bench, "METERED_S", 0.0)
    monkeypatch.setattr(Meter, "read", counted_read)

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body)
        if body["max_tokens"] == 99:
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "x"}], "usage": null}\n\n')
        if body["max_tokens"] == 7:
            await response.write(b'data: {"error": {"message": "broke"}}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return response

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f"# HELP x\ninfer_passes_total {float(len(seen))}\n")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 64}]})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        assert (await served(url))["max_model_len"] == 64
        planned = [Planned(0.0, (5, 6), n) for n in (3, 99, 7)]
        for arrivals in ("at once", "sequential"):
            (good, refused, broke), counted, taken = await play(
                url, "fake", planned, arrivals, 1.0, Planned(0.0, (9,), 2)
            )
            assert taken.cpu_s is not None, "the server is this process"
            assert len(metered) > 2, "counters may begin anew in between"
            metered.clear()
            assert counted == {"passes": 3.0}
            assert (len(good.chunks), good.output_tokens, good.error) == (3, 3, None)
            assert good.sent <= good.chunks[0] <= good.chunks[-1] <= good.done
            assert (refused.error or "").startswith("HTTP 503")
            assert broke.error == "broke"
    assert seen[1]["prompt"] == [5, 6]
    assert seen[1]["ignore_eos"] is True
    assert seen[1]["temperature"] == 0
