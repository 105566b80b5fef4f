"""python3 box.py [CALL or PART ...]: run the GPU tests and benchmarks on a bare machine without a network.

Needs only Python's standard library, and next to this file what ``make gpu-box`` put there. Every part has a time
limit, and ``--limit`` limits all parts together; if a part fails, the others still run. The folder named by the
environment variable OUT gets ``summary.json``, ``logs.tar.gz`` (a log per part, and the figures as JSON) and
``triton-cache.tar.xz``; if that archive is put next to this file, the next run does not compile anything again."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "--tb=short"]
UNIT = ["tests/kernels_triton", "--ignore=tests/kernels_triton/test_compile.py"]
GPU = ["-m", "benchmarks.gpu", "--json", "{json}"]
MODEL = [*GPU, "--only", "models", "--shape"]


def sanitizer(tool: str) -> tuple[str, ...]:
    # torch's allocator hands out parts of large blocks, beyond whose ends nothing would look wrong.
    return ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", tool, "--error-exitcode", "9")


class Part(NamedTuple):
    limit: int
    """In seconds."""
    words: list[str]
    """Python's arguments; "{json}" stands for the file for the figures, "{jobs}" for a number of processes."""
    under: tuple[str, ...] = ()
    """A command that runs Python, except in a dry run."""


SANITIZED = "wider or gated_product or test_large_scores or same_bits_in_any_company"
CALLS = {
    "correct": {
        "smoke": Part(55, [*PYTEST, *UNIT, "-k", "no_rows or wider or gated_product"]),
        "kernel-tests": Part(140, [*PYTEST, "-n", "{jobs}", "tests/gpu/test_kernels.py"]),
        "unit-tests": Part(105, [*PYTEST, "-n", "{jobs}", "-m", "not slow", *UNIT]),
        "memcheck": Part(
            45, [*PYTEST, *UNIT, "-k", f"{SANITIZED} or of_many_ties or stay_together"], sanitizer("memcheck")
        ),
        "racecheck": Part(40, [*PYTEST, *UNIT, "-k", SANITIZED], sanitizer("racecheck")),
        # Draws alone: what they find on the way is in memory that nothing has set.
        "initcheck": Part(
            40, [*PYTEST, "-m", "not slow", *UNIT, "-k", "stay_together or neither_spans"], sanitizer("initcheck")
        ),
        "serving-tests": Part(115, [*PYTEST, "-n", "{jobs}", "tests/gpu/test_serving.py"]),
    },
    "fast": {
        "kernels": Part(200, [*GPU, "--only", "kernels", "--shape", "Llama-3.2-1B"]),
        "1b-exact": Part(80, [*MODEL, "Llama-3.2-1B", "--products", "exact"]),
        "1b-vendor": Part(80, [*MODEL, "Llama-3.2-1B", "--products", "vendor"]),
        "8b-exact": Part(180, [*MODEL, "Qwen3-8B", "--products", "exact"]),
    },
    "tiles": {
        "bits": Part(130, ["-m", "benchmarks.gpu.bits", "--json", "{json}"]),
        "8b-int4": Part(150, [*MODEL, "Qwen3-8B", "--products", "exact", "--quantization", "int4"]),
        "sweep": Part(260, ["-m", "benchmarks.gpu.sweep", "--json", "{json}"]),
    },
}
"""What runs in each of three calls of ten minutes: whether the kernels are right comes before how fast they are."""
FURTHER = {
    "8b-int8": Part(150, [*MODEL, "Qwen3-8B", "--products", "exact", "--quantization", "int8"]),
    "8b-vendor": Part(180, [*MODEL, "Qwen3-8B", "--products", "vendor"]),
}
"""What runs only if it is named."""
PARTS = {name: part for parts in (*CALLS.values(), FURTHER) for name, part in parts.items()}
LIMIT = 560
"""Seconds for all parts of a call together."""
JOBS = 8
DRY_PATIENCE = 8
"""A dry run multiplies every time limit by this."""
CACHE_BYTES = 15 << 20


