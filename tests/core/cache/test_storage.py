"""Storages: what int8 saves, and one of another kind, made from core's parts."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support import CPU, KERNELS, MAX_SEQ_LEN, tiny_model
from torch import Tensor

from infer.cache import ExtendView, KVStorage, Pool
from infer.cache.arrays import Ints
from infer.contracts.attention import KV, AttentionSpec, KVDtype, Rotary
from infer.contracts.cache import CacheContext
from infer.contracts.model import Pass
from infer.device import HUGE_PAGE
from infer_cache_paged import PagedBlockManager
from infer_cache_paged.pages import Pages
from infer_cache_slotted import SlottedBlockManager


class HalvesView(ExtendView):
    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
    ) -> Tensor:
        s = self.storage
        assert isinstance(s, Halves)
        assert k_TKE is not None
        assert v_TKE is not None
        if rotary is not None:
            q_THE, k_TKE = s.kernels.rope(q_THE, k_TKE, rotary)
        s.kernels.store_kv(k_TKE.half(), v_TKE.half(), s.k[layer], s.v[layer], self.ragged.flat_T)
        k, v = s.k[layer], s.v[layer]
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        return s.kernels.extend_attention(q_THE, k.float(), v.float(), self.ragged, s.layers[layer])


class Halves(KVStorage):
    """K and V in float16, whatever the model computes in."""

    view_type = HalvesView

    def __init__(self, context: CacheContext, num_blocks: int, block_size: int) -> None:
        super().__init__(replace(context, dtype=torch.float16), num_blocks, block_size)


def pool(kind: str, storage: type[KVStorage]) -> Pool[Ints, ExtendView]:
    model = tiny_model("llama")
    context = CacheContext(model.attention, 2, MAX_SEQ_LEN, torch.float32, CPU, KERNELS)
    if kind == "slotted":
        return Pool(SlottedBlockManager(2, MAX_SEQ_LEN), storage(context, 2, MAX_SEQ_LEN))
    return Pool(PagedBlockManager(2, MAX_SEQ_LEN, Pages(20, 8)), storage(context, 20, 8))


@torch.inference_mode()
def answer(found: Pool[Ints, ExtendView], chunks: Sequence[int]) -> Tensor:
    """Hidden states of 30 tokens, computed chunk by chunk beside another sequence."""
    model, tokens = tiny_model("llama"), torch.arange(30) * 7 % 50
    slots = []
    for _ in range(2):
        place = found.allocate(tokens.tolist(), reuse=False)
        assert place is not None
        slots.append(place.slot)
    rows, at = [], 0
    for length in chunks:
        both = torch.cat([tokens[at : at + length]] * 2)
        positions = torch.arange(at, at + length).repeat(2)
        view = found.batched_chunked_prefill_view(slots, [at, at], [length, length])
        rows.append(model.forward(Pass(both, positions, view))[:length])
        at += length
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["slotted", "paged"])
def test_a_pool_brings_a_storage_of_its_own(kind: str) -> None:
    """It weighs less, answers nearly the same, and keeps every promise: chunks and tables change no bit."""
    plain, small = pool(kind, KVStorage), pool(kind, Halves)
    assert small.nbytes == plain.nbytes / 2
    whole = answer(small, [30])
    exact = answer(plain, [30])
    assert not torch.equal(whole, exact)
    assert torch.nn.functional.cosine_similarity(whole, exact).min() > 0.999
    assert torch.equal(answer(pool("paged", Halves), [7, 1, 13, 9]), whole)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "each"),
    [("auto", torch.float32, 4 * 64), ("auto", torch.bfloat16, 2 * 64), ("int8", torch.bfloat16, 64 + 4)],
)
def test_bytes_of_a_position(kv_dtype: KVDtype, dtype: torch.dtype, each: int) -> None:
    """Of the head of a token's K, and so of everything: a fp32 scale per head is all that codes need besides."""
    layers = [AttentionSpec(8, 2, 64, 1.0), AttentionSpec(8, 4, 64, 1.0, window=5)]
    context = CacheContext(layers, 2, 100, dtype, CPU, KERNELS, kv_dtype=kv_dtype)
    assert KVStorage.bytes_per_token(context) == 2 * (2 + 4) * each
    assert KVStorage(context, 7, 16).nbytes == 7 * 16 * KVStorage.bytes_per_token(context)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_v_that_is_k_takes_no_memory(kv_dtype: KVDtype) -> None:
    """It is K as the cache has it: rotated. Where one layer has a V of its own, all have."""
    own, shared = (AttentionSpec(4, 1, 16, 0.3, v_is_k=v_is_k) for v_is_k in (False, True))
    generator = torch.Generator().manual_seed(3)
    q, k, angles = (torch.randn(9, *shape, generator=generator) for shape in ((4, 16), (1, 16), (8,)))
    rotary = Rotary(angles.cos(), angles.sin())
    turned = KERNELS.rope(q, k, rotary)[1]
    found = {}
    for name, layers, v in (("own", [own, own], turned), ("one", [shared, own], turned), ("all", [shared] * 2, k)):
        storage = KVStorage(CacheContext(layers, 2, 64, torch.float32, CPU, KERNELS, kv_dtype=kv_dtype), 3, 8)
        view = storage.view(np.array([[2, 0]], dtype=np.int32), [0], [9])
        found[name] = storage.nbytes, view.attend(0, q, k, v, rotary)
    assert found["own"][0] == found["one"][0] == 2 * found["all"][0]
    assert torch.equal(found["own"][1], found["all"][1])
    assert torch.equal(found["one"][1], found["all"][1])


