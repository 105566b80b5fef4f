"""The engines to compare, and where they are installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DRIVERS = Path(__file__).parent / "drivers"
ALONE = "infer, 1 thread"
PEERS: Mapping[str, tuple[str, ...]] = {
    "infer": ("infer_.py",),
    ALONE: ("infer_.py",),
    "infer by transformers' module": ("infer_.py", "none", "transformers"),
    "infer int8": ("infer_.py", "int8"),
    "infer int4": ("infer_.py", "int4"),
    "vllm": ("vllm_.py",),
    "vllm AWQ": ("vllm_.py", "AWQ"),
    "vllm W8A8": ("vllm_.py", "W8A8"),
    "llama.cpp": ("llamacpp.py",),
    "llama.cpp Q8_0": ("llamacpp.py", "Q8_0"),
    "llama.cpp Q4_0": ("llamacpp.py", "Q4_0"),
    "llama.cpp Q4_K_M": ("llamacpp.py", "Q4_K_M"),
    "ik_llama.cpp Q8_0": ("ik_llamacpp.py", "Q8_0"),
    "ik_llama.cpp Q4_0": ("ik_llamacpp.py", "Q4_0"),
    "ik_llama.cpp Q4_K_M": ("ik_llamacpp.py", "Q4_K_M"),
    "transformers": ("transformers_.py",),
}
"""Each engine's driver, and how it quantizes the weights, if it does."""
USUAL = ("infer", "vllm", "llama.cpp", "transformers")
ENVIRONMENTS = Path(".peers")
LENT = {"ik_llama.cpp": "llama.cpp"}
"""Engines that run in another's environment, and have a folder for themselves beside it."""
VARIABLES: Mapping[str, Mapping[str, str]] = {
    ALONE: {"OMP_NUM_THREADS": "1"},
    "vllm": {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # it leaves a core idle otherwise
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
    },
}
"""Environment variables with which each peer uses the whole machine."""


def engine_of(peer: str) -> str:
    return peer.replace(",", "").split()[0]


def python_of(peer: str, given: Mapping[str, str]) -> str | None:
    """The Python interpreter that has the peer's engine installed; None if there is none."""
    engine = engine_of(peer)
    if engine in given:
        return given[engine]
    if engine in ("infer", "transformers"):
        return sys.executable
    path = ENVIRONMENTS / LENT.get(engine, engine) / "bin" / "python"
    return str(path) if path.exists() and (ENVIRONMENTS / engine).exists() else None


def installed(peers: list[str], given: list[str]) -> dict[str, str]:
    """The interpreters of the installed peers; the names of the others are printed. ``given`` are NAME=PATH."""
    paths, found = dict(item.split("=", 1) for item in given), {}
    for peer in dict.fromkeys(peers):
        if python := python_of(peer, paths):
            found[peer] = python
        else:
            print(f"{peer}: not installed (no {ENVIRONMENTS / peer}, and no --python {peer}=...); left out")
    return found


def environment(peer: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **VARIABLES.get(peer, VARIABLES.get(engine_of(peer), {})),
    }
