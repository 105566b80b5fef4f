"""Drafts of a model's head, its own or an EAGLE-3 head: what it proposes whatever has happened to a sequence, and that
answers stay the same."""

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
    COMMON,
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
    random_tensors,
    slotted_pool,
)
from torch import Tensor

from infer.assemble.blueprint import attach
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import DraftHead, DraftingModel, LayerReadingHead, ModelContext, ModelProtocol, Pass
from infer.contracts.params import SamplingParams
from infer.contracts.proposer import Computed, DraftRequest, OwnHead, ProposerContext, SecondModel
from infer.contracts.registration import NoSettings
from infer.contracts.request import Request
from infer.contracts.sections import EngineSettings
from infer.engine.graphs import DecodeGraphs
from infer.engine.payoff import Plan
from infer.engine.sampler import Drawing
from infer_cache_slotted import SlottedPool
from infer_layers import Decoder
from infer_models.eagle3 import Eagle3Head
from infer_speculation import heads
from infer_speculation.heads import HeadProposer

F32, BF16 = torch.float32, torch.bfloat16
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5 int8", "qwen3_next int4")
BEHIND = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "glm4_moe_lite int8", "deepseek_v3 int4")
EAGLE = {
    "llama eagle3": {},
    "qwen3 eagle3": {"norm_output": True, "norm_before_fc": True},
    "qwen3 int4 eagle3": {},
    "gemma4 eagle3": {"fc_norm": True},
    "lfm2 eagle3": {"norm_before_residual": True},
}
"""Of EAGLE-3 heads, fields of their config.json."""


@functools.cache
def drafting(family: str, dtype: torch.dtype = F32) -> tuple[ModelProtocol, DraftHead]:
    """A tiny model with a draft head."""
    name, *more = family.split()
    quantization = next((each for each in more if each != "eagle3"), None)
    kernels, other = TensorsOnly(), "eagle3" in more
    model = build_model(CONFIGS[name], dtype, kernels, quantization, draft_head=not other)
    if other:
        attach(model, eagle(model, dtype, kernels, EAGLE[family]))
    assert isinstance(model, DraftingModel)
    assert model.draft_head is not None
    return model, model.draft_head


def eagle(model: ModelProtocol, dtype: torch.dtype, kernels: KernelsProtocol, fields: Mapping[str, Any]) -> Eagle3Head:
    """A tiny head, which drafts every other token, and reads the embeddings and what enters two later layers."""
    assert isinstance(model, Decoder)
    config = COMMON | {
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": 1,
        "draft_vocab_size": model.vocab_size // 2,
        "eagle_aux_hidden_state_layer_ids": [0, len(model.layers) - 1, len(model.layers)],
        **fields,
    }
    head = Eagle3Head(config, ModelContext(kernels, dtype, CPU, MAX_SEQ_LEN, drafts_for=model))
    tensors = dict(random_tensors(head.expected())) | {"d2t": torch.arange(model.vocab_size // 2)}
    head.load(tensors.items())
    return head


def no_second(path: str) -> SecondModel:
    raise AssertionError("mtp loads no second model")


class Watched(HeadProposer):
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
    hidden = hidden_states(model, text, dtype)[[*seen], -head.hidden_size :]
    if isinstance(head, LayerReadingHead):
        hidden = head.joined(hidden)
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


def mix(seed: int, families: Sequence[str]) -> None:
    """Chunks, company, preemption, prefix hits, wrong drafts, recorded passes: answers are as without drafts, and
    drafts are those of a head that sees the whole text from where it was first computed."""
    draw = random.Random(seed)
    family, dtype = draw.choice(families), draw.choice([F32, BF16])
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
    mix(seed, FAMILIES)


@pytest.mark.draws
@pytest.mark.parametrize("seed", [*seeds(2), *slowly(*seeds(40)[2:])])
def test_any_mix_of_requests_has_the_same_events_with_a_head_behind_the_last_layer(seed: int) -> None:
    mix(seed, BEHIND)


@pytest.mark.draws
@pytest.mark.parametrize("seed", [*seeds(4), *slowly(*seeds(40)[4:])])
def test_any_mix_of_requests_has_the_same_events_with_a_head_that_reads_layers(seed: int) -> None:
    mix(seed, [*EAGLE])


@pytest.mark.parametrize("family", ["llama eagle3", "gemma4 eagle3", "lfm2 eagle3"])
def test_a_head_changes_nothing_of_the_model(family: str) -> None:
    """Hidden states and logits are, bit for bit, those of the model without it."""
    (model, head), text = drafting(family, BF16), random_prompt(40)
    plain = build_model(CONFIGS[family.split()[0]], BF16, TensorsOnly())
    hidden, expected = hidden_states(model, text, BF16), hidden_states(plain, text, BF16)
    assert hidden.shape == (len(text) - 1, expected.shape[1] + head.hidden_size)
    assert torch.equal(hidden[:, : expected.shape[1]], expected)
    assert torch.equal(model.logits(hidden), plain.logits(expected))


def test_embeddings_are_hidden_states_of_the_model_alone() -> None:
    """Though what the head reads stands beside them."""
    model, plain = drafting("llama eagle3")[0], build_model(CONFIGS["llama"], F32, TensorsOnly())
    found = []
    for each in (model, plain):
        stepper = make_engine(each, F32, proposer=watched("llama eagle3") if each is model else None, max_batch_size=2)
        params = SamplingParams(max_tokens=1)
        stepper.engine.submit(Request(tuple(random_prompt(9)), params, id="a", pooling="last"))
        stepper.run()
        found.append(stepper.events["a"][0].embedding)
    assert found[0] is not None
    assert found[0] == found[1]


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
    monkeypatch.setattr(heads, "KEPT", 10)
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
