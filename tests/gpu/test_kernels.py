"""The kernels at the sizes of real models: their results are right, and each row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.gpu.dry import DEVICE, DRY, SHAPES
from benchmarks.shapes import Costs
from tests.products import within_rounding
from torch import Tensor

from infer.cache import KVStorage
from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Draws
from infer.kernels.reference import ReferenceKernels
from infer_kernels_triton.configs import configs
from infer_kernels_triton.matmul import linear
from infer_kernels_triton.provider import TritonKernels

BF16 = torch.bfloat16
EXTENDS = [(1023, 1), (2047, 1), (4095, 1), (0, 700), (1000, 300), (255, 66), (31, 1), (0, 1), (511, 513)]
"""(start, length) of sequences in one batch; decodes stand first and in between."""
if DRY:
    EXTENDS = [(70, 1), (0, 9), (31, 1), (64, 30), (0, 1), (3, 2), (5, 1)]
ROWS = [1, 17, 40] if DRY else [1, 2, 7, 16, 17, 33, 64, 65, 128, 200, 256, 257, 300]


TIMES = 2 if DRY else 50
COSTS = [Costs(config) for config in (list(SHAPES.values())[:1] if DRY else SHAPES.values())]


def specs() -> Iterator[AttentionSpec]:
    for c in COSTS:
        for window in dict.fromkeys(c.windows()):
            yield AttentionSpec(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim**-0.5, window)
    if not DRY:
        yield AttentionSpec(16, 8, 256, 256**-0.5, 512, 50.0)


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(DEVICE)


def canceling(rows: int, columns: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """Values over many magnitudes: another order of adding gives other bits."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, columns, device=DEVICE, generator=generator)
    return (x * torch.exp2(8 * torch.randn(rows, columns, device=DEVICE, generator=generator))).to(dtype)


