"""Where drafts come from."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests import support
from tests.support import CPU, DTYPES, POOLS, VOCAB, letters, random_prompt, tiny_model

from infer.contracts.params import SamplingParams
from infer.contracts.proposer import DraftRequest, ProposerContext, SecondModel
from infer.contracts.request import Request
from infer.contracts.sections import EngineSettings
from infer_speculation import draft, ngram
from infer_speculation.draft import DraftProposer, DraftSettings
from infer_speculation.ngram import NgramProposer, NgramSettings


def looked_up(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    """What follows the last earlier occurrence of the longest n-gram at the end; where the text ends, it repeats."""
    for size in range(longest, shortest - 1, -1):
        for at in range(len(tokens) - 1, size - 1, -1):
            if tokens[at - size : at] == tokens[len(tokens) - size :]:
                period = tokens[at:]
                return [period[i % len(period)] for i in range(most)]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(2, 4), (1, 1), (3, 7)])
def test_ngrams_are_found_as_by_searching(shortest: int, longest: int) -> None:
    draw = random.Random(longest)
    proposer = NgramProposer(NgramSettings(shortest=shortest, longest=longest))
    texts = {str(i): [draw.randrange(3 + i) for _ in range(draw.randint(1, 40))] for i in range(4)}
    requests = {id: Request(tuple(text), id=id) for id, text in texts.items()}
    found = 0
    for _ in range(120):
        ids = draw.sample(sorted(texts), draw.randint(1, 4))
        for id in ids:
            texts[id] += [draw.randrange(3 + int(id)) for _ in range(draw.randint(0, 5))]
        most = draw.randint(1, 9)
        proposals = proposer.propose([DraftRequest(requests[id], texts[id], most) for id in ids])
        assert proposals == [looked_up(texts[id], most, shortest, longest) for id in ids]
        found += sum(map(bool, proposals))
    assert found > 50
    proposer.end("0")
    assert proposer.propose([DraftRequest(requests["0"], [1, 2], 3)]) == [[]]


def test_what_is_remembered_of_a_long_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are taken in over several steps."""
    monkeypatch.setattr(ngram, "REMEMBERED", 50)
    monkeypatch.setattr(ngram, "AT_ONCE", 60)
    proposer = NgramProposer(NgramSettings())
    text = [*range(1000, 1300), 1, 2, 3, *range(2000, 2020), 1, 2]
    request = Request(tuple(text), id="a")
    for _ in range(5):
        assert proposer.propose([DraftRequest(request, text, 3)]) == [[]]
    assert proposer.propose([DraftRequest(request, text, 3)]) == [[3, 2000, 2001]]
    (index,) = proposer._indices.values()
    assert sum(map(len, index._new + index._old)) <= 3 * 2 * 50
    text += [1000, 1001]
    assert proposer.propose([DraftRequest(request, text, 3)]) == [[]], "too long ago"


def proposing(backend: str) -> tuple[DraftProposer, Any]:
    """A second model that proposes, and its pool."""
    model = tiny_model("qwen3")
    pool = POOLS[backend](model, DTYPES[0], 2)
    second = SecondModel(model, pool, letters(), 128)
    keys = EngineSettings(max_batch_size=2, graphs="off")
    context = ProposerContext(keys, letters(), VOCAB, 128, CPU, support.KERNELS, lambda path: second)
    return DraftProposer(context, DraftSettings(path="second")), pool


@pytest.mark.parametrize("backend", [pytest.param("slotted", marks=pytest.mark.slow), "paged"])
def test_a_second_model_proposes_what_it_would_draw_itself(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After right drafts and wrong ones alike. It reads a long prompt in several steps."""
    most = 4
    monkeypatch.setattr(draft, "CHUNK", 16)

    draw, (kept, pool) = random.Random(1), proposing(backend)
    room = pool.free_tokens()
    texts = {"a": random_prompt(40), "b": random_prompt(7, seed=1)}
    params = SamplingParams(temperature=1.0, prompt_logprobs=1, logprobs=2)
    requests = {id: Request(tuple(text), params, id=id, seed=5) for id, text in texts.items()}
    assert kept.propose([DraftRequest(requests["a"], texts["a"], most)]) == [[]]
    for step in range(8):
        proposals = kept.propose([DraftRequest(requests[id], texts[id], most) for id in texts])
        for (id, text), drafts in zip(texts.items(), proposals, strict=True):
            fresh, _ = proposing(backend)
            alone: list[list[int]] = [[]]
            while alone == [[]]:
                alone = fresh.propose([DraftRequest(requests[id], text, most)])
            assert drafts == alone[0] or (step < 2 and id == "a" and not drafts)
            text += [*drafts[: step % (most + 1)], *(draw.randrange(VOCAB) for _ in range(1 + step % 3))]
    kept.end("a")
    kept.end("b")
    kept.end("c")
    assert pool.free_tokens() == room
    longest = Request(tuple(random_prompt(126)), params, id="d")
    assert kept.propose([DraftRequest(longest, longest.prompt_token_ids, most)]) == [[]], "it may have 128 positions"


def test_a_second_model_may_meet_an_answer_late_whose_beginning_it_has_cached() -> None:
    """It shares more than the prompt with an earlier request that had the same answer."""
    kept, _ = proposing("paged")
    text, params = random_prompt(70), SamplingParams()
    for id, known in (("a", 70), ("b", 66), ("c", 60)):
        request = Request(tuple(text[:20]), params, id=id)
        (drafts,) = kept.propose([DraftRequest(request, text[:known], 3)])
        fresh, _ = proposing("paged")
        assert [drafts] == fresh.propose([DraftRequest(request, text[:known], 3)])
        kept.end(id)


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_a_second_model_is_never_given_a_token_that_it_does_not_have(where: str) -> None:
    """Some checkpoints of one family share a tokenizer and have embeddings of different lengths."""
    proposer, pool = proposing("paged")
    room, text, most = pool.free_tokens(), random_prompt(20), 3
    requests = {id: Request(tuple(text), id=id) for id in ("a", "b")}
    (right,) = proposer.propose([DraftRequest(requests["b"], text, most)])
    proposer.end("b")
    if where == "answer":
        proposer.propose([DraftRequest(requests["a"], text, most)])
    for _ in range(2):
        foreign = [*text, VOCAB, 1] if where == "answer" else [VOCAB, *text]
        assert proposer.propose(
            [DraftRequest(requests["a"], foreign, most), DraftRequest(requests["b"], text, most)]
        ) == [[], right]
    proposer.end("a")
    assert proposer.propose([DraftRequest(requests["a"], text, most)]) == [right], "another request may have this id"
    proposer.end("a")
    proposer.end("b")
    assert pool.free_tokens() == room
