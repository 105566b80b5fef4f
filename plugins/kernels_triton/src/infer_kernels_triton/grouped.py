"""x @ w.T with a quantized weight that stays in codes: tiles of it are decoded in registers, next to the matrix unit.

A weight's values are those of ``GroupedWeight.dequantize``, bit for bit, and rows are as exact as with a plain weight:
products are added one after the other in the order of K, whatever the number of rows. A weight with so few rows that
they would leave multiprocessors idle is cut along K into segments. How many depends on its shape alone; each segment is
summed by itself, and the sums are added in order, by one program (many rows) or by a second kernel (few rows).

K is cut into blocks of four planes, ``plane`` neighbors each. Four codes with the same place in each plane share a
word, of 16 or 32 bits: so a tile of words has the layout of the tile of values that is made from it, for each plane.

The weight is the left operand and the rows of x are the columns of the right one: decoded values go from registers to
the matrix unit, and few rows make a narrow tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.weight import GroupedWeight
from infer_kernels_triton.configs import GroupedConfig, GroupedTiles
from infer_kernels_triton.matmul import GROUP, tile

PLANES = tl.constexpr(4)
WORDS = {4: torch.int16, 8: torch.int32}
"""The type of four codes, by a code's bits."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of scales and minima, as the kernels know them; two of 16 bits share a word."""
REDUCED = 256
"""Values per program of the kernel that adds segments up."""


