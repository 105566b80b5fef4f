"""python3 box.py [PART ...]: run the GPU tests and benchmarks on a bare machine without a network.

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
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "--tb=short"]
GPU = ["-m", "benchmarks.gpu", "--json", "{json}"]
PARTS: dict[str, tuple[int, list[str]]] = {
    "smoke": (90, [*PYTEST, "tests/kernels_triton/test_matmul.py", "-k", "no_rows or wider"]),
    "bits": (150, ["-m", "benchmarks.gpu.bits", "--json", "{json}"]),
    "kernel-tests": (240, [*PYTEST, "tests/gpu/test_kernels.py"]),
    "serving-tests": (300, [*PYTEST, "tests/gpu/test_serving.py"]),
    "unit-tests": (240, [*PYTEST, "tests/kernels_triton", "--ignore=tests/kernels_triton/test_compile.py"]),
    "kernels": (260, [*GPU, "--only", "kernels", "--shape", "Llama-3.2-1B"]),
    "sweep": (360, ["-m", "benchmarks.gpu.sweep", "--json", "{json}"]),
    "1b-exact": (150, [*GPU, "--only", "models", "--shape", "Llama-3.2-1B", "--products", "exact"]),
    "1b-vendor": (150, [*GPU, "--only", "models", "--shape", "Llama-3.2-1B", "--products", "vendor"]),
    "8b-exact": (240, [*GPU, "--only", "models", "--shape", "Qwen3-8B", "--products", "exact"]),
    "8b-int4": (
        240,
        [*GPU, "--only", "models", "--shape", "Qwen3-8B", "--products", "exact", "--quantization", "int4"],
    ),
    "8b-int8": (
        240,
        [*GPU, "--only", "models", "--shape", "Qwen3-8B", "--products", "exact", "--quantization", "int8"],
    ),
    "8b-vendor": (240, [*GPU, "--only", "models", "--shape", "Qwen3-8B", "--products", "vendor"]),
}
"""Per part the time limit in seconds, and Python's arguments; "{json}" stands for the file for the figures."""
DRY = {"unit-tests": [*PYTEST, "tests/kernels_triton/test_matmul.py"]}
"""What a dry run runs instead, per part, if it differs."""
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
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all, in this order")
    parser.add_argument("--limit", type=float, default=560, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-box"), help="a scratch folder (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
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

    for name in args.parts or PARTS:
        seconds, words = PARTS[name]
        words = DRY.get(name, words) if args.dry else words
        figures, log = logs / f"{name}.json", logs / f"{name}.log"
        left = args.limit * patience - (time.monotonic() - began)
        if left < 5:
            summary["parts"][name] = {"status": "not begun: no time left"}
            continue
        start = time.monotonic()
        command = [sys.executable, *(str(figures) if word == "{json}" else word for word in words)]
        status = run(command, log, min(seconds * patience, left), environment)
        text = log.read_text(errors="replace").strip()
        summary["parts"][name] = part = {
            "status": "out of time" if status is None else status,
            "seconds": round(time.monotonic() - start, 1),
            "last words": text.splitlines()[-3:],
        }
        print(f"{name}: {part['status']} in {part['seconds']} s: {(part['last words'] or [''])[-1]}", flush=True)
        save()
    save()
    pack(args.work / "triton-cache", out / "triton-cache.tar.xz", CACHE_BYTES)
    return int(any(part["status"] != 0 for part in summary["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