def unpack(work: Path) -> dict[str, str]:
    """Install the wheels and unpack the assembler under ``work``. Returns the environment in which the parts run."""
    site = work / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    wheels = sorted(map(str, (HERE / "wheels").glob("*.whl")))
    subprocess.run([*pip, "--no-cache-dir", "--upgrade", "--target", str(site), *wheels], check=True)
    assembler = work / "ptxas"
    assembler.write_bytes(lzma.decompress((HERE / "ptxas.xz").read_bytes()))
    assembler.chmod(0o755)
    cache = work / "triton-cache"
    cache.mkdir(exist_ok=True)
    if (kept := HERE / "triton-cache.tar.xz").exists():
        with tarfile.open(kept) as archive:
            archive.extractall(cache, filter="data")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(HERE / "tree")]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_PTXAS_PATH": str(assembler),
        "TRITON_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
    }


def run(command: list[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    """Run a command. Returns its exit status, or None if the time limit ended it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=HERE / "tree", env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole process group, with all that it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def verdict(part: Part, status: int | None, log: Path, figures: Path) -> int | str:
    """0 if a part has done what it is for. Tests that are all skipped, or none, and no figures, are no success."""
    if status is None:
        return "out of time"
    if status == 0 and "pytest" in part.words and not re.search(r"^\d+ passed|, \d+ passed", log.read_text(), re.M):
        return "ran no test"
    if status == 0 and "{json}" in part.words and not (figures.exists() and json.loads(figures.read_text())):
        return "measured nothing"
    return status


def pack(folder: Path, out: Path, limit: int | None = None) -> None:
    """Write ``folder`` as an archive. With a limit on its size, the newest files are left out as far as necessary."""
    mode: Any = "w:xz" if out.suffix == ".xz" else "w:gz"
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_mtime)
    while True:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as archive:
            for file in files:
                archive.add(file, file.relative_to(folder))
        if limit is None or buffer.tell() <= limit:
            break
        files = files[: len(files) * limit // buffer.tell()]
    out.write_bytes(buffer.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    calls = "; ".join(f"{name} ({', '.join(parts)})" for name, parts in CALLS.items())
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{calls}; {', '.join(FURTHER)}; default: {', '.join(CALLS)}"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-box"), help="a scratch folder (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS) - set(CALLS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    chosen = [part for name in args.parts or CALLS for part in CALLS.get(name, [name])]
    began = time.monotonic()
    args.work = args.work.resolve()  # absolute, because parts run in another folder
    out = Path(os.environ.get("OUT", "out"))
    logs = args.work / "logs"
    for folder in (out, logs):
        folder.mkdir(parents=True, exist_ok=True)
    environment = unpack(args.work)
    patience = DRY_PATIENCE if args.dry else 1
    if args.dry:
        environment |= {"GPU_DRY_RUN": "1", "TRITON_INTERPRET": "1"}
    summary: dict[str, Any] = {"python": sys.version, "set up s": round(time.monotonic() - began, 1), "parts": {}}

    def save() -> None:
        (out / "summary.json").write_text(json.dumps(summary, indent=1))
        pack(logs, out / "logs.tar.gz")

    for name in chosen:
        part = PARTS[name]
        figures, log = logs / f"{name}.json", logs / f"{name}.log"
        left = args.limit * patience - (time.monotonic() - began)
        if left < 5:
            summary["parts"][name] = {"status": "not begun: no time left"}
            continue
        start = time.monotonic()
        given = {"{json}": str(figures), "{jobs}": str(min(JOBS, os.cpu_count() or 1))}
        command = [*(() if args.dry else part.under), sys.executable, *(given.get(word, word) for word in part.words)]
        status = verdict(part, run(command, log, min(part.limit * patience, left), environment), log, figures)
        text = log.read_text(errors="replace").strip()
        summary["parts"][name] = told = {
            "status": status,
            "seconds": round(time.monotonic() - start, 1),
            "last words": text.splitlines()[-3:],
        }
        print(f"{name}: {told['status']} in {told['seconds']} s: {(told['last words'] or [''])[-1]}", flush=True)
        save()
    save()
    pack(args.work / "triton-cache", out / "triton-cache.tar.xz", CACHE_BYTES)
    return int(any(part["status"] != 0 for part in summary["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
