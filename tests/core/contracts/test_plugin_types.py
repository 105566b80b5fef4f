"""A plugin as a stranger writes it: one of each kind, with attributes that are lists, and settings of its own.

It serves; and mypy, which ``make lint`` runs in strict mode, takes each class for what its protocol asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from tests.core.text.test_encoding import DEMO
from torch import Tensor

from infer import LLM, SamplingParams, hookimpl
from infer.cache import BlockManager, KVStorage, Pool
from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import Allocation, CacheContext, CachePoolProtocol, KVCacheView
from infer.contracts.kernels import KernelsProtocol, KernelsRegistration
from infer.contracts.model import ModelContext, ModelProtocol, ModelRegistration, Pass
from infer.contracts.records import ObserverProtocol, StepRecord
from infer.contracts.registration import Registration
from infer.contracts.scheduler import (
    Schedule,
    SchedulerContext,
    SchedulerProtocol,
    SchedulerRegistration,
    Sequence,
    Work,
)
from infer.contracts.weights import (
    ContainerProtocol,
    ContainerRegistration,
    TensorFilesProtocol,
    WeightFormatProtocol,
    WeightFormatRegistration,
)
from infer.kernels.reference import ReferenceKernels
from infer.weight import Weight

WIDTH, HEADS, SIZE = 32, 2, 16


class Model:
    """One layer of attention over embeddings, and the embedding once more as the head."""

    def __init__(self, config: Mapping[str, Any], context: ModelContext) -> None:
        self.attention = [AttentionSpec(HEADS, HEADS, SIZE, SIZE**-0.5)]
        self.vocab_size = int(config["vocab_size"])
        self._kernels = context.kernels

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {"embedding.weight": (self.vocab_size, WIDTH)}

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        ((_, weight),) = tensors
        self._packed = self._kernels.pack(weight)

    def forward(self, batch: Pass) -> Tensor:
        x_TD = self._kernels.embedding(batch.token_ids_T, self._packed)
        q_THE = x_TD.view(-1, HEADS, SIZE)
        mixed_TD = x_TD + batch.cache.attend(0, q_THE, q_THE, q_THE).flatten(1)
        return mixed_TD if batch.rows_N is None else mixed_TD[batch.rows_N]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._kernels.linear(hidden_ND, self._packed)


class Blocks(BlockManager):
    def allocate(self, token_ids: Any) -> Allocation | None:
        if not self._free_slots or len(token_ids) > self.max_seq_len:
            return None
        slot = self._open(0)
        self._place(slot, [slot])
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        return num_tokens <= self.max_seq_len

    def free(self, slot: int) -> None:
        self._close(slot)

    def free_tokens(self) -> int:
        return len(self._free_slots) * self.max_seq_len


def make_pool(context: CacheContext, settings: Any) -> Pool[Any, Any]:
    size, length = context.max_batch_size, context.max_seq_len
    return Pool(Blocks(size, length, length), KVStorage(context, size, length))


class OneAtATime:
    """Whoever came first, whole prompts, until it has ended."""

    def __init__(self, context: SchedulerContext) -> None:
        self.pool = context.pool
        self.here: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.here.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.here.remove(sequence)
        if sequence.slot is not None:
            self.pool.free(sequence.slot)

    def has_work(self) -> bool:
        return bool(self.here)

    def schedule(self) -> Schedule:
        if not self.here:
            return Schedule([], [])
        first = self.here[0]
        if first.slot is None:
            place = self.pool.allocate(first.tokens)
            assert place is not None
            first.slot, first.prefill_end = place.slot, len(first.tokens)
        if not first.decoding:
            return Schedule([], [first.extend(first.prefill_end)])
        works: list[Work] = []
        if not first.complete and self.pool.grow(first.slot, len(first.tokens)):
            works.append(first.extend(1))
        return Schedule(works, [])


class Kernels(ReferenceKernels):
    def gated(self, gate: Tensor, up: Tensor, activation: Any) -> Tensor:
        return super().gated(gate, up, activation)


class Doubled:
    """Weights under other names, at half their values."""

    def __init__(self, files: TensorFilesProtocol) -> None:
        self.files = files

    def names(self) -> list[str]:
        return [name.removeprefix("half.") for name in self.files.names()]

    def weight(self, name: str) -> Tensor:
        return 2 * self.files.tensor(f"half.{name}")


class WatcherSettings(BaseModel):
    most: int = 1000


class Watcher:
    steps: list[int] = []  # noqa: RUF012

    def __init__(self, settings: WatcherSettings) -> None:
        self.most = settings.most

    def infer_step_finished(self, record: StepRecord) -> None:
        if len(self.steps) < self.most:
            self.steps.append(len(record.work))


class Archive:
    """A whole checkpoint pickled by torch, a thing that only a test may do. The tokenizer is in words of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, Any] = torch.load(path)

    def config(self) -> dict[str, Any]:
        return dict(self._held["config"])

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_config(self) -> dict[str, Any]:
        return {}

    def tokenizer(self) -> bytes:
        return bytes(self._held["tokenizer"])

    def tensors(self) -> Archive:
        return self

    def names(self) -> Iterable[str]:
        return list(self._held["tensors"])

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._held["tensors"][name]
        return tensor


