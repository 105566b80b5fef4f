"""Compile what the provider launches for well-known models, for GPUs that need not be here.

Launches are recorded on tensors without data, and specialized by Triton itself, so that what is compiled is what would
run. Prints a line per kernel, and what is wrong with it; exits with 1 if anything is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from infer.contracts.attention import KV, AttentionSpec, HeadNorms, QuantizedKV, Ragged, Rotary
from infer.contracts.kernels import Draws, Expert, GateActivation, Routing
from infer.weight import GroupedWeight
from infer_kernels_triton import provider
from infer_kernels_triton.configs import TABLE
from infer_kernels_triton.matmul import linear
from infer_testing.recurrent import Layer, conv, delta, space, state_rows

KIB = 1024
SHARED_MEMORY = {80: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""Of a block, at the most. An A100 has 163 KiB, but the smaller GPUs that take its configurations have 99."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
SPILL = {80: 128, 90: 256, 100: 256}
"""Bytes of registers per thread that may go to memory; a quarter more for heads that are cut in two."""
CURRENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""Whether this Triton has to make fast code; of older ones, it is enough that what they make is right."""


STATEFUL = ("conv_kernel", "delta_kernel", "space_kernel")
"""Kernels whose states Triton may compute twice, in the layout of the sums and in that of the store."""
FUSED = re.compile(r"\bfma\.|\b(?:add|sub|mul)\.f32")
"""A product that is not rounded before something is added to it, and what ptxas may make such ones of."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides which kernels are compiled."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    unit_offset: bool = False
    sinks: bool = False
    experts: int = 0
    """Of which a token has 8, of as many hidden values as half of the model's."""


MODELS = {
    "Llama-3.2-1B": Shape(2048, 32, 8, 64),
    "Llama-3.2-3B": Shape(3072, 24, 8, 128),
    "Qwen3-8B": Shape(4096, 32, 8, 128),
    "Gemma-3-1B": Shape(1152, 4, 1, 256, 512, True),
    "Gemma-4-E2B": Shape(1536, 8, 1, 512),
    "GLM-4.7-Flash": Shape(2048, 20, 1, 576),
    "gpt-oss-20b": Shape(2880, 64, 8, 64, 128, sinks=True, experts=32),
    "Granite-3.1-1B-A400M": Shape(1024, 16, 8, 64, experts=32),
}

LARGEST = ("Llama-3.2-3B", "Gemma-4-E2B")
"""Heads of 128, which most models have, and of 512, which take the most memory."""
EACH = (*LARGEST, "GLM-4.7-Flash", "Gemma-3-1B", "gpt-oss-20b")
"""A model for each size of heads, with windows, sinks and experts."""
MORE = ("Granite-3.1-1B-A400M",)
"""Small heads without sinks, and experts whose rows fill their tiles: one GPU is enough."""
SERVED: dict[int, dict[str, tuple[str, ...]]] = {
    80: {"bf16": EACH, "fp32": LARGEST},
    90: {"bf16": (*EACH, *MORE), "fp16": LARGEST[:1], "fp32": LARGEST[:1]},
    100: {"bf16": EACH},
}
"""What is compiled unless something else is asked for. float16 is as wide as bfloat16: one GPU is enough. float32 takes
the most memory, of which the smallest GPUs have the least; nobody serves it on the largest."""

RECURRENT: tuple[Layer, ...] = (
    conv(6144, 4),
    conv(1024, 3, silu=False),
    conv(3328, 4, bias=True),
    delta(16, 16, 128, 128),
    delta(16, 48, 128, 128),
    delta(30, 30, 96, 192, max_beta=2.0),
    delta(32, 32, 128, 128, channel_decay=True),
    space(48, 64, 1, 128),
    space(24, 64, 1, 256),
)
"""The recurrent layers of Qwen3.5, OLMo Hybrid, Kimi Linear, LFM2, Granite 4 and Falcon-H1."""
GATED = ((2048, 128, 128), (3072, 3072, 3072), (8192, 1024, 8192))
"""Sizes of rows, of groups and of weights of their norms."""


