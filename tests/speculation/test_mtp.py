"""Drafts of the model's own head: what it proposes whatever has happened to a sequence, and that answers stay the
same."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests import support
from tests.core.engine.test_speculation import EOS, answers, some_request
from tests.core.engine.test_speculation import ascii as characters
from tests.examples import seeds
from tests.support import (
    CONFIGS,
    CPU,
    MAX_SEQ_LEN,
    POOLS,
    VOCAB,
    Always,
    Recorder,
    Stepper,
    build_model,
    letters,
    make_engine,
    paged_pool,
    slotted_pool,
)
from torch import Tensor

from infer.contracts.model import DraftHead, DraftingModel, ModelProtocol, Pass
from infer.contracts.proposer import Computed, DraftRequest, OwnHead, ProposerContext, SecondModel
from infer.contracts.registration import NoSettings
from infer.contracts.request import Request
from infer.contracts.sections import EngineSettings
from infer.engine.graphs import DecodeGraphs
from infer.engine.sampler import Drawing
from infer_cache_slotted import SlottedPool
from infer_speculation.mtp import MTPProposer

F32, BF16 = torch.float32, torch.bfloat16
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5 int8", "qwen3_next int4")


@functools.cache
def drafting(family: str, dtype: torch.dtype = F32) -> tuple[ModelProtocol, DraftHead]:
    """A tiny model with a draft head."""
    family, _, quantization = family.partition(" ")
    model = build_model(CONFIGS[family], dtype, quantization=quantization or None, draft_head=True)
    assert isinstance(model, DraftingModel)
    assert model.draft_head is not None
    return model, model.draft_head


def no_second(path: str) -> SecondModel:
    raise AssertionError("mtp loads no second model")


class Watched(MTPProposer):
    """Notes from which position on it has read each request, and what it has proposed."""

    def __init__(self, head: DraftHead, pool: Any, batch: int, dtype: torch.dtype) -> None:
        own = OwnHead(head, pool, dtype)
        keys = EngineSettings(max_batch_size=batch)
        super().__init__(
            ProposerContext(keys, letters(), VOCAB, MAX_SEQ_LEN, CPU, support.KERNELS, no_second, own),
            NoSettings(),
        )
        self.pool, self.room = pool, pool.free_tokens()
        self.first: dict[str, int] = {}
        self.proposed: list[tuple[DraftRequest, list[int]]] = []

    def read(self, computed: Sequence[Computed], hidden_TD: Tensor) -> None:
        before = set(self._open)
        super().read(computed, hidden_TD)
        with torch.inference_mode():
            hidden_TD.fill_(torch.nan)  # as a later pass may do
        opened = self._open.keys() - before
        self.first |= {each.request.id: each.start for each in computed if each.request.id in opened}

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = super().propose(draft_requests)
        for draft_request, drafts in zip(draft_requests, found, strict=True):
            self.proposed.append((draft_request._replace(token_ids=[*draft_request.token_ids]), drafts))
        return found


@torch.inference_mode()
def alone(family: str, dtype: torch.dtype, request: Request, text: list[int], first: int, most: int) -> list[int]:
    """The drafts of a head that attends to the positions from ``first`` on, computed at once."""
    model, head = drafting(family, dtype)
    pool, own = slotted_pool(model, dtype, 1), slotted_pool(head, dtype, 1)  # type: ignore[arg-type]
    assert pool.allocate(text)
    assert own.allocate(text)
    positions = torch.arange(len(text) - 1)
    view = pool.batched_chunked_prefill_view([0], [0], [len(text) - 1])
    hidden = model.forward(Pass(torch.tensor(text[:-1]), positions, view))[first:]
    view = own.batched_chunked_prefill_view([0], [0], [len(text) - 1 - first])
    hidden = head.forward(Pass(torch.tensor(text[first + 1 :]), positions[first:], view, None, hidden))[-1:]
    drafts: list[int] = []
    while True:
        draws = Drawing(CPU)([request], [len(text) + len(drafts)])
        token = support.KERNELS.sample(head.logits(hidden), draws)
        drafts.append(int(token))
        if len(drafts) == most:
            return drafts
        position = torch.tensor([len(text) + len(drafts) - 2])
        hidden = head.forward(Pass(token, position, own.decode_view([0]), None, hidden))


def mix(seed: int) -> None:
    """Chunks, company, preemption, prefix hits, wrong drafts, recorded passes: answers are as without drafts, and
    drafts are those of a head that sees the whole text from where it was first computed."""
    draw = random.Random(seed)
    family, dtype = draw.choice(FAMILIES), draw.choice([F32, BF16])
    model, head = drafting(family, dtype)
    batch = draw.randint(1, 5)
    requests = [some_request(draw, str(i)) for i in range(draw.randint(1, 6))]
    keys: dict[str, Any] = {
        "max_batch_size": batch,
        "prefill_chunk_size": draw.choice([7, 33, 512]),
        "max_tokens_per_step": draw.choice([None, batch, batch + 5, 60]),
        "mixed_batches": draw.random() < 0.5,
        "lag": draw.randint(0, 2),
        "tokenizer": characters(),
        "eos": frozenset({EOS}),
    }
    wait, paged, recorded = draw.randint(0, 4), draw.choice([None, 20, 23, 200]), draw.random() < 0.4

    def stepper(**more: Any) -> Stepper:
        pool: Any = (
            slotted_pool(model, dtype, batch)
            if paged is None
            else paged_pool(model, dtype, batch, num_blocks=paged, state_snapshots=draw.choice([2, 8]))
        )
        graphs = DecodeGraphs(model, pool, CPU, batch, Recorder(cheap=True)) if recorded else None
        return make_engine(model, dtype, pool=pool, graphs=graphs, **keys, **more)

    truth = answers(stepper(), requests)
    pool = POOLS[draw.choice(["slotted", "paged"])](head, dtype, batch)  # type: ignore[arg-type]
    proposer = Watched(head, pool, batch, dtype)
    payoff = Always(random.Random(seed) if draw.random() < 0.7 else None)
    assert answers(stepper(proposer=proposer, payoff=payoff), requests, wait) == truth
    assert pool.free_tokens() == proposer.room
    assert not proposer._open
    for draft_request, drafts in draw.sample(proposer.proposed, min(12, len(proposer.proposed))):
        if drafts:
            request, text, most = draft_request
            assert drafts == alone(family, dtype, request, [*text], proposer.first[request.id], most)
    if isinstance(pool, SlottedPool) and paged is None:
        assert all(drafts for _, drafts in proposer.proposed), "nothing is ever missed"


@pytest.mark.draws
@pytest.mark.parametrize("seed", [*seeds(8), *(pytest.param(i, marks=pytest.mark.slow) for i in seeds(120)[8:])])
def test_any_mix_of_requests_has_the_same_events_and_the_drafts_of_the_whole_text(seed: int) -> None:
    mix(seed)
