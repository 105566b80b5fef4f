"""Drafts of the model's own head: what it proposes whatever has happened to a sequence, and that answers stay the
same."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests import support
from tests.core.engine.test_graphs import TensorsOnly
from tests.core.engine.test_speculation import EOS, answers, some_request
from tests.core.engine.test_speculation import ascii as characters
from tests.examples import seeds, slowly
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
    random_prompt,
    slotted_pool,
)
from torch import Tensor

from infer.contracts.model import DraftHead, DraftingModel, ModelProtocol, Pass
from infer.contracts.params import SamplingParams
from infer.contracts.proposer import Computed, DraftRequest, OwnHead, ProposerContext, SecondModel
from infer.contracts.registration import NoSettings
from infer.contracts.request import Request
from infer.contracts.sections import EngineSettings
from infer.engine.graphs import DecodeGraphs
from infer.engine.payoff import Plan
from infer.engine.sampler import Drawing
from infer_cache_slotted import SlottedPool
from infer_speculation import mtp
from infer_speculation.mtp import MTPProposer

F32, BF16 = torch.float32, torch.bfloat16
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5 int8", "qwen3_next int4")


@functools.cache
def drafting(family: str, dtype: torch.dtype = F32) -> tuple[ModelProtocol, DraftHead]:
    """A tiny model with a draft head."""
    family, _, quantization = family.partition(" ")
    model = build_model(CONFIGS[family], dtype, TensorsOnly(), quantization or None, draft_head=True)
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
def hidden_states(model: ModelProtocol, text: list[int], dtype: torch.dtype = F32) -> Tensor:
    """Those of all tokens but the last."""
    pool, end = slotted_pool(model, dtype, 1), len(text) - 1
    assert pool.allocate(text)
    view = pool.batched_chunked_prefill_view([0], [0], [end])
    return model.forward(Pass(torch.tensor(text[:-1]), torch.arange(end), view))


@torch.inference_mode()
def alone(
    family: str, dtype: torch.dtype, request: Request, text: list[int], seen: Sequence[int], most: int
) -> list[int]:
    """The drafts of a head that attends to the positions ``seen``, computed at once."""
    model, head = drafting(family, dtype)
    own = slotted_pool(head, dtype, 1)  # type: ignore[arg-type]
    assert own.allocate(text)
    hidden = hidden_states(model, text, dtype)[[*seen]]
    view = own.batched_chunked_prefill_view([0], [0], [len(seen)])
    following = torch.tensor([text[position + 1] for position in seen])
    hidden = head.forward(Pass(following, torch.tensor([*seen]), view, None, hidden))[-1:]
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
    wait, paged, recorded = draw.randint(0, 4), draw.choice([None, 10, 14, 200]), draw.random() < 0.4

    def stepper(**more: Any) -> Stepper:
        pool: Any = (
            slotted_pool(model, dtype, batch)
            if paged is None
            else paged_pool(model, dtype, batch, num_blocks=paged, state_snapshots=8)
        )
        pool.storage.kernels = TensorsOnly()
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
            seen = range(proposer.first[request.id], len(text) - 1)
            assert drafts == alone(family, dtype, request, [*text], seen, most)
    if isinstance(pool, SlottedPool) and paged is None:
        assert all(drafts for _, drafts in proposer.proposed), "nothing is ever missed"


@pytest.mark.draws
@pytest.mark.parametrize("seed", [*seeds(3), *slowly(*seeds(36)[3:])])
def test_any_mix_of_requests_has_the_same_events_and_the_drafts_of_the_whole_text(seed: int) -> None:
    mix(seed)


def watched(family: str = "qwen3_5", batch: int = 2, backend: str = "slotted") -> Watched:
    _, head = drafting(family)
    return Watched(head, POOLS[backend](head, F32, batch), batch, F32)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_sequence_that_has_lost_its_slot_has_the_drafts_of_its_whole_text(lag: int) -> None:
    model, _ = drafting("qwen3_5")
    proposer, pool = watched(), paged_pool(model, F32, 2, num_blocks=9)
    stepper = make_engine(model, F32, pool=pool, lag=lag, max_batch_size=2, prefill_chunk_size=8, proposer=proposer)
    stepper.submit(random_prompt(30, seed=7), "grows", temperature=0, max_tokens=60)
    stepper.submit(random_prompt(60), "long", temperature=0, max_tokens=30)
    stepper.run()
    (lost,) = [record.request_id for record in stepper.finished if record.preemptions]
    works = [work for step in stepper.steps for work in step.work if work.request_id == lost]
    assert "prefill" in [work.kind for work in works if work.start > works[0].length + 60], "it is computed again"
    for (request, text, most), drafts in proposer.proposed:
        assert drafts == alone("qwen3_5", F32, request, [*text], range(len(text) - 1), most)


class Sleeping(Always):
    """A payoff that asks for nothing at first."""

    def __init__(self, plans: int) -> None:
        super().__init__()
        self.left = plans

    def plan(self, rows: int, most: Mapping[Any, int]) -> Plan:
        self.left -= 1
        return super().plan(rows, most) if self.left < 0 else Plan({})


@pytest.mark.parametrize("plans", [3, 17])
def test_hidden_states_that_nobody_has_asked_about_for_long_are_missed(
    plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head then attends to the prompt, and to the last tokens."""
    monkeypatch.setattr(mtp, "KEPT", 10)
    model, _ = drafting("qwen3_5")
    proposer, prompt = watched(), random_prompt(20)
    stepper = make_engine(model, F32, proposer=proposer, payoff=Sleeping(plans), max_batch_size=2)
    stepper.submit(prompt, "a", temperature=0, max_tokens=40)
    stepper.run()
    count = 0
    for (request, text, most), drafts in proposer.proposed:
        end = len(proposer.proposed[0][0].token_ids) - 1
        assert end == len(prompt) + plans
        kept = range(max(len(prompt) - 1, end - 10), len(text) - 1)
        assert drafts == alone("qwen3_5", F32, request, [*text], [*range(len(prompt) - 1), *kept], most)
        count += len(drafts)
    assert count > 20


