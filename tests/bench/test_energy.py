"""What a server takes to answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infer_bench.bench import Sample, median_run, summarize, table
from infer_bench.energy import UNKNOWN, Meter, Taken

ELSEWHERE = "http://example.org:8000"
BUSY = """
import multiprocessing, socket, sys, time
def spin(seconds):
    while time.process_time() < seconds: pass
if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        for seconds in (0.2, 60):
            sys.stdin.readline()
            child = multiprocessing.get_context("fork").Process(target=spin, args=(seconds,), daemon=True)
            child.start()
            if seconds == 0.2: child.join()
            print("done", flush=True)
        sys.stdin.readline()
        child.kill()
"""


def package(powercap: Path, name: str, microjoules: int, most: int = 10_000_000) -> Path:
    zone = powercap / f"zone-{len([*powercap.iterdir()])}"
    zone.mkdir()
    for file, text in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", most)):
        (zone / file).write_text(f"{text}\n")
    return zone


def test_joules_are_those_of_all_processors(tmp_path: Path) -> None:
    """Their parts are not counted again, and a counter may begin anew."""
    first, second = package(tmp_path, "package-0", 9_000_000), package(tmp_path, "package-1", 1_000_000)
    core, again = package(tmp_path, "core", 0), package(tmp_path, "package-0", 9_000_000)
    meter = Meter(ELSEWHERE, tmp_path)
    begun = meter.read()
    for zone in (first, again):
        (zone / "energy_uj").write_text("500000")
    (second / "energy_uj").write_text("1250000")
    (core / "energy_uj").write_text("7000000")
    assert meter.read().since(begun).joules == pytest.approx(1.5 + 0.25)
    (first / "energy_uj").write_text("600000")
    assert meter.read().since(begun).joules == pytest.approx(1.85)
    (second / "energy_uj").unlink()
    assert meter.read() == UNKNOWN


def test_joules_that_cannot_be_read_are_not_told(tmp_path: Path) -> None:
    assert Meter(ELSEWHERE, tmp_path / "nowhere").read() == UNKNOWN
    (package(tmp_path, "package-0", 5) / "energy_uj").write_text("")
    package(tmp_path, "package-1", 5)
    assert Meter(ELSEWHERE, tmp_path).read() == UNKNOWN, "one of two processors says half"


def test_the_time_of_a_servers_processes_is_counted_also_once_they_have_ended() -> None:
    server = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdin is not None
        assert server.stdout is not None

        def go_on() -> None:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            assert server.stdout.readline() == "done\n"

        meter = Meter(f"http://127.0.0.1:{int(server.stdout.readline())}/")
        begun = meter.read()
        go_on()
        taken = meter.read().since(begun).cpu_s
        assert taken is not None
        assert taken >= 0.15, "the clock ticks every 10 ms"
        go_on()
        for _ in range(10_000):  # the other one is under way
            now = meter.read().since(begun).cpu_s
            if now is None or now > taken + 0.2:
                break
        assert now is not None
        assert now > taken + 0.2
        server.stdin.write("\n")
        server.stdin.flush()
        server.wait()
        assert meter.read().cpu_s is None
    assert Taken(1.0, None).since(Taken(None, 1.0)) == UNKNOWN


def test_figures_are_by_token_of_an_answer() -> None:
    sample = Sample(sent=1.0, chunks=[1.5, 1.6], done=2.0, prompt_tokens=10, output_tokens=50)
    both = summarize([sample, sample], {}, Taken(2.0, 30.0))
    assert (both["cpu_s_per_1000_tokens"], both["joules_per_token"]) == (20.0, 0.3)
    neither, failed = summarize([sample], {}), summarize([Sample(error="full")], {}, Taken(2.0, 30.0))
    assert neither["joules_per_token"] is failed["joules_per_token"] is failed["cpu_s_per_1000_tokens"] is None
    lines = {
        line[:20].strip(): line[20:].split() for line in table({"a": median_run([both]), "b": neither}).splitlines()
    }
    assert lines["CPU joules/token"] == ["0.30", "-"]
    assert lines["CPU s/1000 tokens"] == ["20.00", "-"]
    assert "joules" not in table({"b": neither})
