"""Compile what the provider launches for well-known models, for GPUs that need not be here.

Launches are recorded on tensors without data, so that what is compiled is what would run: signatures,
specialisations and options. Prints a line per kernel; exits with 1 where one needs more shared memory than there is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from infer.protocols import AttentionSpec, Draws, HeadNorms, Ragged, Rotary
from infer_kernels_triton import provider
from infer_kernels_triton.configs import TABLE

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
SIZES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Shape:
    """What of a model decides which kernels are compiled."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    unit_offset: bool = False


MODELS = {
    "Llama-3.2-1B": Shape(2048, 32, 8, 64),
    "Llama-3.2-3B": Shape(3072, 24, 8, 128),
    "Qwen3-0.6B": Shape(1024, 16, 8, 128),
    "Qwen3-8B": Shape(4096, 32, 8, 128),
    "Gemma-3-1B": Shape(1152, 4, 1, 256, 512, True),
}


def launches(arch: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[JITFunction[Any], dict[str, Any]]]:
    """Every kernel that the models launch, with its arguments and options."""
    found = []

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

    run, JITFunction.run = JITFunction.run, record
    try:
        kernels = provider.TritonKernels(torch.device("cpu"))
        kernels._config, kernels._programs = TABLE[arch], 264
        for shape in MODELS.values():
            for lens in ((1,), (1,) * 256, (1, 1, 500)):
                _layer(kernels, shape, lens, dtype)
        for temperature, ranked in ((0, False), (1, False), (1, True)):
            _sample(kernels, temperature == 0, ranked, dtype)
    finally:
        JITFunction.run = run
    return found


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer(kernels: provider.TritonKernels, shape: Shape, lens: tuple[int, ...], dtype: torch.dtype) -> None:
    T, B, D, H, K, E = sum(lens), len(lens), shape.hidden, shape.heads, shape.kv_heads, shape.head_size
    x = _empty(T, D, dtype=dtype)
    weight = kernels.pack(_empty((H + 2 * K) * E, D, dtype=dtype))
    kernels.add_rms_norm(x, x, _empty(D, dtype=dtype), 1e-6, shape.unit_offset)
    kernels.rms_norm(x, _empty(D, dtype=dtype), 1e-6, shape.unit_offset)
    qkv = kernels.linear(x, weight)
    q, k, v = (part.view(T, -1, E) for part in torch.split_with_sizes(qkv, [H * E, K * E, K * E], dim=-1))
    cache = _empty(1000, 16, K, E, dtype=dtype)
    angles, weight_E = _empty(T, E // 2, dtype=torch.float32), _empty(E, dtype=dtype)
    for norms in (None, HeadNorms(weight_E, weight_E, 1e-6, shape.unit_offset)):
        rotary = Rotary(angles, angles, norms)
        kernels.rope_store_kv(q, k, v, rotary, cache, cache, _empty(T, dtype=torch.int64))
    offsets = tuple(torch.tensor([0, *lens]).cumsum(0).tolist())
    ints = {"starts_B": B, "offsets_B1": B + 1}
    ragged = Ragged(
        starts=(2000,) * B,
        lens=lens,
        offsets=offsets,
        **{name: _empty(size, dtype=torch.int32) for name, size in ints.items()},
        block_table_BP=_empty(B, 160, dtype=torch.int32),
        flat_T=_empty(T, dtype=torch.int64),
    )
    for window in {None, shape.window}:
        kernels.extend_attention(q, cache, cache, ragged, AttentionSpec(H, K, E, E**-0.5, window))
    kernels.gated(_empty(T, 2 * 6912, dtype=dtype), "silu")
    kernels.gated(_empty(T, 2 * 6912, dtype=dtype), "gelu_pytorch_tanh")


def _sample(kernels: provider.TritonKernels, greedy: bool, ranked: bool, dtype: torch.dtype) -> None:
    fp32, int64, fp64 = (_empty(4, dtype=d) for d in (torch.float32, torch.int64, torch.float64))
    kernels.sample(_empty(4, 151936, dtype=dtype), Draws(fp32, int64, fp32, fp32, fp64, greedy, ranked))


def source(kernel: JITFunction[Any], given: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """As Triton specialises: tensors and multiples of 16 are known to be so, a 1 and a None are part of the code."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{SIZES[value.dtype]}"
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def compile_one(arch: int, index: int) -> tuple[str, bool]:
    """A line about a kernel, and whether its shared memory suffices."""
    kernel, given = unique(arch)[index]
    src, options = source(kernel, given)
    compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
    shared = compiled.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(nvidia).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = match.groups() if match else ("?", "?")
    what = {name: value for name, value in given.items() if name.isupper() and kernel.arg_names.count(name)}
    text = " ".join(f"{name}={value}" for name, value in what.items())
    line = f"sm_{arch} {kernel.fn.__name__}: {shared} B shared, {registers} registers, {stack} B stack ({text})"
    return line, shared <= SHARED_MEMORY[arch]


def unique(arch: int) -> list[tuple[JITFunction[Any], dict[str, Any]]]:
    """Launches that differ in what is compiled."""
    by_key: dict[tuple[str, ...], tuple[JITFunction[Any], dict[str, Any]]] = {}
    for kernel, given in launches(arch):
        src, options = source(kernel, given)
        key = (kernel.fn.__name__, str(src.signature), str(src.constants), str(src.attrs), str(options))
        by_key.setdefault(key, (kernel, given))
    return list(by_key.values())


def main() -> int:
    jobs = [(arch, index) for arch in TABLE for index in range(len(unique(arch)))]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=8))
    for line, fits in results:
        print(line if fits else f"{line} DOES NOT FIT")
    print(f"{len(results)} compiled")
    return int(not all(fits for _, fits in results))


if __name__ == "__main__":
    sys.exit(main())
