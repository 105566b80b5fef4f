"""Attention."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from infer.contracts.attention import KVDtype
from infer.device import same_bits
from infer_testing.attention import Scene, attention_spec
from infer_testing.kernels.provider import Provider, check
from infer_testing.suite import Skipped, Violation

HEADS = ((4, 2, 16), (1, 1, 16), (6, 2, 18), (7, 1, 64), (4, 4, 80), (8, 2, 128), (2, 2, 64), (3, 1, 192), (5, 1, 128))
"""Query heads, K/V heads and their size."""
EXTENDS = (
    *((0, 1), (0, 5), (130, 1), (7, 3), (127, 2), (60, 70), (0, 140), (300, 1), (255, 130), (129, 2), (20, 1)),
    *((0, 16), (16, 16), (15, 2), (31, 1), (128, 1)),
)
"""Starts and lengths of sequences' chunks, around the edges of blocks, of windows and of segments of keys."""
WINDOWS = (None, 1, 9, 16, 127, 128, 129)
SINKS = (0.5, -1e4, 3.0, 1e4)
"""Logits of attention sinks, each among, below or above the scores."""


def scene(p: Provider, draw: random.Random, kv_dtype: KVDtype = "auto") -> Scene:
    heads, window = draw.choice(HEADS), draw.choice(WINDOWS)
    spec = attention_spec(*heads, window, draw.choice([None, None, 0.7]), draw.choice([(), (), SINKS]))
    if spec.sinks_H is not None:
        spec = replace(spec, sinks_H=spec.sinks_H.to(p.device))
    extends = draw.choices(EXTENDS, k=draw.randint(1, 5))
    size, seed = draw.choice([1, 16, 128, 500]), draw.randrange(1 << 20)
    return Scene(spec, extends, size, p.dtype(draw), seed, p.kernels, str(p.device), kv_dtype)


@check("Each query attends to its sequence's positions up to its own, within the window, with scale, cap and sinks", 60)
def extend_attention(p: Provider, draw: random.Random) -> None:
    scene(p, draw).check()


@check("Attention over int8 K and V is that over the values that the codes stand for", 16)
def extend_attention_int8(p: Provider, draw: random.Random) -> None:
    if "int8" not in p.kv_dtypes:
        raise Skipped("the registration's kv_dtypes do not name int8")
    scene(p, draw, "int8").check()


@check("A NaN in K or V reaches the queries that attend to it, and no other sequence", 4)
def attention_to_nan(p: Provider, draw: random.Random) -> None:
    for kv_dtype in ("auto", "int8") if "int8" in p.kv_dtypes else ("auto",):
        made = Scene(
            attention_spec(),
            [(40, 1), (0, 9), (300, 1)],
            16,
            p.dtype(draw),
            0,
            p.kernels,
            str(p.device),
            kv_dtype,
        )
        which = draw.choice("kv")
        getattr(made, which)[2][draw.randrange(300), 0, 5] = torch.nan
        found = made.attend()
        if not found[-1, :2].isnan().any(-1).all():
            raise Violation(f"a NaN in {which.upper()} of sequence 2 ({kv_dtype}) does not reach its query")
        if not (found[:-1].isfinite().all() and found[-1, 2:].isfinite().all()):
            raise Violation(f"a NaN in {which.upper()} of sequence 2 ({kv_dtype}) reaches others, or other heads")


@check("A query's bits depend neither on how its sequence is cut into chunks nor on other sequences or blocks", 24)
def attention_is_exact(p: Provider, draw: random.Random) -> None:
    spec = attention_spec(*draw.choice(HEADS), draw.choice(WINDOWS), draw.choice([None, 3.0]))
    dtype, length = p.dtype(draw), draw.choice([1, 17, 128, 129, 200, 300])
    kv_dtype: Any = draw.choice(["auto", "int8"]) if "int8" in p.kv_dtypes else "auto"
    whole = Scene(spec, [(0, length)], length, dtype, 0, p.kernels, str(p.device), kv_dtype)
    expected = whole.attend()
    begin = draw.randrange(length)
    end = draw.choice([begin + 1, draw.randint(begin + 1, length), length])
    others = draw.choices(EXTENDS, k=draw.randint(0, 20 if end == begin + 1 else 4))
    place, block_size = draw.randint(0, len(others)), draw.choice([1, 16, 512])
    extends = [*others[:place], (begin, end - begin), *others[place:]]
    part = Scene(spec, extends, block_size, dtype, 1, p.kernels, str(p.device), kv_dtype)
    part.q[place], part.k[place], part.v[place] = whole.q[0][begin:end], whole.k[0][:end], whole.v[0][:end]
    row = sum(n for _, n in others[:place])
    found = part.attend()[row : row + end - begin]
    if not same_bits(found, expected[begin:end]):
        first = begin + int((found != expected[begin:end]).flatten(1).any(1).nonzero()[0])
        raise Violation(
            f"the query at position {first} has other bits in a chunk [{begin}, {end}) beside {len(others)} other "
            f"sequences, over blocks of {block_size}, than in one chunk of {length} alone"
        )