class Plugin:
    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        make = lambda config, context, settings: Model(config, context)  # noqa: E731
        return [ModelRegistration("stranger", make, "one layer", architectures=("Stranger",))]

    @hookimpl
    def infer_cache_pools(self) -> list[Registration[Any]]:
        return [Registration("stranger", make_pool, "a block for each")]

    @hookimpl
    def infer_schedulers(self) -> list[SchedulerRegistration]:
        make = lambda context, settings: OneAtATime(context)  # noqa: E731
        return [SchedulerRegistration("stranger", make, "one at a time", chunks=False)]

    @hookimpl
    def infer_kernels(self) -> list[KernelsRegistration]:
        return [KernelsRegistration("stranger", lambda device, settings: Kernels(), "the reference's")]

    @hookimpl
    def infer_containers(self) -> list[ContainerRegistration]:
        make = lambda path, settings: Archive(path)  # noqa: E731
        return [ContainerRegistration("stranger", make, "all in one", suffixes=(".stranger",))]

    @hookimpl
    def infer_weight_formats(self) -> list[WeightFormatRegistration]:
        make = lambda config, files, settings: Doubled(files)  # noqa: E731
        return [WeightFormatRegistration("stranger", make, "half values", methods=("half",))]

    @hookimpl
    def infer_observers(self) -> list[Registration[Any]]:
        return [Registration("stranger", Watcher, "counts", settings=WatcherSettings)]


def as_protocols(
    model: Model,
    pool: Pool[Any, KVCacheView],
    scheduler: OneAtATime,
    doubled: Doubled,
    watcher: Watcher,
    archive: Archive,
) -> tuple[object, ...]:
    """What a type checker has to accept."""
    one: ModelProtocol = model
    two: CachePoolProtocol = pool
    three: SchedulerProtocol = scheduler
    four: WeightFormatProtocol = doubled
    five: ObserverProtocol = watcher
    six: KernelsProtocol = Kernels()
    seven: ContainerProtocol = archive
    return one, two, three, four, five, six, seven


def test_a_plugin_of_every_kind_serves(tmp_path: Path) -> None:
    config = {
        "architectures": ["Stranger"],
        "vocab_size": 4096,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }
    config["quantization_config"] = {"quant_method": "half"}
    torch.manual_seed(0)
    weight = torch.randn(4096, WIDTH)
    held = {
        "config": config,
        "tensors": {"half.embedding.weight": weight / 2},
        "tokenizer": (DEMO / "tokenizer.json").read_bytes() if DEMO.is_dir() else DEMO.read_bytes(),
    }
    torch.save(held, tmp_path / "model.Stranger")
    chosen: dict[str, Any] = {
        "cache": {"backend": "stranger"},
        "engine": {"batching_mode": "stranger"},
        "kernels": {"backend": "stranger"},
    }
    prompts = [[5, 6, 7], [9]]
    with LLM(str(tmp_path), plugins=[Plugin()], **chosen) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == expected(weight.double(), prompt, 6)
    assert set(Watcher.steps) == {1}


def expected(weight: Tensor, prompt: list[int], count: int) -> list[int]:
    """The same in float64, over all positions anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        x = weight[tokens]
        heads = x.view(-1, HEADS, SIZE).transpose(0, 1)
        scores = heads[:, -1:] @ heads.transpose(1, 2) * SIZE**-0.5
        mixed = x[-1] + (scores.softmax(-1) @ heads).flatten()
        tokens.append(int((weight @ mixed).argmax()))
    return tokens[len(prompt) :]
