"""Simulated runs, whose figures are computed by hand, and costs, fitted to passes that the tests make up."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer import hookimpl
from infer.commands.cli import main
from infer.contracts.scheduler import Schedule, SchedulerFactory, SchedulerRegistration
from infer.contracts.scheduler import Sequence as Running
from infer.engine.schedulers import ContinuousScheduler
from infer.errors import InferError, PluginError, SettingsError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_bench.bench import Planned
from infer_bench.costs import Coefficients, Costs, fit, non_negative
from infer_bench.fitting import measured_passes
from infer_bench.simulation import Simulation, percentiles
from infer_bench.trace import read, requests
from infer_bench.tune import MOST, PRECISION, Search


class Fifo(ContinuousScheduler):
    def key(self, sequence: Running) -> int:
        return sequence.order


class Stuck(ContinuousScheduler):
    def schedule(self) -> Schedule:
        return Schedule([], [])


class Patient(ContinuousScheduler):
    """Plans nothing before two requests are there."""

    def schedule(self) -> Schedule:
        if len(self.seats.waiting) + len(self.seats.running) < 2:
            return Schedule([], [])
        return super().schedule()


class Policies:
    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_schedulers(self) -> list[SchedulerRegistration]:
        def making(policy: type[ContinuousScheduler]) -> SchedulerFactory:
            return lambda context, settings: policy(context.pool, context.engine)

        kinds = {"fifo": Fifo, "stuck": Stuck, "patient": Patient}
        return [SchedulerRegistration(name, making(kind), "a policy of a test") for name, kind in kinds.items()]


PLUGINS = Plugins.discover([Policies()])
ONE_S = {"step": 1.0, "token": 0.0}


def simulation(*argv: str, seconds: dict[str, float] | None = None, **keys: Any) -> Simulation:
    """One whose passes take 1 s each, unless ``seconds`` says otherwise."""
    costs = Costs(**{"max_seq_len": 256, "cache_tokens": 1024, "seconds": seconds or ONE_S} | keys)
    return Simulation(load_settings(PLUGINS, argv=argv).settings, PLUGINS, costs)


def ids(figures: dict[str, Any], name: str, *keys: str) -> list[float]:
    return [figures[name][key] for key in keys]


def test_two_requests_by_hand() -> None:
    """The first prompt is computed in seconds 0 to 2, in two chunks; its tokens come at 2, 3 and 4. The second request
    comes in the middle of a pass and waits for its end, at 2; its tokens come at 3, 4 and 5."""
    found = simulation("--engine.prefill_chunk_size=32").play([Planned(0, (1,) * 64, 3), Planned(1.5, (2,) * 32, 3)])
    assert ids(found, "ttft_ms", "p50", "p90", "max") == pytest.approx([1750, 1950, 2000])
    assert ids(found, "itl_ms", "p50", "max") == pytest.approx([1000, 1000])
    assert ids(found, "queue_ms", "p50", "max") == pytest.approx([250, 500])
    assert ids(found, "latency_ms", "p50", "max") == pytest.approx([3750, 4000])
    assert (found["wall_s"], found["passes"], found["sequences_per_pass"]) == pytest.approx((5, 5, 7 / 5))
    assert (found["output_tok_s"], found["total_tok_s"], found["requests_s"]) == pytest.approx((6 / 5, 102 / 5, 2 / 5))
    assert (found["requests"], found["refused"], found["preemptions"], found["cache_hits"]) == (2, 0, 0, 0)


def test_what_each_coefficient_counts() -> None:
    """Positions 0..3 of one sequence and 9 of another: 5 tokens that read 4 and 10 positions, 1, 2, 3, 4 and 10 of
    them each."""
    for name, wanted in {
        "step": 1,
        "prompts": 1,
        "token": 5,
        "sequence": 2,
        "position": 14,
        "pair": 20,
        "request": 0,
    }.items():
        seconds = Coefficients(**{"step": 0.0, "token": 0.0} | {name: 1.0})
        assert Costs(max_seq_len=9, cache_tokens=9, seconds=seconds).of([0, 9], [4, 1]) == wanted
        alone = {"step": 1, "prompts": 0, "token": 2, "sequence": 2, "position": 11, "pair": 11, "request": 0}[name]
        assert Costs(max_seq_len=9, cache_tokens=9, seconds=seconds).of([0, 9], [1, 1]) == alone


def test_a_pass_is_under_way_while_a_gpu_is_told_the_next() -> None:
    """A request that comes during a pass misses the one after it, too, which has been planned by then."""
    found = simulation(device="cuda").play([Planned(0, (1,) * 32, 4), Planned(0.5, (2,) * 32, 1)])
    assert ids(found, "ttft_ms", "p50", "max") == pytest.approx([1750, 2500])
    assert ids(found, "itl_ms", "p50", "max") == pytest.approx([1000, 1000])


def test_tokens_come_within_a_goal_beside_long_prompts() -> None:
    """No size of chunks does that: it is too long for some steps, or too short for others."""
    seconds = {"step": 0.03, "token": 0.004, "sequence": 0.0005, "position": 3e-6, "pair": 3e-7}
    rng, planned, at = random.Random(0), [], 0.0
    for _ in range(60):
        at += rng.expovariate(0.2)
        prompt = tuple(rng.randrange(3, 99) for _ in range(rng.choice([50, 100, 200, 1500])))
        planned.append(Planned(at, prompt, rng.choice([40, 80])))

    def played(setting: str, device: str = "cpu") -> dict[str, Any]:
        costs: dict[str, Any] = {"seconds": seconds, "max_seq_len": 4096, "cache_tokens": 65536, "device": device}
        return simulation(f"--engine.{setting}", **costs).play(planned)

    one, other, paced = map(played, ("prefill_chunk_size=512", "prefill_chunk_size=128", "target_itl_ms=250"))
    assert played("target_itl_ms=250", "cuda")["itl_ms"]["p99"] < 255
    for chunked in (one, other):
        assert chunked["itl_ms"]["p99"] > 5 * 255 > 5 * paced["itl_ms"]["p99"]
        assert paced["output_tok_s"] > 0.97 * chunked["output_tok_s"]
    assert paced["ttft_ms"]["p50"] < one["ttft_ms"]["p50"]


def test_a_request_costs_something_before_the_engine_has_it() -> None:
    """One after the other: the second one of two that come at once reaches the engine after 0.2 s, in the first one's
    pass. Requests that each wait for the one before pay it each."""
    costs = {"step": 1.0, "token": 0.0, "request": 0.1}
    both = [Planned(0, (1,) * 32, 1), Planned(0, (2,) * 32, 1)]
    found = simulation(seconds=costs).play(both)
    assert ids(found, "ttft_ms", "p50", "max") == pytest.approx([1600, 2100])
    found = simulation(seconds=costs).play(both, sequential=True)
    assert ids(found, "ttft_ms", "p50", "max") == pytest.approx([1100, 1100])
    assert found["wall_s"] == pytest.approx(2.2)


def test_a_rate_divides_times() -> None:
    found = simulation().play([Planned(0, (1,) * 32, 1), Planned(20, (2,) * 32, 1)], 4.0)
    assert found["wall_s"] == pytest.approx(6)


@pytest.mark.parametrize(("policy", "urgent_ms", "patient_ms"), [("continuous", 2800, 4900), ("fifo", 4800, 2900)])
def test_policies_are_compared(policy: str, urgent_ms: float, patient_ms: float) -> None:
    """One at a time, of two tokens each: the first leaves at 2, and then the next goes."""
    chosen = simulation(f"--engine.batching_mode={policy}", "--engine.max_batch_size=1")
    seen: dict[str, float] = {}
    chosen._observer = SimpleNamespace(
        infer_request_finished=lambda record: seen.update({record.request_id: record.first_token - record.arrival})
    )
    later = [Planned(0.1, (2,) * 32, 2, priority=1), Planned(0.2, (3,) * 32, 2)]
    chosen.play([Planned(0, (1,) * 32, 2), *later])
    assert (1e3 * seen["2"], 1e3 * seen["1"]) == pytest.approx((urgent_ms, patient_ms))


@pytest.mark.parametrize(("aging", "second"), [("none", "2"), ("3", "1")])
def test_priorities_age_on_the_clock_of_the_simulation(aging: str, second: str) -> None:
    """One at a time, each in a second. The urgent one comes 3.5 seconds after the other, which has to wait."""
    chosen = simulation("--engine.max_batch_size=1", f"--engine.priority_aging_s={aging}")
    seen: list[str] = []
    chosen._observer = SimpleNamespace(infer_request_finished=lambda record: seen.append(record.request_id))
    chosen.play([Planned(0, (1,) * 32, 6), Planned(0.5, (2,) * 32, 1, priority=1), Planned(4, (3,) * 32, 1)])
    assert seen[:2] == ["0", second]


def test_prompts_that_begin_alike_are_computed_once() -> None:
    """48 of 64 tokens are found, in blocks of 16, and the rest takes 16 s."""
    per_token = {"step": 0.0, "token": 1.0}
    found = simulation(seconds=per_token).play([Planned(0, (1,) * 64, 1), Planned(100, (1,) * 48 + (2,) * 16, 1)])
    assert found["cache_hits"] == 48 / 128
    assert ids(found, "ttft_ms", "p50", "max") == pytest.approx([40000, 64000])
    off = simulation("--cache.paged.prefix_caching=false", seconds=per_token)
    assert off.play([Planned(0, (1,) * 64, 1), Planned(100, (1,) * 64, 1)])["cache_hits"] == 0


def test_the_pool_is_what_costs_or_settings_say() -> None:
    """Two sequences that grow to 200 tokens do not fit into 256 positions: the later one gives up its place."""
    both = [Planned(0, (1,) * 100, 100), Planned(0, (2,) * 100, 100)]
    assert simulation("--engine.max_batch_size=2", cache_tokens=256).play(both)["preemptions"] == 1
    assert simulation("--engine.max_batch_size=2", "--cache.paged.num_blocks=16").play(both)["preemptions"] == 1
    assert simulation("--engine.max_batch_size=2").play(both)["preemptions"] == 0
    assert simulation("--cache.backend=slotted").play(both)["preemptions"] == 0


def test_requests_beyond_the_queue_are_refused() -> None:
    full = simulation("--engine.max_batch_size=1", "--engine.max_waiting_requests=1")
    found = full.play([Planned(0, (n,) * 32, 1) for n in range(4)])
    assert (found["requests"], found["refused"], found["most_waiting"]) == (2, 2, 1)


def test_windows_let_go_of_blocks() -> None:
    """With layers that read 16 positions, a long sequence leaves room for another one in 272 positions."""
    both = [Planned(0, (1,) * 100, 60), Planned(0, (2,) * 100, 60)]
    argv = ("--engine.max_batch_size=2", "--engine.prefill_chunk_size=16")
    assert simulation(*argv, cache_tokens=272, windows=(16,)).play(both)["preemptions"] == 0
    assert simulation(*argv, cache_tokens=272, windows=(0,)).play(both)["preemptions"] == 1


def test_a_policy_may_wait_for_others_but_not_for_ever() -> None:
    two = [Planned(0, (1,) * 32, 1), Planned(7, (2,) * 32, 1)]
    found = simulation("--engine.batching_mode=patient").play(two)
    assert ids(found, "ttft_ms", "p50", "max") == pytest.approx([4500, 8000])
    with pytest.raises(PluginError, match=r"'stuck' of .* plans nothing, though it has work \(requests: 2\)"):
        simulation("--engine.batching_mode=stuck").play(two)


def test_a_fault_of_a_pass_is_not_taken_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = simulation()
    monkeypatch.setattr(broken._executor, "launch", lambda batch: 1 / 0)
    with pytest.raises(InferError, match="division by zero"):
        broken.play([Planned(0, (1,) * 32, 1)])


def test_a_second_run_goes_on_with_clock_and_cache() -> None:
    twice, one = simulation(), Planned(3, (1,) * 64, 1)
    for cached in (0, 48 / 64):
        found = twice.play([one])
        assert (found["wall_s"], found["cache_hits"]) == pytest.approx((4, cached))


def test_percentiles_are_numpys() -> None:
    draw = random.Random(0)
    values = [draw.random() for _ in range(50)]
    counts = [draw.randint(1, 9) for _ in values]
    found = percentiles(values, counts)
    wanted = 1e3 * np.percentile(np.repeat(values, counts), [50, 90, 95, 99, 100])
    assert [*found.values()] == pytest.approx(wanted.tolist())
    assert percentiles([]) == {}
    assert percentiles([2.0])["p99"] == 2000


# Costs


def passes(seconds: Coefficients, count: int = 200) -> list[tuple[Sequence[int], Sequence[int], float]]:
    """Passes drawn at random that take exactly as long as coefficients say."""
    draw, costs = random.Random(0), Costs(max_seq_len=9, cache_tokens=9, seconds=seconds)
    made: list[tuple[Sequence[int], Sequence[int], float]] = []
    for _ in range(count):
        sequences = draw.randint(1, 8)
        starts = [draw.randint(0, 500) for _ in range(sequences)]
        lens = [draw.choice([1, 1, draw.randint(2, 200)]) for _ in starts]
        made.append((starts, lens, costs.of(starts, lens)))
    return made


def test_a_fit_finds_what_passes_were_made_of() -> None:
    true = Coefficients(step=2e-3, prompts=1e-3, token=3e-5, sequence=1e-4, position=2e-7, pair=5e-9)
    found, error = fit(passes(true))
    assert [*found.model_dump().values()] == pytest.approx([*true.model_dump().values()], rel=1e-6)
    assert error < 1e-9


def test_interrupted_passes_do_not_bend_a_fit_but_their_time_counts() -> None:
    true = Coefficients(step=2e-3, token=3e-5)
    made = passes(true)
    late = [(starts, lens, seconds * (20 if i % 10 == 0 else 1)) for i, (starts, lens, seconds) in enumerate(made)]
    found, error = fit(late)
    factor = sum(seconds for *_, seconds in late) / sum(seconds for *_, seconds in made)
    assert found.step == pytest.approx(factor * true.step, rel=1e-6)
    assert found.token == pytest.approx(factor * true.token, rel=1e-6)
    assert error == pytest.approx(factor - 1)


def test_no_coefficient_is_negative() -> None:
    """The plain least squares are y = 3 - x."""
    x_PC = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative(x_PC, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2, 0])
    assert non_negative(x_PC, np.array([-1.0, -1.0, -1.0])).tolist() == [0, 0]


def test_which_passes_are_measured() -> None:
    """Those that were a whole step that another one followed at once."""
    steps = [
        (0.0, [0], [5], True, True),
        (1.0, [5], [1], True, True),
        (3.0, [6], [1], True, False),
        (9.0, [0], [7], False, True),
        (10.0, [7], [1], True, True),
        (12.0, [8], [1], True, True),
        (15.0, [9], [1], True, False),
    ]
    assert measured_passes(steps, 0) == [([0], [5], 1.0), ([5], [1], 2.0), ([7], [1], 2.0), ([8], [1], 3.0)]
    assert measured_passes(steps, 1) == [([0], [5], 2.0), ([7], [1], 3.0)]


def test_a_file_of_costs_says_what_was_written(tmp_path: Path) -> None:
    costs = Costs(
        model='a "model"\\\n',
        machine="a CPU",
        device="cuda",
        max_seq_len=99,
        cache_tokens=7,
        windows=(0, 16),
        passes=12,
        error=0.25,
        seconds=Coefficients(step=1 / 1024, token=2e-7, request=0.5),
    )
    (tmp_path / "costs.toml").write_text(costs.text())
    found = Costs.read(str(tmp_path / "costs.toml"))
    assert found.seconds.step == pytest.approx(costs.seconds.step, rel=1e-3)
    rough = {"model", "seconds"}
    assert found.model_dump(exclude=rough) == costs.model_dump(exclude=rough)
    assert found.model.startswith("a  model")


COSTS = "max_seq_len = 512\ncache_tokens = 4096\n[seconds]\nstep = 0.01\ntoken = 1e-4\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file or directory; --fit writes such a file."),
        ("step: 1", "is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 5); --fit writes"),
        (COSTS.replace("step = 0.01\n", ""), "lacks seconds.step; --fit writes such a file."),
        (COSTS.replace("step = 0.01", "step = -1"), "seconds.step = -1: Input should be greater than or equal to 0."),
        (COSTS.replace("step = 0.01", "step = inf"), "seconds.step = inf: Input should be a finite number."),
        (COSTS + "tokens = 1\n", "seconds.tokens is unknown; it has model, machine, device,"),
        ('device = "tpu"\n' + COSTS, "device = 'tpu': Input should be 'cpu' or 'cuda'."),
        ("windows = []\n" + COSTS, "windows = []: Array should have at least 1 item."),
    ],
)
def test_costs_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, why: str
) -> None:
    file = tmp_path / "costs.toml"
    if text is not None:
        file.write_text(text)
    assert main(["simulate", "--workload", "baseline", "--costs", str(file)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"infer: --costs {file}")
    assert why in said


# Traces


def trace(folder: Path, text: str) -> str:
    (folder / "trace.csv").write_text(text)
    return str(folder / "trace.csv")


HEAD = "arrival_s,prompt_tokens,output_tokens"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ": its first line lacks arrival_s; it has to name arrival_s, prompt_tokens, output_tokens, and may name "),
        ("arrival_s,prompt_tokens\n", ": its first line lacks output_tokens;"),
        (f"{HEAD},color\n", ": its first line has 'color';"),
        (f"{HEAD},arrival_s\n", ": its first line names a column twice;"),
        (f"{HEAD}\n", " has no request; give it a line below the first."),
        (f"{HEAD}\n0,5\n", ", line 2 has 2 cells, but the first line has 3."),
        (f"{HEAD}\nsoon,5,5\n", ", line 2: arrival_s is 'soon'; it has to be seconds, 0 or more."),
        (f"{HEAD}\ninf,5,5\n", ", line 2: arrival_s is 'inf'; it has to be seconds, 0 or more."),
        (f"{HEAD}\nnan,5,5\n", ", line 2: arrival_s is 'nan'; it has to be seconds, 0 or more."),
        (f"{HEAD}\n-1,5,5\n", ", line 2: arrival_s is '-1'; it has to be seconds, 0 or more."),
        (f"{HEAD}\n1,5,5\n0.5,5,5\n", ", line 3: arrival_s is 0.5, after 1; sort the lines by it."),
        (f"{HEAD}\n0,5.5,5\n", ", line 2: prompt_tokens is '5.5'; it has to be a whole number."),
        (f"{HEAD}\n0,5,\n", ", line 2: output_tokens is ''; it has to be a whole number."),
        (f"{HEAD}\n0,0,5\n", ", line 2: prompt_tokens is 0; it has to be at least 1."),
        (f"{HEAD}\n0,5,0\n", ", line 2: output_tokens is 0; it has to be at least 1."),
        (f"{HEAD},prefix\n0,5,5,a\n", ", line 2: prefix and prefix_tokens go together; give both or neither."),
        (f"{HEAD},prefix_tokens\n0,5,5,3\n", ", line 2: prefix and prefix_tokens go together; give both or neither."),
        (f"{HEAD},prefix,prefix_tokens\n0,5,5,a,6\n", ", line 2: prefix_tokens is 6, more than the 5 of prompt_tokens"),
        (f"{HEAD},priority\n0,5,5,high\n", ", line 2: priority is 'high'; it has to be a whole number."),
    ],
)
def test_traces_that_cannot_be_played(tmp_path: Path, text: str, why: str) -> None:
    path = trace(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        read(path)
    assert str(caught.value).startswith(f"--workload {path}")
    assert why in str(caught.value)


def test_a_trace_of_longer_sequences_than_there_are(
    costs_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, f"{HEAD}\n0,9,1\n7,4000,97\n")
    assert main(["simulate", "--costs", costs_file, "--workload", path]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"infer: --workload {path} has a request of 4097 tokens, prompt and answer together, at arrival_s 7, but a "
        "sequence has at most 4096 positions; raise engine.max_seq_len."
    )
    assert main(["simulate", "--costs", costs_file, "--workload", path, "--max-model-len", "4097"]) == 0


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read(str(tmp_path / "none.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="is no CSV file"):
        read(str(tmp_path / "bytes.csv"))


def test_which_prompts_begin_alike(tmp_path: Path) -> None:
    text = f"""{HEAD},session,prefix,prefix_tokens,priority,user
