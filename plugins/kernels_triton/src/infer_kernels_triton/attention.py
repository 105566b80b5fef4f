"""Attention of ragged chunks over block-structured K/V. A query's result is the same, bit for bit, however it is
scheduled.

Online softmax (Milakov and Gimelshein, 2018) goes over tiles of keys within segments of a fixed size counted from
position 0; then the segments' results are merged in ascending order. If there are enough queries to fill the device,
one program goes through all segments of a query; otherwise several programs divide them, and a second kernel merges
(flash-decoding, Dao et al., 2023). The arithmetic of a query is the same, and a tile or segment that it does not attend
to changes none of its bits.

The queries of all heads that share a K/V head are one tile (PackGQA of FlashAttention-3), so that K/V are read once.

Shapes: T tokens, B sequences, H query heads, K key/value heads, G = H / K, E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.contracts.attention import KV, AttentionSpec, Ragged
from infer_kernels_triton.configs import AttentionConfig
from infer_kernels_triton.elementwise import parts

Launch = Callable[..., object]
Parts = Tensor | torch.dtype | None
"""A tensor for the segments' results; their dtype if the kernel is only compiled; None if one program has all
segments."""

LARGEST_TILE = 512
"""The most values of a head that are multiplied at once: rounded up to the next power of 2, those of latent attention
would take twice as many registers."""
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)
"""The start of running maxima; finite, so that the difference of two is 0, not NaN."""


@triton.jit
def _locate(tile, offsets_ptr, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that a query tile belongs to, and the tile's first row in it.

    Sequence b's tiles begin at b + (rows before it) // BLOCK_Q, which leaves room for every sequence's partial tile.
    """
    origin = tl.load(offsets_ptr)
    low = 0
    high = num_sequences
    while low + 1 < high:
        middle = (low + high) // 2
        if (tl.load(offsets_ptr + middle) - origin) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low, (tile - low - (tl.load(offsets_ptr + low) - origin) // BLOCK_Q) * BLOCK_Q


@triton.jit
def _merge(top, total, acc, top_s, total_s, acc_s):
    """Merge a segment's (maximum, sum of weights, weighted values) into the running ones. Fused multiply-adds are
    explicit, so that every kernel computes the same bits."""
    new = tl.maximum(top, top_s)
    decay = tl.exp2(top - new)
    decay_s = tl.exp2(top_s - new)
    total = tl.fma(total, decay, total_s * decay_s)
    acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), acc_s * decay_s[:, None])
    return new, total, acc


@triton.jit
def _sink(top, total, acc, logit):
    """Merge a logit without a value, as if it were a segment of one key whose value is zero."""
    return _merge(
        top, total, acc, logit * LOG2E, tl.full(total.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32)
    )


