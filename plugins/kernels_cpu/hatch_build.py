"""The build hook that compiles the kernels into the package, once per instruction set level.

``CXX`` names the compiler, which may compile for another machine (``aarch64-linux-gnu-g++``); the wheel is then for
that machine. ``CXXFLAGS`` come after our own flags. The same sources and compiler yield the same bytes, in any folder.

Without a C++ compiler the package is built all the same. It then says at run time that it has no kernels, and
``kernels.backend = "auto"`` chooses another provider.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "src" / "infer_kernels_cpu"
FLAGS = ["-std=c++20", "-pthread", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-ffp-contract=fast"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = ["-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*VNNI, "-mavx512bf16"]
LEVELS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx2": AVX2,
        "avx2_vnni": [*AVX2, "-mavxvnni"],
        "avx512": AVX512,
        "avx512_vnni": VNNI,
        "avx512_bf16": BF16,
        "amx": [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"bf16": ["-march=armv8.2-a+bf16+i8mm"]},
}
"""The levels of a machine besides ``portable``; native.py says what they need."""


class Compiler:
    """The C++ compiler that the environment names, and the ``machine`` that it compiles for."""

    def __init__(self) -> None:
        self.command = shlex.split(os.environ.get("CXX", "c++"))
        self.found = bool(self.command) and shutil.which(self.command[0]) is not None
        self.machine = platform.machine()
        if self.found:
            asked = subprocess.run([*self.command, "-dumpmachine"], capture_output=True, text=True)
            self.machine = asked.stdout.strip().split("-")[0] or self.machine
        self.levels = {"portable": list[str](), **LEVELS.get(self.machine, {})}

    def start(self, level: str, to: Path, package: Path = PACKAGE) -> subprocess.Popen[str]:
        """Begins to compile a level."""
        own = [*FLAGS, f"-ffile-prefix-map={package}=.", *self.levels[level]]
        given = shlex.split(os.environ.get("CXXFLAGS", ""))
        source = str(package / "native" / "kernels.cpp")
        return subprocess.Popen([*self.command, *own, *given, source, "-o", str(to)], stderr=subprocess.PIPE, text=True)

    def platform(self) -> str:
        """The platform of what it compiles, as a wheel's tag says it."""
        here = sysconfig.get_platform()
        if self.machine != platform.machine() and here.startswith("linux"):
            here = f"linux-{self.machine}"
        return here.replace("-", "_").replace(".", "_")


class Native(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for stale in PACKAGE.glob("*.so"):  # built from other sources or for another machine
            stale.unlink()
        compiler = Compiler()
        if not compiler.found:
            self.app.display_warning("no C++ compiler: infer-kernels-cpu is built without its kernels")
            return
        running = {level: compiler.start(level, PACKAGE / f"{level}.so") for level in compiler.levels}
        for level, process in running.items():
            _, said = process.communicate()
            if process.returncode:
                print(said, file=sys.stderr)
                self.app.display_warning(f"infer-kernels-cpu is built without {level}: its compiler run failed")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{compiler.platform()}"
        build_data["artifacts"] += ["*.so"]