@pytest.mark.parametrize("size", sorted({nk for c in COSTS for nk in c.linear_shapes.values()}))
def test_products(size: tuple[int, int], kernels: TritonKernels) -> None:
    n, k = size
    x, weight = canceling(ROWS[-1], k, 1), canceling(n, k, 2)
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed)
    assert within_rounding(whole, x, weight)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows]), rows
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:]), rows


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((BF16, size) for size in sorted({nk for c in COSTS for nk in c.linear_shapes.values()})),
        *((torch.float32, (n, COSTS[0].hidden_size)) for n in (16, COSTS[0].hidden_size)),  # as adapters' products are
    ],
    ids=str,
)
def test_every_tile_gives_the_same_bits(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """The provider's choice among them depends on the number of rows."""
    n, k = size
    config = configs(DEVICE)[dtype.itemsize].linear
    x, weight = canceling(40 if DRY else 200, k, 1, dtype), canceling(n, k, 2, dtype)
    first, *others = (linear(x, weight, None, replace(config, tiles=(tile,)), 1) for tile in config.tiles)
    for tile, found in zip(config.tiles[1:], others, strict=True):
        assert torch.equal(found, first), tile


class Scene:
    """The same sequences, attended in whatever batches."""

    def __init__(self, kernels: TritonKernels, spec: AttentionSpec, block_size: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.spec = spec
        length = max(start + n for start, n in EXTENDS)
        blocks = -(-length // block_size) * len(EXTENDS)
        self.storage = KVStorage(CacheContext([spec], len(EXTENDS), 0, BF16, DEVICE, kernels), blocks, block_size)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2))
        self.table = order.int().view(len(EXTENDS), -1)
        shape = (len(EXTENDS), length)
        self.q, self.k, self.v = (
            (4 * torch.randn(*shape, heads, spec.head_size, device=DEVICE, generator=generator)).to(BF16)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.attend([(b, 0, start) for b, (start, _) in enumerate(EXTENDS) if start])

    def attend(self, works: list[tuple[int, int, int]]) -> list[Tensor]:
        """The answers to (sequence, start, length), in one batch; what they extend must be stored already."""
        sequences, starts, lens = zip(*works, strict=True)
        view = self.storage.view(self.table[list(sequences)].numpy(), starts, lens)
        q, k, v = (torch.cat([x[b, s : s + n] for b, s, n in works]) for x in (self.q, self.k, self.v))
        return list(torch.split_with_sizes(view.attend(0, q, k, v), lens))

    def attend64(self, sequence: int, start: int, length: int) -> Tensor:
        spec, end = self.spec, start + length
        group = spec.num_heads // spec.num_kv_heads
        q = self.q[sequence, start:end].double()
        k, v = (x[sequence, :end].double().repeat_interleave(group, 1) for x in (self.k, self.v))
        scores = torch.einsum("qhe,she->hqs", q, k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        distance = torch.arange(start, end, device=DEVICE)[:, None] - torch.arange(end, device=DEVICE)
        hidden = (distance < 0) | (distance >= (spec.window or end))
        return torch.einsum("hqs,she->qhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("block_size", [16, 5000], ids=["paged", "slotted"])
@pytest.mark.parametrize("spec", [*specs()], ids=lambda s: f"{s.num_heads}x{s.num_kv_heads}x{s.head_size}w{s.window}")
def test_attention(spec: AttentionSpec, block_size: int, kernels: TritonKernels) -> None:
    scene = Scene(kernels, spec, block_size)
    works = [(b, start, length) for b, (start, length) in enumerate(EXTENDS)]
    mixed = scene.attend(works)
    for work, found in zip(works, mixed, strict=True):
        expected = scene.attend64(*work)
        assert torch.linalg.norm(found.double() - expected) <= 1e-2 * torch.linalg.norm(expected), work
    for work, found in zip(works, mixed, strict=True):
        assert torch.equal(scene.attend([work])[0], found), work  # alone
        sequence, start, length = work
        for cut in {1, length // 2, length - 1} - {0, length}:  # in two pieces, the second in company
            first = scene.attend([(sequence, start, cut)])[0]
            (second, _) = scene.attend([(sequence, start + cut, length - cut), (6 if sequence != 6 else 7, 0, 1)])
            assert torch.equal(torch.cat([first, second]), found), (work, cut)
    decodes = [(b, start + length - 1, 1) for b, start, length in works]
    for batch in (decodes, [decodes[-1]]):  # many programs for few sequences, and few for many
        for work, found in zip(batch, scene.attend(batch), strict=True):
            assert torch.equal(found[0], mixed[work[0]][-1]), work


@pytest.mark.parametrize("rows", ROWS[::4])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_products_have_the_same_bits_every_time(bits: Any, rows: int, kernels: TritonKernels) -> None:
    """A race need not show in one comparison."""
    n, k = max(COSTS[0].linear_shapes.values())
    x, weight = canceling(rows, k, 1), canceling(n, k, 2)
    packed = kernels.pack(weight if bits == 16 else kernels.quantize(weight, bits))
    first = kernels.linear(x, packed)
    for _ in range(TIMES):
        assert torch.equal(kernels.linear(x, packed), first)


def test_attention_has_the_same_bits_every_time(kernels: TritonKernels) -> None:
    scene = Scene(kernels, next(specs()), 16)
    works = [(b, start, length) for b, (start, length) in enumerate(EXTENDS)]
    first = torch.cat(scene.attend(works))
    for _ in range(TIMES):
        assert torch.equal(torch.cat(scene.attend(works)), first)


def test_draws(kernels: TritonKernels) -> None:
    """As the reference draws, at a real vocabulary's size."""
    rows, vocabulary = (16, 500) if DRY else (64, 151936)
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).to(BF16)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(rows // 4)
    top_k = torch.tensor([0, 50, 1, 1000]).repeat_interleave(rows // 4)
    top_p = torch.tensor([1.0, 0.9]).repeat(rows // 2)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)

    def draw(kernels: ReferenceKernels, device: torch.device, logits: Tensor = logits) -> Tensor:
        values = (x.to(device) for x in (temperature, top_k, top_p, torch.zeros(rows), uniform))
        tensors = dict(zip(("temperature_N", "top_k_N", "top_p_N", "min_p_N", "uniform_N"), values, strict=True))
        return kernels.sample(logits.to(device), Draws(**tensors, greedy=False, top_k=True, top_p=True)).cpu()

    expected, found = draw(ReferenceKernels(), torch.device("cpu")), draw(kernels, DEVICE)
    # The sums behind the thresholds are rounded differently: a token at the edge may fall to its neighbor.
    assert (found == expected).float().mean() > 0.95
    assert torch.equal(found[temperature == 0], logits[temperature == 0].argmax(-1))
    assert torch.equal(draw(kernels, DEVICE, logits.float()), found)