@dataclass(frozen=True)
class Form:
    """A way to quantize a weight."""

    bits: Literal[4, 8]
    group: int
    scales: torch.dtype
    minimum: bool = False
    table: bool = False

    def weight(self, n: int, k: int, dtype: torch.dtype) -> GroupedWeight:
        scales = torch.zeros(n, k // self.group, dtype=self.scales)
        scales[0] = 0.1  # one that takes all of the type's bits
        codes = torch.zeros(n, k * self.bits // 8, dtype=torch.uint8)
        table = torch.zeros(16) if self.table else None
        return GroupedWeight(codes, scales, self.bits, scales if self.minimum else None, table, dtype=dtype)


FORMS = (
    Form(4, 32, torch.bfloat16),
    Form(4, 32, torch.float16, minimum=True),
    Form(4, 128, torch.float16, minimum=True),
    Form(4, 32, torch.float32, table=True),
    Form(8, 64, torch.bfloat16),
    Form(8, 256, torch.float32, minimum=True),
    Form(8, 16, torch.float32),
)


@dataclass(frozen=True)
class Launched:
    """A kernel as Triton specializes it for what it is given."""

    kernel: JITFunction[Any]
    source: ASTSource
    options: dict[str, Any]
    given: dict[str, Any]

    @property
    def key(self) -> str:
        """The same where the same code runs."""
        source = self.source
        return str((source.name, source.signature, source.constants, source.attrs, sorted(self.options.items())))

    def __str__(self) -> str:
        names = [p.name for p in self.kernel.params if p.is_constexpr]
        return f"{self.source.name} ({' '.join(f'{name}={self.given[name]}' for name in names)})"


@contextmanager
def recording(arch: int) -> Iterator[list[Launched]]:
    """Kernels that would be launched, or compiled ahead, on a GPU of ``arch``. Nothing runs."""
    found: list[Launched] = []
    backend = make_backend(GPUTarget("cuda", arch, 32))
    binders: dict[JITFunction[Any], Any] = {}

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = binders.get(kernel)
        if binder is None:
            binder = binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, debug=False, **kwargs)
        options = {name: value for name, value in options.items() if name != "debug"}
        _, signature, constants, attributes = kernel._pack_args(
            backend, dict(kwargs), bound, specialization, dict(options)
        )
        found.append(Launched(kernel, ASTSource(kernel, signature, constants, attributes), options, bound))

    run, JITFunction.run = JITFunction.run, record
    try:
        yield found
    finally:
        JITFunction.run = run


def make(arch: int) -> provider.TritonKernels:
    """The provider as it is on a GPU of ``arch``; what it is given need not be there."""
    kernels = provider.TritonKernels(torch.device("cpu"))
    kernels._configs, kernels._multiprocessors, kernels._programs = TABLE[arch], 132, 264
    return kernels


@cache
def launches(arch: int, dtype: torch.dtype, models: tuple[str, ...], forms: bool) -> list[Launched]:
    """Every kernel that the models launch."""
    with recording(arch) as found:
        kernels = make(arch)
        for name in models:
            for lens in ((1,), (1,) * 256, (1, 1, 500)):
                _layer(kernels, MODELS[name], lens, dtype)
        if dtype != torch.float16:  # which has the tiles of bfloat16
            _tiles(kernels, dtype)
        _recurrent(kernels, dtype)
        fp32, int64, fp64 = (_empty(4, dtype=d) for d in (torch.float32, torch.int64, torch.float64))
        kernels.sample(_empty(4, 151936, dtype=dtype), Draws(fp32, int64, fp32, fp32, fp64, False, True, True))
        for form, n, k in _grouped(arch, dtype, models, forms):
            packed = kernels.pack(form.weight(n, k, dtype))
            kernels.embedding(_empty(3, dtype=torch.int64), packed)
            kernels.linear(_empty(3, k, dtype=dtype), packed)
    return list({launched.key: launched for launched in found}.values())


def _grouped(arch: int, dtype: torch.dtype, models: tuple[str, ...], forms: bool) -> Iterator[tuple[Form, int, int]]:
    """Quantized weights and their shapes: of every form if all ``forms`` are asked for, or a model of each kind on an
    H100."""
    everything = forms or {*EACH} <= {*models}
    if everything:
        yield FORMS[0], 17000, 256
    if everything or dtype != torch.float32:
        some = FORMS if forms or arch == 90 else FORMS[::3]  # they differ in what is decoded, not in products
        for form in some if everything else FORMS[:1]:
            yield form, 96, 2048  # in segments, where there are any


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
    codes = QuantizedKV(_empty(1000, 16, K, E, dtype=torch.int8), _empty(1000, 16, K, dtype=torch.float32))
    caches: list[KV] = [_empty(1000, 16, K, E, dtype=dtype)]
    if dtype != torch.float32:  # attention to codes in float32 is right, but keeps more than the registers hold
        caches.append(codes)
    angles, weight_E = _empty(T, E // 2, dtype=torch.float32), _empty(E, dtype=dtype)
    for norms in (None, HeadNorms(weight_E, weight_E, 1e-6, shape.unit_offset)):
        rotary = Rotary(angles, angles, norms)
        for kv in caches:
            kernels.rope_store_kv(q, k, v, rotary, kv, kv, _empty(T, dtype=torch.int64))
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
        for kv in caches:
            spec = AttentionSpec(
                H, K, E, E**-0.5, window, sinks_H=_empty(H, dtype=torch.float32) if shape.sinks else None
            )
            kernels.extend_attention(q, kv, kv, ragged, spec)
    gate, up = _empty(T, 2 * 6912, dtype=dtype).chunk(2, dim=-1)
    for activation in get_args(GateActivation):
        kernels.gated(gate, up, activation)
    if shape.experts and T > 1:
        expert = Expert(_empty(D, D, dtype=dtype), _empty(D, D // 2, dtype=dtype))
        packed = kernels.pack_experts([expert] * shape.experts, shape.experts)
        experts, shares = kernels.route(_empty(T, shape.experts, dtype=dtype), Routing(8))
        kernels.gated_experts(x, experts, shares, packed, "clamped_swiglu")


def _tiles(kernels: provider.TritonKernels, dtype: torch.dtype) -> None:
    """Products in every tile, with a K that its steps divide; another one is that of gpt-oss's experts."""
    config = kernels._config(dtype).linear
    x, weight = _empty(3, 2048, dtype=dtype), _empty(4096, 2048, dtype=dtype)
    for tile in config.tiles:
        linear(x, weight, None, replace(config, tiles=(tile,)), kernels._multiprocessors)


def _recurrent(kernels: provider.TritonKernels, dtype: torch.dtype) -> None:
    meta = torch.device("meta")
    for layer in RECURRENT:
        product = _empty(3, sum(layer.widths) + 64, dtype=dtype)[:, : sum(layer.widths)]
        inputs = torch.split_with_sizes(product, layer.widths, 1)
        states = _empty(8, *layer.shape, dtype=layer.state_dtype(dtype))
        layer.to(meta, dtype).run(kernels, inputs, states, state_rows([1, 2], [0, 1], {}, meta))
    for size, group, width in GATED:
        for gate_first in (False, True):
            x, weight = _empty(3, size, dtype=dtype), _empty(width, dtype=dtype)
            kernels.gated_rms_norm(x, x, weight, 1e-6, group, gate_first)


def compile_one(
    arch: int, dtype: str, models: tuple[str, ...], forms: bool, index: int
) -> tuple[str, str, list[str], str]:
    """Key of the model's attention or "", a line, what is wrong, and how the compiled attention adds weights up."""
    launched = launches(arch, DTYPES[dtype], models, forms)[index]
    compiled = triton.compile(launched.source, target=GPUTarget("cuda", arch, 32), options=launched.options)
    shared = compiled.metadata.shared
    usage = tool("cuobjdump", "-res-usage", cubin=compiled.asm["cubin"])
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    registers, stack = map(int, match.groups())
    wrong = []
    if shared > SHARED_MEMORY[arch]:
        wrong.append(f"needs more than {SHARED_MEMORY[arch]} B of shared memory")
    name = launched.source.name
    spill = SPILL[arch] * 5 // 4 if launched.given.get("E_MORE") else SPILL[arch]
    if stack > spill and CURRENT:
        wrong.append(f"spills more than {spill} B")
    if name in STATEFUL:
        if FUSED.search(compiled.asm["ptx"]):
            wrong.append("may fuse other products where it computes a state for the second time")
        if compiled.asm["ttgir"].count('"tt.reduce"') != compiled.asm["ttir"].count('"tt.reduce"'):
            wrong.append("adds up a sum twice, in two orders")
    if name in ("extend_kernel", "linear_kernel", "grouped_kernel", "experts_kernel"):
        # Heads of 512 leave neither room nor registers for it.
        pipelined = launched.given["E"] <= 256 if name == "extend_kernel" else launched.options["num_stages"] > 2
        if pipelined and not overlaps(compiled.asm["ptx"]):
            wrong.append("multiplies nothing while it fetches")
        sass = ""
        if pipelined and arch == 90 and dtype != "fp32":
            sass = tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])
        products, waits = (len(re.findall(rf"\b{what}\b", sass)) for what in ("HGMMA", r"WARPGROUP\.DEPBAR"))
        if sass and not 0 < waits < products + (launched.given.get("PLANE") == 16):  # a plane of 16 is one HGMMA
            wrong.append(f"waits {waits} times for {products} HGMMA")
        decoded = r"local_load .*f\d+, #ttg.dot_op<{opIdx = 0"  # float32 has no matrix unit to hand registers to
        if name == "grouped_kernel" and dtype != "fp32" and re.search(decoded, compiled.asm["ttgir"]):
            wrong.append("sends decoded values through shared memory")
    if "k_scales_ptr" in launched.given and launched.given["k_scales_ptr"] is not None:
        dtype += " int8"
    line = f"sm_{arch} {dtype} {shared} B shared, {registers} registers, {stack} B stack: {launched}"
    if name != "extend_kernel":
        return "", line, wrong, ""
    what = {n: launched.given[n] for n in ("H", "K", "E", "WINDOW")}
    return f"sm_{arch} {dtype} {what}", line, wrong, summing(compiled.asm["ttgir"])


def tool(name: str, *args: str, cubin: bytes) -> str:
    """What a tool that comes with Triton says about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(nvidia).parent / "bin" / name), *args, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


COPY = re.compile(
    r"""^\s*(?:@!?%p\d+\s)?(?:
    (?P<label>\$?[\w$]+): | (?P<branch>bra(?:\.uni)?\s+(?P<target>\$?[\w$]+)) | (?P<commit>cp\.async\.commit_group)
    | cp\.async\.wait_group\s+(?P<left>\w+) | (?P<product>wgmma\.mma_async|mma\.sync|tcgen05\.mma|fma\.rn\.f32))""",
    re.MULTILINE | re.VERBOSE,
)


ROUNDS = 8
"""Of a loop, to see what one leaves for later ones."""


def overlaps(ptx: str) -> bool:
    """Whether the loop around the products copies into shared memory, and multiplies between beginning a copy and
    waiting for it."""
    events = list(COPY.finditer(ptx))
    labels = {e["label"]: i for i, e in enumerate(events) if e["label"]}
    loops = [
        events[labels[e["target"]] : i]
        for i, e in enumerate(events)
        if e["branch"] and labels.get(e["target"], len(events)) < i
    ]
    loops = [loop for loop in loops if any(e["product"] for e in loop) and any(e["commit"] for e in loop)]
    loops = [loop for loop in loops if not any(set(other) < set(loop) for other in loops)]  # the innermost
    for loop in loops:
        multiplied: list[bool] = []  # since each copy that is on its way began
        for event in loop * ROUNDS:
            if event["commit"]:
                multiplied.append(False)
            elif event["product"]:
                multiplied = [True] * len(multiplied)
            elif event["left"] is not None:
                done = max(0, len(multiplied) - int(event["left"], 0))
                if not all(multiplied[:done]):
                    return False
                multiplied = multiplied[done:]
    return bool(loops)


def summing(ttgir: str) -> str:
    """Which columns of the scores each thread and warp has: in that order weights are added."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<\{.*\}>)$", ttgir, re.MULTILINE))
    found = set()
    for name in re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor<\d+xf32", ttgir):
        layout = layouts[name]
        columns = [f"{key} {values.split(', ')[1]}" for key, values in re.findall(r"(\w+) = \[([\d, ]+)\]", layout)]
        found.add(f"{layout.split('<')[0]} {columns}" if columns else layout)
    return str(sorted(found))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append", type=int, choices=list(SHARED_MEMORY))
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--forms", action="store_true", help="all forms of quantized weights, also for few models")
    args = parser.parse_args()
    print(f"Triton {triton.__version__}")
    torch.set_num_threads(1)  # more would not survive the fork
    jobs = []
    for arch in args.arch or SHARED_MEMORY:
        for dtype in args.dtype or SERVED[arch]:
            models = tuple(args.model or SERVED[arch].get(dtype, EACH))
            found = launches(arch, DTYPES[dtype], models, args.forms)
            jobs += [(arch, dtype, models, args.forms, index) for index in range(len(found))]
    # Forked, so that launches are recorded once.
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        results = list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=8))
    sums: dict[str, set[str]] = {}
    for attention, line, wrong, added in results:
        print(": ".join([line, *wrong]))
        if attention:
            sums.setdefault(attention, set()).add(added)
    differing = [attention for attention, orders in sums.items() if len(orders) > 1]
    for attention in differing:
        print(f"{attention} adds weights up in different orders: {sums[attention]}")
    broken = sum(bool(wrong) for _, _, wrong, _ in results) + len(differing)
    print(f"{len(results)} compiled, {broken} wrong")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
