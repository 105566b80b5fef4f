"""A storage of another kind, made from core's parts: K/V as 8-bit integers with a scale per token and head."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support import CPU, KERNELS, MAX_SEQ_LEN, tiny_model
from torch import Tensor

from infer.cache import ExtendView, KVStorage, Pool
from infer.cache.books import Ints
from infer.protocols import CacheContext, Pass, Rotary
from infer_cache_paged import PagedBooks
from infer_cache_paged.pages import Pages
from infer_cache_slotted import SlottedBooks


class EightBitView(ExtendView):
    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: Rotary | None = None) -> Tensor:
        s = self.storage
        assert isinstance(s, EightBit)
        if rotary is not None:
            q_THE, k_TKE = s.kernels.rope(q_THE, k_TKE, rotary)
        k = _quantised(k_TKE, s.k[layer], s.k_scale[layer], self.ragged.flat_T)
        v = _quantised(v_TKE, s.v[layer], s.v_scale[layer], self.ragged.flat_T)
        return s.kernels.extend_attention(q_THE, k, v, self.ragged, s.layers[layer])


class EightBit(KVStorage):
    """K and V as codes, with a factor for each token's head."""

    view_type = EightBitView

    def __init__(self, context: CacheContext, num_blocks: int, block_size: int) -> None:
        super().__init__(context, num_blocks, block_size)
        self.k_scale, self.v_scale = ([torch.zeros(x.shape[:3]) for x in side] for side in (self.k, self.v))
        self.k, self.v = ([torch.zeros(x.shape, dtype=torch.int8) for x in side] for side in (self.k, self.v))

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(scale.nbytes for scale in (*self.k_scale, *self.v_scale))


def _quantised(new_TKE: Tensor, codes: Tensor, scale: Tensor, flat_T: Tensor) -> Tensor:
    """All that is stored, the new tokens with it."""
    each_TK = new_TKE.abs().amax(-1) / 127 + 1e-9
    codes.flatten(0, 1)[flat_T] = (new_TKE / each_TK[..., None]).round().to(torch.int8)
    scale.flatten(0, 1)[flat_T] = each_TK
    return codes * scale[..., None]


def pool(kind: str, storage: type[KVStorage]) -> Pool[Ints, ExtendView]:
    model = tiny_model("llama")
    context = CacheContext(model.attention, 2, MAX_SEQ_LEN, torch.float32, CPU, KERNELS)
    if kind == "slotted":
        return Pool(SlottedBooks(2, MAX_SEQ_LEN), storage(context, 2, MAX_SEQ_LEN))
    return Pool(PagedBooks(2, MAX_SEQ_LEN, Pages(20, 8)), storage(context, 20, 8))


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
    plain, small = pool(kind, KVStorage), pool(kind, EightBit)
    assert small.nbytes < plain.nbytes / 2
    whole = answer(small, [30])
    exact = answer(plain, [30])
    assert not torch.equal(whole, exact)
    assert torch.nn.functional.cosine_similarity(whole, exact).min() > 0.999
    assert torch.equal(answer(pool("paged", EightBit), [7, 1, 13, 9]), whole)