0,6,2,,a,4,,me
1,5,2,,a,3,-2,
2,5,2,,b,3,,

3,4,2,s,,,,
4,9,2,s,,,,
5,3,2,s,,,,
6,4,1,s,,,,
"""
    made = [*requests(read(trace(tmp_path, text)))]
    prompts = [one.prompt_token_ids for one in made]
    assert prompts[:3] == [(1, 1, 1, 1, 0, 0), (1, 1, 1, 2, 2), (3, 3, 3, 4, 4)]
    first, second, third, fourth = prompts[3:]
    assert first == (6,) * 4
    assert second == first + (6, 6) + (8,) * 3  # with the answer, which repeats the prompt's last token
    assert third == second[:3]
    assert fourth[:3] == third
    assert [(one.at, one.max_tokens) for one in made[:2]] == [(0, 2), (1, 2)]
    assert [one.priority for one in made[:2]] == [0, -2]
    assert [one.user for one in made[:2]] == ["me", ""]


def test_a_conversation_finds_its_answers_in_the_cache(tmp_path: Path) -> None:
    """Of 96 tokens, all but the last block are those of the first turn's prompt and answer, or are its last token,
    which has not been computed."""
    text = f"{HEAD},session\n0,48,33,s\n100,96,1,s\n"
    found = simulation().play(requests(read(trace(tmp_path, text))))
    assert found["cache_hits"] == 80 / 144


# The command


@pytest.fixture
def costs_file(tmp_path: Path) -> str:
    (tmp_path / "costs.toml").write_text(
        "max_seq_len = 4096\ncache_tokens = 65536\n[seconds]\nstep = 0.01\ntoken = 1e-4\n"
    )
    return str(tmp_path / "costs.toml")


def test_the_same_seed_gives_the_same_text(costs_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in (1, 1, 2):
        argv = ["simulate", "--costs", costs_file, "--scale", "0.5", "--seed", str(seed), "--json", "-"]
        assert main(argv) == 0
        taken = capsys.readouterr()
        said.append((taken.out, "\n".join(line for line in taken.err.splitlines() if "INFO" not in line)))
    assert said[0] == said[1]
    assert said[0][1] != said[2][1]
    report = json.loads(said[0][0])
    assert [*report["workloads"]] == [
        "baseline",
        "continuous_batching",
        "paged_attention",
        "chunked_prefill",
        "prefix_caching",
    ]
    for name, each in report["workloads"].items():
        figures = each["runs"]["as set"]
        assert figures["refused"] == 0
        assert (figures["cache_hits"] > 0.5) == (name == "prefix_caching")
        assert (each["rate"] == 1.0) == (name in ("baseline", "paged_attention"))


def test_columns_are_variants(costs_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path, f"{HEAD}\n0,32,2\n0,32,2\n")
    compared = ["--compare", "engine.max_batch_size=1", "--scheduler", "continuous"]
    assert main(["simulate", "--costs", costs_file, "--workload", path, *compared]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["costs of a model on a machine: given", "", f"{path} (a trace)"]
    cells = {line[:16].strip(): line[16:].split() for line in lines[4:]}
    assert lines[3].split() == ["as", "set", "compared"]
    assert (cells["requests"], cells["passes"], cells["waiting, most"]) == (["2", "2"], ["2", "4"], ["0", "1"])
    assert cells["TTFT p50 ms"] == ["16.4", "24.9"]
    assert cells["ITL max ms"] == ["10.2", "10.1"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--workload", "nope"], "--workload nope: there are baseline, continuous_batching, paged_attention, "),
        (["--workload", "baseline"], "What do passes cost? --costs FILE names a file that says it; --fit measures it "),
        (["--costs", "c", "--scale", "0"], "--scale and --rate must be positive."),
        (["--fit", "0"], "--fit is 0; it is seconds, more than 0."),
        (["--costs", "c", "--shared", "2"], "--shared is 2.0; it is a part of a prompt, from 0 to 1."),
        (["--costs", "c", "--workload", "a.csv", "--rate", "2"], "a.csv is a trace; leave out --scale, --rate and"),
        (["--fit"], "model.path is not set"),
    ],
)
def test_arguments_that_do_not_go_together(
    argv: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *argv]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--engine.speculation=ngram"], "infer simulate does not know which drafts would be right; leave it out."),
        (["--cache.paged.memory_fraction=0.5"], "cache.paged.memory_fraction = 0.5, but no memory is simulated;"),
        (["--cache.paged.num_blocks=8"], "The cache has room for 128 positions, but one sequence may need 256;"),
    ],
)
def test_settings_that_cannot_be_simulated(argv: list[str], why: str) -> None:
    with pytest.raises(SettingsError) as caught:
        simulation(*argv)
    assert why in str(caught.value)


def test_no_memory_is_taken_by_a_pool_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_cache_paged.pool.PagedPool.__init__", lambda *args, **keys: pytest.fail("it is made"))
    with pytest.raises(SettingsError, match="no memory is simulated"):
        simulation("--cache.paged.memory_fraction=0.5")


def test_a_workload_that_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs.toml").write_text(COSTS.replace("512", "256"))
    assert main(["simulate", "--costs", str(tmp_path / "costs.toml"), "--workload", "baseline"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("needs 512 positions, but a sequence has at most 256; use --scale 0.50 or less.")


def test_a_page_of_the_simulated_steps(costs_file: str, tmp_path: Path) -> None:
    path, page = trace(tmp_path, f"{HEAD}\n0,32,2\n"), tmp_path / "page.html"
    assert main(["simulate", "--costs", costs_file, "--workload", path, "--timeline", str(page)]) == 0
    assert f'"title": "{path}, as set"' in page.read_text()


@pytest.mark.slow
def test_costs_are_fitted_to_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.toml"
    argv = ["simulate", "--model", "demo", "--fit", "0.5", "--costs", str(file), "--workload", "baseline"]
    assert main([*argv, "--scale", "0.1", "--engine.max_batch_size=2"]) == 0
    found = Costs.read(str(file))
    assert (found.model, found.device, found.max_seq_len, found.cache_tokens) == ("demo", "cpu", 2048, 4096)
    assert found.passes > 0
    assert max(found.seconds.model_dump(exclude={"request"}).values()) > 0  # which of them is a matter of the clock
    assert capsys.readouterr().out.startswith(f"costs of demo on {found.machine}: fitted to {found.passes} passes")


# The search


def test_a_search_finds_the_best_choice_and_its_rate() -> None:
    """Made up: the rate that keeps to the goals is 10 times a factor of each value, and b = 2 needs a = 3."""
    seen: list[float] = []

    def play(choice: Mapping[str, int | None], rate: float) -> dict[str, Any]:
        if choice.get("b") == 2 and choice.get("a") != 3:
            raise SettingsError("they do not go together")
        seen.append(rate)
        assert len(seen) < 500, "the search does not end"
        most = 10.0 * (choice.get("a") or 1) * (choice.get("b") or 1)
        return {"refused": 0, "itl_ms": {"p99": rate / most * 50}, "ttft_ms": {}}

    search = Search(play, {"itl_ms": 50.0, "ttft_ms": 1.0})
    search.run({"a": [1, 3, None], "b": [2, 1]})
    assert search.best == {"a": 3, "b": 2}
    assert 60 / PRECISION <= search.rate <= 60
    assert 10 / PRECISION <= search.as_set <= 10
    assert len(seen) == search.runs


def test_refused_requests_are_no_way_to_a_goal() -> None:
    figures = {"refused": 1, "itl_ms": {"p99": 1.0}}
    search = Search(lambda choice, rate: figures | {"refused": int(rate > 8)}, {"itl_ms": 50.0})
    search.run({})
    assert 8 / PRECISION <= search.rate <= 8


@pytest.mark.parametrize("most", [MOST, 0.7 * MOST, 0.55 * MOST])
def test_no_rate_above_the_limit_is_played(most: float) -> None:
    """The last doubling would go beyond it, and what lies between would be bisected."""
    seen: list[float] = []

    def play(choice: Mapping[str, int | None], rate: float) -> dict[str, Any]:
        seen.append(rate)
        return {"refused": 0, "itl_ms": {"p99": rate / most * 50}}

    search = Search(play, {"itl_ms": 50.0})
    assert most / PRECISION <= search.highest({}, floor=1000.0) <= most
    assert max(seen) <= MOST
    assert search.highest({}, floor=MOST) == 0.0


@pytest.mark.slow
def test_tuned_settings_keep_to_the_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token takes 1 ms, so that a chunk of 512 beside other answers holds them up for half a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("infer_bench.tune.CANDIDATES", {"max_batch_size": (8,), "prefill_chunk_size": (512, 64)})
    (tmp_path / "costs.toml").write_text(COSTS.replace("512", "4096").replace("1e-4", "1e-3"))
    argv = ["tune", "--workload", "chunked_prefill", "--costs", "costs.toml", "--requests", "6", "--json", "found"]
    assert main([*argv, "--goal-itl-ms", "150"]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "found").read_text())
    assert found["rate"] > found["as_set"]
    assert found["engine"] == tomllib.loads(said[said.index("[engine]") :])["engine"]
    assert found["engine"]["prefill_chunk_size"] == 64
    assert main([*argv, "--goal-itl-ms", "1"]) == 1
    assert "No settings that were tried keep to the goals at any rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "Give --goal-ttft-ms, --goal-itl-ms or both; they and --requests must be positive."),
        (["--goal-itl-ms", "0"], "Give --goal-ttft-ms, --goal-itl-ms or both; they and --requests must be positive."),
        (["--goal-itl-ms", "9", "--workload", "baseline"], "--workload baseline: there are continuous_batching, "),
        (["--goal-itl-ms", "9", "--workload", "none.csv"], "--workload none.csv cannot be read: No such file"),
        (["--goal-itl-ms", "9"], "What do passes cost?"),
        (
            ["--goal-itl-ms", "9", "--costs", "short.toml"],
            "chunked_prefill needs 2234 positions, but a sequence has at ",
        ),
    ],
)
def test_what_cannot_be_tuned(
    argv: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.toml").write_text(COSTS)
    workload = [] if "--workload" in argv else ["--workload", "chunked_prefill"]
    assert main(["tune", *workload, *argv]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_a_trace_is_tuned_by_its_pace(costs_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Passes of 10 ms and 0.1 ms for each token: any pace keeps to 1 s."""
    path = trace(tmp_path, f"{HEAD}\n0,32,2\n1,32,2\n")
    assert main(["tune", "--workload", path, "--costs", costs_file, "--goal-ttft-ms", "1000"]) == 0
    said = capsys.readouterr().out
    assert "times the trace's pace" in said
    assert "[engine]" not in said