def test_a_view_that_stores_in_its_own_way_has_a_v() -> None:
    context = CacheContext([AttentionSpec(4, 1, 16, 0.3, v_is_k=True)], 2, 64, torch.float16, CPU, KERNELS)
    assert KVStorage.bytes_per_token(context) == 32
    assert Halves.bytes_per_token(context) == 64
    assert Halves(context, 3, 8).nbytes == 3 * 8 * 64


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_tensors_that_fill_up_alike_begin_at_different_parts_of_a_page(
    kv_dtype: KVDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that needs a new page of each would wait until the system has cleared them all."""
    made: list[mmap.mmap] = []

    def pages(nbytes: int) -> mmap.mmap:
        made.append(mmap.mmap(-1, nbytes))
        return made[-1]

    monkeypatch.setattr("infer.device.pages", pages)
    monkeypatch.setattr("infer.device.LARGE", 1000)
    context = CacheContext([AttentionSpec(4, 2, 8, 1.0)] * 3, 2, 256, torch.float32, CPU, KERNELS, kv_dtype=kv_dtype)
    storage = KVStorage(context, 32, 16)
    tensors = [x for kv in zip(storage.k, storage.v, strict=True) for each in kv for x in parts(each)]
    begins = [torch.frombuffer(each, dtype=torch.uint8).data_ptr() for each in made]
    skipped = [x.data_ptr() - begin for x, begin in zip(tensors, begins, strict=True)]
    assert [len(each) - n for each, n in zip(made, skipped, strict=True)] == [x.nbytes for x in tensors]
    of_values = skipped[:: len(tensors) // 6]
    assert of_values == [i * HUGE_PAGE // 6 // mmap.PAGESIZE * mmap.PAGESIZE for i in range(6)]
    assert not any(x.any() for x in tensors)
    made.clear()
    monkeypatch.setattr("infer.device.LARGE", 1 << 30)
    KVStorage(context, 32, 16)
    assert [len(each) for each in made] == [x.nbytes for x in tensors], "of small ones, that would be a large part"


def parts(kv: KV) -> list[Tensor]:
    return [kv] if isinstance(kv, Tensor) else [kv.codes, kv.scales]


def test_the_first_pages_of_all_layers_are_cleared_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(
        "infer.cache.storage.clear_first_pages", lambda tensors: cleared.extend(each.data_ptr() for each in tensors)
    )
    context = CacheContext(tiny_model("llama").attention, 2, MAX_SEQ_LEN, torch.float32, CPU, KERNELS)
    storage = KVStorage(context, 3, 8)
    caches = [each for each in (*storage.k, *storage.v) if isinstance(each, Tensor)]
    assert sorted(cleared) == sorted(each.data_ptr() for each in caches)