@dataclass(frozen=True)
class PackedGrouped:
    """A quantized weight [N, K] as the kernels read it, and its bias."""

    words: Tensor
    """[blocks, N, plane]: in word [b, n, j], code i (from the lowest bits on) is that of (4 b + i) plane + j in row n.
    What is beyond K is 0."""
    scales: Tensor
    """int32 [groups, N], or [groups / 2, N] with two scales per word, the earlier one in the lower half."""
    minima: Tensor | None
    numbers: Tensor
    """fp32 [1] or [17]: 2 ** 23, and the values of a table."""
    bias_N: Tensor | None
    N: int
    K: int
    bits: int
    group: int
    plane: int
    kind: int
    """Of ``KINDS``: the type of scales and minima."""
    segment: int
    """Blocks per segment."""
    dtype: torch.dtype

    @property
    def segments(self) -> int:
        return -(-len(self.words) // self.segment)

    @property
    def constants(self) -> dict[str, int]:
        """How kernels decode the planes of a block. EVERY is how many planes share words of scales."""
        shared, block_k = self.group * (1 if self.kind == 0 else 2), PLANES.value * self.plane
        every = PLANES.value if shared % block_k == 0 else shared // self.plane if block_k % shared == 0 else 1
        return {
            "BITS": self.bits,
            "TABLE": len(self.numbers) > 1,
            "GROUP_K": self.group,
            "PLANE": self.plane,
            "EVERY": every,
            "KIND": self.kind,
        }


def plane_of(weight: GroupedWeight) -> int | None:
    """How many neighbors make a plane, all of one group; None if groups are no multiple of 16, or the weight's words
    cannot be counted in 31 bits."""
    if weight.shape.numel() >= 1 << 33:
        return None
    return next((size for size in (32, 16) if weight.group_size % size == 0), None)


def _holds(dtype: torch.dtype, x: Tensor) -> bool:
    """Whether a type represents all values exactly; of tensors without values, whether it is theirs."""
    return x.dtype == dtype if x.is_meta else torch.equal(x.to(dtype).float(), x.float())


def pack(weight: GroupedWeight, bias_N: Tensor | None, config: GroupedConfig) -> PackedGrouped:
    """The weight must have planes (``plane_of``)."""
    (N, K), bits, plane = weight.shape, weight.bits, plane_of(weight)
    assert plane is not None
    blocks = -(-K // (PLANES.value * plane))
    codes = weight.codes
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    codes = torch.nn.functional.pad(codes, (0, blocks * PLANES.value * plane - K))
    codes = codes.view(N, blocks, PLANES.value, plane).permute(1, 0, 3, 2)  # [blocks, N, plane, 4]
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    words = codes.contiguous().view(WORDS[bits])[..., 0]
    floats = weight.scales_NG if weight.minimum_NG is None else torch.cat((weight.scales_NG, weight.minimum_NG))
    dtype = torch.float32
    if PLANES.value * plane % (2 * weight.group_size) == 0:  # then planes have their own halves of words
        halves = (torch.bfloat16, torch.float16)
        dtype = next((d for d in halves if _holds(d, floats)), dtype)

    def by_groups(x_NG: Tensor) -> Tensor:
        padding = -x_NG.shape[1] % 2 if dtype.itemsize == 2 else 0
        # Blocks reach beyond K, and so may the groups that they ask for.
        padding += 2 * -(-(blocks * PLANES.value * plane - K) // (2 * weight.group_size))
        x_NG = torch.nn.functional.pad(x_NG.to(dtype), (0, padding))
        return x_NG.contiguous().view(torch.int32).t().contiguous()

    tiles = -(-N // config.tiles[0].block_n)
    segments = max(1, min(config.programs // tiles, blocks // config.least))
    return PackedGrouped(
        words=words,
        scales=by_groups(weight.scales_NG),
        minima=None if weight.minimum_NG is None else by_groups(weight.minimum_NG),
        numbers=torch.cat(
            (torch.tensor([2.0**23]), torch.empty(0) if weight.table is None else weight.table.cpu().float())
        )
        .view(torch.int32)
        .to(weight.codes.device),
        bias_N=None if bias_N is None else bias_N.to(weight.dtype, copy=True),
        N=N,
        K=K,
        bits=bits,
        group=weight.group_size,
        plane=plane,
        kind=KINDS[dtype],
        segment=-(-blocks // segments),
        dtype=weight.dtype,
    )


@triton.jit
def decode(
    words, PLACE: tl.constexpr, scale, minimum, numbers, BITS: tl.constexpr, TABLE: tl.constexpr, dtype: tl.constexpr
):
    """Plane PLACE of words [n, plane], as values of ``dtype``. Scales and minima are fp32 [n, 1]; without minima, None.
    ``numbers`` are what ``load_numbers`` gives."""
    words = words.to(tl.int32)
    if BITS * (PLACE + 1) > 23:
        words = words >> 16
    SHIFT: tl.constexpr = BITS * PLACE % 16
    MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
    if TABLE:
        code = words >> SHIFT
        value = _half(code, numbers, 1)
        value = tl.where((code & 8) != 0, _half(code, numbers, 9), value) * scale
    else:
        # The bits of a code are the last ones of a float from 2 ** 23 on: subtracting makes it code * 2 ** SHIFT.
        ZERO: tl.constexpr = 0 if minimum is not None else 1 << (BITS - 1 + SHIFT)
        value = ((words & MASK) | numbers[0]).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
        value = value * (scale * (1.0 / (1 << SHIFT)))
        if minimum is not None:
            value += minimum
    return value.to(dtype)


@triton.jit
def _half(code, numbers, BEGIN: tl.constexpr):
    """The numbers, from BEGIN on, that the lowest three bits select."""
    odd, second = (code & 1) != 0, (code & 2) != 0
    low = tl.where(second, _pick(odd, numbers, BEGIN + 2), _pick(odd, numbers, BEGIN))
    high = tl.where(second, _pick(odd, numbers, BEGIN + 6), _pick(odd, numbers, BEGIN + 4))
    return tl.where((code & 4) != 0, high, low)


@triton.jit
def _pick(odd, numbers, BEGIN: tl.constexpr):
    return tl.where(odd, numbers[BEGIN + 1].to(tl.float32, bitcast=True), numbers[BEGIN].to(tl.float32, bitcast=True))


@triton.jit
def load_numbers(numbers_ptr, TABLE: tl.constexpr):
    """``PackedGrouped.numbers``, each [1, 1]. They are loaded because the compilers would write constants into
    registers again and again, and keep decoded values from going to the matrix unit in registers."""
    ptr = numbers_ptr + tl.zeros([1, 1], tl.int32)
    if not TABLE:
        return (tl.load(ptr),)
    else:  # noqa: RET505  # Triton 3.6 refuses a return of another type after this branch
        return (
            tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 4), tl.load(ptr + 5),
            tl.load(ptr + 6), tl.load(ptr + 7), tl.load(ptr + 8), tl.load(ptr + 9), tl.load(ptr + 10),
            tl.load(ptr + 11), tl.load(ptr + 12), tl.load(ptr + 13), tl.load(ptr + 14), tl.load(ptr + 15),
            tl.load(ptr + 16),
        )  # fmt: skip


@triton.jit
def _number(words, PLACE: tl.constexpr, GROUP_K: tl.constexpr, PLANE: tl.constexpr, KIND: tl.constexpr):
    """The fp32 numbers for plane PLACE, from words of ``PackedGrouped.scales``."""
    if KIND == 0:
        return words.to(tl.float32, bitcast=True)
    SECOND: tl.constexpr = PLACE * PLANE // GROUP_K % 2 == 1
    if KIND == 1:
        return ((words & -65536) if SECOND else (words << 16)).to(tl.float32, bitcast=True)
    return ((words >> 16) if SECOND else words).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _words(ptr, group, N, KIND: tl.constexpr):
    """The words of ``PackedGrouped.scales`` that have a group's numbers; ``ptr`` points to those of the first group."""
    row = group if KIND == 0 else group // 2
    return tl.load(ptr + row * N)


@triton.jit
def _chain(
    x_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    numbers_ptr,
    real_m,
    begin,
    end,
    N,
    K,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP_K: tl.constexpr,
    PLANE: tl.constexpr,
    EVERY: tl.constexpr,
    KIND: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sum over blocks [begin, end), fp32 [BLOCK_N, BLOCK_M]. Pointers to x are [PLANE, BLOCK_M], to words [BLOCK_N,
    PLANE], to scales and minima [BLOCK_N]."""
    size_k = tl.arange(0, PLANE)[:, None]
    numbers = load_numbers(numbers_ptr, TABLE)
    # Without this, some compilers cannot tell the accumulators before the loop from those in it, and wait after every
    # product.
    tl.assume(end > begin)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(begin, end):
        words = tl.load(words_ptr + block * N * PLANE)
        for i in tl.static_range(PLANES):
            k = (block * PLANES + i) * PLANE
            group = k // GROUP_K
            if i % EVERY == 0:
                scales = _words(scales_ptr, group, N, KIND)
                if minima_ptr is not None:
                    minima = _words(minima_ptr, group, N, KIND)
            minimum = None
            if minima_ptr is not None:
                minimum = _number(minima, i, GROUP_K, PLANE, KIND)
            real = real_m if EVEN_K else real_m & (size_k < K - k)
            x = tl.load(x_ptr + k, mask=real, other=0.0)
            w = decode(words, i, _number(scales, i, GROUP_K, PLANE, KIND), minimum, numbers, BITS, TABLE, x.dtype)
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M", "blocks", "segment"])
def grouped_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    numbers_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_x,
    blocks,
    segment,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP_K: tl.constexpr,
    PLANE: tl.constexpr,
    EVERY: tl.constexpr,
    KIND: tl.constexpr,
    EVEN_K: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes a tile [BLOCK_M, BLOCK_N] of one segment's sum, and ``out`` is [segments, M, N]; or of the
    result, if segments are CHAINED."""
    row_m, column_n = tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    real_m = (row_m < M)[None, :]
    real_n = column_n < N
    size_k = tl.arange(0, PLANE)
    x_ptr += row_m.to(tl.int64)[None, :] * stride_x + size_k[:, None]
    # Columns past the end wrap around to the first ones, so that loads need no mask. Their results are not stored.
    from_n = column_n % N
    words_ptr += from_n.to(tl.int64)[:, None] * PLANE + size_k[None, :]
    scales_ptr += from_n[:, None]
    if minima_ptr is not None:
        minima_ptr += from_n[:, None]
    # fmt: off
    if CHAINED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for begin in range(0, blocks, segment):
            acc += _chain(
                x_ptr, words_ptr, scales_ptr, minima_ptr, numbers_ptr, real_m,
                begin, tl.minimum(begin + segment, blocks), N, K,
                BITS, TABLE, GROUP_K, PLANE, EVERY, KIND, EVEN_K, BLOCK_M, BLOCK_N, PRECISION,
            )
    else:
        begin = tl.program_id(1) * segment
        out_ptr += tl.program_id(1).to(tl.int64) * M * N
        acc = _chain(
            x_ptr, words_ptr, scales_ptr, minima_ptr, numbers_ptr, real_m, begin, tl.minimum(begin + segment, blocks),
            N, K, BITS, TABLE, GROUP_K, PLANE, EVERY, KIND, EVEN_K, BLOCK_M, BLOCK_N, PRECISION,
        )
    # fmt: on
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column_n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + row_m.to(tl.int64)[None, :] * N + column_n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=real_m & real_n[:, None],
    )


@triton.jit(do_not_specialize=["size", "segments"])
def add_kernel(apart_ptr, bias_ptr, out_ptr, size, N, segments, BLOCK: tl.constexpr):
    """One program adds up BLOCK sums, of ``size`` in every segment, and the bias."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    acc = tl.zeros([BLOCK], tl.float32)
    for _ in range(segments):
        acc += tl.load(apart_ptr + place, mask=real, other=0.0)
        apart_ptr += size
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + place % N, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    ids_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    numbers_ptr,
    out_ptr,
    T,
    N,
    K,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP_K: tl.constexpr,
    PLANE: tl.constexpr,
    EVERY: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program writes one block of BLOCK_T rows of the weight; NaN for an id that no row has."""
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_t = row_t < T
    block = tl.program_id(1)
    size_k = tl.arange(0, PLANE)
    id = tl.load(ids_ptr + row_t, mask=real_t, other=0)
    known = (id >= 0) & (id < N)
    n = tl.where(known, id, 0)
    words = tl.load(words_ptr + (block * N + n[:, None]) * PLANE + size_k[None, :])
    numbers = load_numbers(numbers_ptr, TABLE)
    for i in tl.static_range(PLANES):
        k = (block * PLANES + i) * PLANE
        group = k // GROUP_K
        minimum = None
        if minima_ptr is not None:
            minimum = _number(_words(minima_ptr + n[:, None], group, N, KIND), i, GROUP_K, PLANE, KIND)
        scale = _number(_words(scales_ptr + n[:, None], group, N, KIND), i, GROUP_K, PLANE, KIND)
        values = decode(words, i, scale, minimum, numbers, BITS, TABLE, out_ptr.dtype.element_ty)
        values = tl.where(known[:, None], values, float("nan"))
        to = row_t.to(tl.int64)[:, None] * K + k + size_k[None, :]
        tl.store(out_ptr + to, values, mask=real_t[:, None] & (k + size_k < K)[None, :])


def linear(x_TK: Tensor, packed: PackedGrouped, config: GroupedConfig) -> Tensor:
    """x @ w.T + bias, [T, N]. The rows of x may have any stride."""
    x = x_TK.flatten(0, -2)
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, N = len(x), packed.N
    c = next(c for c in config.tiles if c.rows >= M)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if M:
        apart = _apart(packed, c, config)
        tiles = triton.cdiv(M, c.block_m) * triton.cdiv(N, c.block_n)
        grid = (tiles, packed.segments if apart else 1)
        sums = torch.empty((packed.segments, M, N), dtype=torch.float32, device=x.device) if apart else out
        _launch(grouped_kernel[grid], c, x, packed, sums, M, x.stride(0), apart)
        if apart:
            _add(add_kernel[(triton.cdiv(M * N, REDUCED),)], sums, packed, out, M * N)
    return out.view(*x_TK.shape[:-1], N)


def rows(token_ids_T: Tensor, packed: PackedGrouped) -> Tensor:
    """``KernelsProtocol.embedding``."""
    ids = token_ids_T.flatten()
    out = torch.empty((len(ids), packed.K), dtype=packed.dtype, device=ids.device)
    if len(ids):
        grid = (triton.cdiv(len(ids), 16), len(packed.words))
        weight = (packed.words, packed.scales, packed.minima, packed.numbers)
        rows_kernel[grid](
            ids, *weight, out, len(ids), packed.N, packed.K, **packed.constants, BLOCK_T=16, enable_fp_fusion=False
        )
    return out.view(*token_ids_T.shape, packed.K)


def warm_up(packed: PackedGrouped, config: GroupedConfig) -> None:
    """Compile every kernel that ``linear`` may launch for this weight."""
    dtype = packed.dtype
    for c in config.tiles:
        apart = _apart(packed, c, config)
        run = functools.partial(grouped_kernel.warmup, grid=(1,))
        _launch(run, c, dtype, packed, torch.float32 if apart else dtype, c.block_m, packed.K, apart)
        if apart:
            _add(functools.partial(add_kernel.warmup, grid=(1,)), torch.float32, packed, dtype, packed.N)


def _apart(packed: PackedGrouped, c: GroupedTiles, config: GroupedConfig) -> bool:
    """Whether segments are summed by programs of their own with these tiles."""
    return packed.segments > 1 and c.rows <= config.apart


def _launch(
    run: Callable[..., object],
    c: GroupedTiles,
    x: Tensor | torch.dtype,
    packed: PackedGrouped,
    out: Tensor | torch.dtype,
    rows: int,
    stride_x: int,
    apart: bool,
) -> None:
    run(
        x,
        packed.words,
        packed.scales,
        packed.minima,
        packed.numbers,
        None if apart else packed.bias_N,
        out,
        rows,
        packed.N,
        packed.K,
        stride_x,
        len(packed.words),
        packed.segment,
        **packed.constants,
        EVEN_K=packed.K % (PLANES.value * packed.plane) == 0,
        CHAINED=packed.segments > 1 and not apart,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        GROUP=GROUP,
        PRECISION="ieee" if packed.dtype == torch.float32 else "tf32",
        num_warps=c.warps,
        num_stages=c.stages,
        enable_fp_fusion=False,  # the scale's product is rounded before the minimum is added
    )


def _add(
    run: Callable[..., object], sums: Tensor | torch.dtype, packed: PackedGrouped, out: Tensor | torch.dtype, size: int
) -> None:
    run(sums, packed.bias_N, out, size, packed.N, packed.segments, BLOCK=REDUCED, enable_fp_fusion=False)
