"""The build hook that compiles the kernels into the package, once per instruction set level.

Without a C++ compiler the package is built all the same. It then says at run time that it has no kernels, and
``kernels.backend = "auto"`` chooses another provider.
"""

from __future__ import annotations

import os
import platform
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
AVX512 = ["-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
LEVELS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS |= {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"]}


class Native(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for stale in PACKAGE.glob("*.so"):  # built from other sources or for another machine
            stale.unlink()
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None:
            self.app.display_warning("no C++ compiler: infer-kernels-cpu is built without its kernels")
            return
        source = str(PACKAGE / "native" / "kernels.cpp")
        running = {}
        for level, flags in LEVELS.items():
            command = [compiler, *FLAGS, *flags, source, "-o", str(PACKAGE / f"{level}.so")]
            running[level] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for level, process in running.items():
            _, said = process.communicate()
            if process.returncode:
                print(said, file=sys.stderr)
                self.app.display_warning(f"infer-kernels-cpu is built without {level}: its compiler run failed")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] += ["*.so"]