def test_a_head_without_room_misses_what_it_cannot_keep() -> None:
    """Sequences that come while all of its slots are taken get drafts as soon as one is free."""
    model, _ = drafting("qwen3_5")
    proposer = watched(batch=1)
    stepper = make_engine(model, F32, proposer=proposer, max_batch_size=2)
    for id, length in (("a", 12), ("b", 30)):
        stepper.submit(random_prompt(9), id, temperature=0, max_tokens=length)
    stepper.run()
    found = {id: [drafts for (request, *_), drafts in proposer.proposed if request.id == id] for id in "ab"}
    assert all(found["a"])
    assert not found["b"][0]
    assert found["b"][-1]
    (request, text, most), drafts = proposer.proposed[-1]
    assert drafts == alone("qwen3_5", F32, request, [*text], range(proposer.first["b"], len(text) - 1), most)
    assert proposer.pool.free_tokens() == proposer.room


def test_a_request_that_is_aborted_leaves_nothing() -> None:
    model, _ = drafting("qwen3_5")
    proposer = watched(backend="paged")
    stepper = make_engine(model, F32, proposer=proposer, max_batch_size=2, prefill_chunk_size=8)
    stepper.submit(random_prompt(30), "prefilling", max_tokens=9)
    stepper.submit(random_prompt(5), "decoding", max_tokens=90)
    for id in ("prefilling", "decoding"):
        for _ in range(2):
            stepper.engine.step()
        assert id in proposer._open
        stepper.abort(id)
        stepper.engine.step()
        assert id not in proposer._open
    stepper.run()
    assert proposer.pool.free_tokens() == proposer.room


def test_a_request_that_only_pools_is_not_read() -> None:
    model, _ = drafting("qwen3_5")
    proposer = watched()
    stepper = make_engine(model, F32, proposer=proposer, max_batch_size=2)
    params = SamplingParams(max_tokens=1)
    stepper.engine.submit(Request(tuple(random_prompt(9)), params, id="a", pooling="last"))
    stepper.run()
    assert len(stepper.events["a"]) == 1
    assert not proposer.first


def test_a_prefix_that_another_has_computed_meanwhile_is_missed() -> None:
    """A sequence may lose its slot half way, and find more in the cache than it had computed itself."""
    proposer, (model, _), text = watched(), drafting("qwen3_5"), random_prompt(60)
    request = Request(tuple(text), SamplingParams(temperature=0), id="a")
    hidden = hidden_states(model, text)
    for start, end in ((0, 10), (32, 59)):
        proposer.read([Computed(request, text, start, end - start, True)], hidden[start:end].clone())
    (drafts,) = proposer.propose([DraftRequest(request, text, 4)])
    assert drafts == alone("qwen3_5", F32, request, text, [*range(9), *range(32, 59)], 4)