@triton.jit
def _span(start, first_row, last_row, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first and the last tile of keys that any of the rows first_row..last_row of a chunk at ``start`` attends
    to."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(start + first_row - WINDOW + 1, 0) // BLOCK_N
    return first, (start + last_row) // BLOCK_N


@triton.jit
def _keys(i, own_segment, stride, TILES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The positions of a program's i-th tile of keys."""
    return ((own_segment + i // TILES * stride) * TILES + i % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)


# Do not specialize on values that differ from pass to pass, or on pointers whose alignment depends on a slice's start.
@triton.jit(
    do_not_specialize=["num_sequences", "max_segments", "stride_qt", "stride_table"],
    do_not_specialize_on_alignment=["starts_ptr", "offsets_ptr", "table_ptr"],
)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    starts_ptr,
    offsets_ptr,
    table_ptr,
    num_sequences,
    max_segments,
    stride_qt,
    stride_qh,
    stride_table,
    scale,
    soft_cap,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    E_MORE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes a tile of queries, of all heads that share one K/V head; with SPLIT, every
    num_programs(2)-th segment of it. If there are scales, K and V are codes. With E_MORE, a head is cut in two: E_PAD
    values, and the others.

    Scores are exponents of 2: ``scale`` and ``soft_cap`` contain the factor log2(e). tanh(x) is 2 sigmoid(2 x) - 1.
    """
    G: tl.constexpr = H // K
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    TILES: tl.constexpr = SEGMENT // BLOCK_N
    kv_head = tl.program_id(0)
    # The last tiles go first, since they see the most keys.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first_row = _locate(tile, offsets_ptr, num_sequences, BLOCK_Q)
    offset = tl.load(offsets_ptr + sequence)
    length = tl.load(offsets_ptr + sequence + 1) - offset
    if first_row >= length:
        return
    start = tl.load(starts_ptr + sequence)
    last_row = tl.minimum(first_row + BLOCK_Q, length) - 1
    first_tile, last_tile = _span(start, first_row, last_row, WINDOW, BLOCK_N)
    first_segment = first_tile // TILES
    last_segment = last_tile // TILES
    own_segment = first_segment + tl.program_id(2)
    if own_segment > last_segment:
        return
    # One loop goes through this program's tiles: whole segments, without the tiles at either end that no query sees.
    stride = tl.num_programs(2)
    num_own = (last_segment - own_segment) // stride
    begin = 0
    if tl.program_id(2) == 0:
        begin = first_tile - first_segment * TILES
    end = (num_own + 1) * TILES
    if own_segment + num_own * stride == last_segment:
        end = num_own * TILES + last_tile - last_segment * TILES + 1

    rows_m = tl.arange(0, BLOCK_M)
    query_m = first_row + rows_m // G
    head_m = kv_head * G + rows_m % G
    real_m = (rows_m < BLOCK_Q * G) & (query_m < length)
    position_m = start + query_m
    size_e = tl.arange(0, E_PAD)
    real_e = size_e < E
    last_key = start + last_row

    q_row_m = q_ptr + (offset + query_m).to(tl.int64) * stride_qt + head_m * stride_qh
    q = tl.load(q_row_m[:, None] + size_e[None, :], mask=real_m[:, None] & real_e[None, :], other=0.0)
    if E_MORE > 0:
        more_f = E_PAD + tl.arange(0, E_MORE)
        real_f = more_f < E
        q_more = tl.load(q_row_m[:, None] + more_f[None, :], mask=real_m[:, None] & real_f[None, :], other=0.0)
        more = tl.zeros([BLOCK_M, E_MORE], tl.float32)
        more_s = more
    table_ptr += sequence.to(tl.int64) * stride_table
    k_ptr += kv_head * E
    v_ptr += kv_head * E

    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
    top_s = top
    total_s = total
    acc_s = acc
    key_n = _keys(begin, own_segment, stride, TILES, BLOCK_N)
    block_n = tl.load(table_ptr + key_n // BLOCK_SIZE, mask=key_n <= last_key, other=0)
    for i in range(begin, end):
        key_n = _keys(i, own_segment, stride, TILES, BLOCK_N)
        token_n = (block_n.to(tl.int64) * BLOCK_SIZE + key_n % BLOCK_SIZE) * K
        place_n = token_n * E
        # Do not read past the tile's last query: what lies there may belong to another sequence, and 0 x NaN is NaN.
        real = (key_n <= last_key)[:, None] & real_e[None, :]
        k = tl.load(k_ptr + place_n[:, None] + size_e[None, :], mask=real, other=0.0)
        v = tl.load(v_ptr + place_n[:, None] + size_e[None, :], mask=real, other=0.0)
        if k_scales_ptr is not None:
            k = k.to(tl.float32).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if E_MORE > 0:
            real_more = (key_n <= last_key)[:, None] & real_f[None, :]
            k_more = tl.load(k_ptr + place_n[:, None] + more_f[None, :], mask=real_more, other=0.0)
            v_more = tl.load(v_ptr + place_n[:, None] + more_f[None, :], mask=real_more, other=0.0)
            if k_scales_ptr is not None:
                k_more = k_more.to(tl.float32).to(q.dtype)
            scores = tl.dot(q_more, tl.trans(k_more), scores, input_precision=PRECISION)
        scores = scores * scale
        if k_scales_ptr is not None:
            k_scale_n = tl.load(k_scales_ptr + token_n + kv_head, mask=key_n <= last_key, other=0.0)
            scores *= k_scale_n[None, :]
        if SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(scores) - 1.0)
        seen = key_n[None, :] <= position_m[:, None]
        if WINDOW > 0:
            seen = seen & (key_n[None, :] > position_m[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top_s, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        decay = tl.exp2(top_s - new)
        total_s = tl.fma(total_s, decay, tl.sum(weights, 1))
        if v_scales_ptr is not None:
            v_scale_n = tl.load(v_scales_ptr + token_n + kv_head, mask=key_n <= last_key, other=0.0)
            if q.dtype == tl.float16:  # weights times scales could be too small for it
                v = (v.to(tl.float32) * v_scale_n[:, None]).to(q.dtype)
                if E_MORE > 0:
                    v_more = (v_more.to(tl.float32) * v_scale_n[:, None]).to(q.dtype)
            else:
                v = v.to(tl.float32).to(q.dtype)
                if E_MORE > 0:
                    v_more = v_more.to(tl.float32).to(q.dtype)
                weights *= v_scale_n[None, :]
        acc_s = tl.dot(weights.to(v.dtype), v, acc_s * decay[:, None], input_precision=PRECISION)
        if E_MORE > 0:
            more_s = tl.dot(weights.to(v.dtype), v_more, more_s * decay[:, None], input_precision=PRECISION)
        top_s = new
        done = (i % TILES == TILES - 1) | (i == end - 1)
        if done:
            if SPLIT:
                part_m = (sequence.to(tl.int64) * H + head_m) * max_segments + own_segment + i // TILES * stride
                acc_m = acc_ptr + part_m[:, None] * E
                tl.store(acc_m + size_e[None, :], acc_s, mask=real_m[:, None] & real_e[None, :])
                if E_MORE > 0:
                    tl.store(acc_m + more_f[None, :], more_s, mask=real_m[:, None] & real_f[None, :])
                tl.store(sums_ptr + part_m * 2, top_s, mask=real_m)
                tl.store(sums_ptr + part_m * 2 + 1, total_s, mask=real_m)
            else:
                if E_MORE > 0:
                    more = _merge(top, total, more, top_s, total_s, more_s)[2]
                top, total, acc = _merge(top, total, acc, top_s, total_s, acc_s)
        # Not assigned within the branch: Hopper's matrix unit writes its accumulators on its own time, and a branch
        # that does too makes the compiler wait after each of its instructions.
        top_s = tl.where(done, LOWEST, top_s)
        total_s = tl.where(done, 0.0, total_s)
        acc_s = tl.where(done, 0.0, acc_s)
        if E_MORE > 0:
            more_s = tl.where(done, 0.0, more_s)
        # Look up the next tile's blocks one iteration ahead, so that its keys can be loaded while this tile is
        # multiplied.
        next_n = _keys(i + 1, own_segment, stride, TILES, BLOCK_N)
        block_n = tl.load(table_ptr + next_n // BLOCK_SIZE, mask=next_n <= last_key, other=0)
    if not SPLIT:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head_m, mask=real_m, other=0.0)
            if E_MORE > 0:
                more = _sink(top, total, more, sink)[2]
            top, total, acc = _sink(top, total, acc, sink)
        out_m = out_ptr + ((offset + query_m).to(tl.int64) * (H * E) + head_m * E)[:, None]
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_m + size_e[None, :], out, mask=real_m[:, None] & real_e[None, :])
        if E_MORE > 0:
            out = (more / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_m + more_f[None, :], out, mask=real_m[:, None] & real_f[None, :])


@triton.jit(do_not_specialize=["max_segments"])
def merge_kernel(
    acc_ptr,
    sums_ptr,
    sinks_ptr,
    out_ptr,
    starts_ptr,
    max_segments,
    H: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """One program merges the segments of one head of one decoding sequence, in their order."""
    TILES: tl.constexpr = SEGMENT // BLOCK_N
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first_tile, last_tile = _span(tl.load(starts_ptr + sequence), 0, 0, WINDOW, BLOCK_N)
    one = tl.arange(0, 1)
    size_e = tl.arange(0, E_PAD)
    real_e = (one[:, None] == 0) & (size_e < E)[None, :]
    part = (sequence.to(tl.int64) * H + head) * max_segments + one
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, E_PAD], tl.float32)
    for segment in tl.range(first_tile // TILES, last_tile // TILES + 1, num_stages=4):
        top_s = tl.load(sums_ptr + (part + segment) * 2)
        total_s = tl.load(sums_ptr + (part + segment) * 2 + 1)
        acc_s = tl.load(acc_ptr + (part + segment)[:, None] * E + size_e[None, :], mask=real_e, other=0.0)
        top, total, acc = _merge(top, total, acc, top_s, total_s, acc_s)
    if sinks_ptr is not None:
        top, total, acc = _sink(top, total, acc, tl.load(sinks_ptr + head + one))
    place = (sequence.to(tl.int64) * H + head) * E + one
    out = acc / total[:, None]
    tl.store(out_ptr + place[:, None] + size_e[None, :], out.to(out_ptr.dtype.element_ty), mask=real_e)


def extend_attention(
    q_THE: Tensor,
    k_cache: KV,
    v_cache: KV,
    ragged: Ragged,
    spec: AttentionSpec,
    config: AttentionConfig,
    programs: int,
    first: bool,
) -> Tensor:
    """``KernelsProtocol.extend_attention``. Grids follow from shapes alone, and nothing waits for the device.

    The segments of decoding sequences are divided among about ``programs`` programs. The ``first`` call compiles the
    kernels that any batch may need.
    """
    T, H, E = q_THE.shape
    K, block_size, B = spec.num_kv_heads, k_cache.shape[1], len(ragged.lens)
    (k_memory, k_scales), (v_memory, v_scales) = parts(k_cache), parts(v_cache)
    G, E_PAD = H // K, triton.next_power_of_2(E)
    whole = min(E_PAD, LARGEST_TILE)
    block_m = max(config.block_m, triton.next_power_of_2(G))
    out_THE = torch.empty((T, H, E), dtype=q_THE.dtype, device=q_THE.device)
    segments = -(-ragged.block_table_BP.shape[1] * block_size // config.segment)
    decodes = next((b for b, length in enumerate(ragged.lens) if length > 1), B)
    splits = max(1, min(segments, programs // (decodes * K))) if decodes else 1
    if splits == 1:
        decodes = 0
    common = {"WINDOW": spec.window or 0, "BLOCK_N": config.block_n, "SEGMENT": config.segment}

    def extend(run: Launch, begin: int, end: int, acc: Parts, sums: Parts) -> None:
        """Launch the kernel for sequences begin..end. All sequences before ``begin`` are decodes, so that their row
        indices equal their sequence indices."""
        run(
            q_THE,
            k_memory,
            v_memory,
            k_scales,
            v_scales,
            spec.sinks_H,
            out_THE,
            acc,
            sums,
            ragged.starts_B[begin:],
            ragged.offsets_B1[begin:],
            ragged.block_table_BP[begin:],
            end - begin,
            segments,
            q_THE.stride(0),
            q_THE.stride(1),
            ragged.block_table_BP.stride(0),
            spec.scale * LOG2E.value if spec.soft_cap is None else 2 * spec.scale / spec.soft_cap,
            (spec.soft_cap or 0.0) * LOG2E.value,
            H=H,
            K=K,
            E=E,
            E_PAD=whole,
            E_MORE=max(16, triton.next_power_of_2(E - whole)) if whole < E else 0,
            SOFT_CAP=spec.soft_cap is not None,
            BLOCK_SIZE=block_size,
            BLOCK_M=block_m,
            SPLIT=acc is not None,
            PRECISION="ieee" if q_THE.dtype == torch.float32 else "tf32",
            num_warps=config.warps,
            num_stages=config.stages,
            enable_fp_fusion=True,
            **common,
        )

    def merge(run: Launch, acc: Parts, sums: Parts) -> None:
        run(
            acc,
            sums,
            spec.sinks_H,
            out_THE,
            ragged.starts_B,
            segments,
            H=H,
            E=E,
            E_PAD=E_PAD,
            num_warps=1,
            enable_fp_fusion=True,
            **common,
        )

    def grid(begin: int, end: int, splits: int) -> tuple[int, int, int]:
        return K, (ragged.offsets[end] - begin) // (block_m // G) + end - begin, splits

    if first:
        compile_extend = functools.partial(extend_kernel.warmup, grid=(1,))
        extend(compile_extend, 0, B, torch.float32, torch.float32)
        extend(compile_extend, 0, B, None, None)
        merge(functools.partial(merge_kernel.warmup, grid=(1,)), torch.float32, torch.float32)
    if decodes:
        acc = torch.empty((decodes, H, segments, E), dtype=torch.float32, device=q_THE.device)
        sums = torch.empty((decodes, H, segments, 2), dtype=torch.float32, device=q_THE.device)
        extend(extend_kernel[grid(0, decodes, splits)], 0, decodes, acc, sums)
        merge(merge_kernel[(decodes, H)], acc, sums)
    if decodes < B:
        extend(extend_kernel[grid(decodes, B, 1)], decodes, B, None, None)
    return out_THE
