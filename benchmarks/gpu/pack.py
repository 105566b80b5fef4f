"""python -m benchmarks.gpu.pack FOLDER: put everything that a bare GPU machine without a network needs into one folder.

That is: wheels of our own packages, wheels of dependencies that the machine lacks, an assembler (Triton's own, from a
newer release), tests, benchmarks, and ``box.py``, which runs there.
"""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from triton.backends.nvidia import __file__ as nvidia

from infer_kernels_triton.assembler import FIXED

ROOT = Path(__file__).parents[2]
PLUGINS = (
    "cache_paged",
    "cache_slotted",
    "layers",
    "models",
    "kernels_triton",
    "llguidance",
    "testing",
    "bench",
    "server",
)
PACKAGES = ("core", *(f"plugins/{name}" for name in PLUGINS))
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
TREE = ("tests", "benchmarks", "pyproject.toml")
LARGEST = 64 * 2**20


def missing(bare: set[str]) -> list[str]:
    """The direct and indirect dependencies of our packages that ``bare`` lacks, pinned to the versions installed
    here."""
    found: dict[str, str] = {}
    projects = [tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in PACKAGES]
    queue = [line for project in projects for line in project["dependencies"]]
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if name in bare or name in found or name.startswith("infer-"):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"python_version": PYTHON, "extra": ""}):
            package = distribution(name)
            found[name] = f"{name}=={package.version}"
            queue += package.requires or []
    return sorted(found.values())


def newest_assembler() -> Path:
    """The newest ptxas in Triton's package: ``infer_kernels_triton.assembler`` says why."""

    def release(tool: Path) -> tuple[int, ...]:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"release (\d+)\.(\d+)", said)
        assert match is not None, said
        return tuple(map(int, match.groups()))

    best = max((Path(nvidia).parent / "bin").glob("ptxas*"), key=release)
    if release(best) < FIXED:
        raise SystemExit(f"{best} is of CUDA {release(best)}; install a triton whose assembler is of {FIXED} or later.")
    return best


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for path in PACKAGES:
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels.resolve())]
        subprocess.run(build, cwd=ROOT / path, check=True, capture_output=True)
    lines = (ROOT / "benchmarks/gpu/bare.txt").read_text().splitlines()
    listed = filter(None, (line.partition("#")[0].strip() for line in lines))
    bare = {str(canonicalize_name(Requirement(line).name)) for line in listed}
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    target = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    for requirement in missing(bare):
        subprocess.run([*pip, "download", *target, "--dest", wheels, requirement], check=True)
    with lzma.open(folder / "ptxas.xz", "wb") as file:
        file.write(newest_assembler().read_bytes())
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, folder / "tree" / name)
    shutil.copy(ROOT / "benchmarks/gpu/box.py", folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > LARGEST:
        raise SystemExit(f"{folder} has {size} bytes; a box may have {LARGEST}.")
    print(f"{folder}: {size / 2**20:.1f} MiB, {len(list(wheels.iterdir()))} wheels")


if __name__ == "__main__":
    main()
