"""An answer's tokens one by one: most only add text, and the others are still seen among them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, Request, TokenLogprobs
from infer.contracts.scheduler import PENDING, Sequence
from infer.engine.answer import Answer
from infer.engine.answers import Answers
from infer.engine.batch import Lineup
from infer.engine.reporting import Counts
from infer.text.detokenizer import TokenTexts

BYTES = {"a": 0, "b": 1, "<eos>": 2, "Ã": 3, "©": 4}
"""3 and 4 are the bytes of é, as byte-level tokenizers write them."""
EOS = 2


CASES: list[tuple[list[int], str, tuple[str, Any], dict[str, Any]]] = [
    ([0, 1, 0, EOS], "aba", ("stop", None), {}),
    ([0, 0, 0, 1], "aaa", ("stop", 1), {"stop_token_ids": [1]}),
    ([0, 0, 0, 1], "aa", ("stop", "ab"), {"stop": ["ab"]}),
    ([0, 0, 1, 0, 1], "aabab", ("length", None), {"max_tokens": 5}),
    ([0, 0, 3, 4, 0, 3, EOS], "aaéa\ufffd", ("stop", None), {}),
    ([4, 3, 3, 0, 4], "\ufffd\ufffd\ufffda\ufffd", ("length", None), {"max_tokens": 5}),
]
"""Tokens, their text, why they end, and the request's parameters."""


def texts() -> TokenTexts:
    tokenizer = Tokenizer(models.WordLevel(BYTES))
    tokenizer.decoder = decoders.ByteLevel()
    texts = TokenTexts(tokenizer)
    for token in BYTES.values():
        texts.learn(token)  # as other answers have
    return texts


def answer(order: int, counts: Counts, texts: TokenTexts, params: dict[str, Any]) -> Answer:
    sampling = SamplingParams(**{"max_tokens": 50} | params)
    sequence = Sequence(Request((0,), sampling, f"r{order}"), order, params.get("max_tokens", 50) + 1)
    sequence.slot = order
    return Answer(sequence, texts, frozenset({EOS}), counts)


@pytest.mark.parametrize(("tokens", "text", "why", "params"), CASES)
def test_the_end_and_characters_of_several_tokens_are_seen_among_tokens_that_only_add_text(
    tokens: list[int], text: str, why: tuple[str, Any], params: dict[str, Any]
) -> None:
    one = answer(0, counts := Counts(), texts(), params)
    sequence = one.sequence
    sequence.tokens += [PENDING] * len(tokens)
    *events, last = [one.take(token, None) for token in tokens]
    assert "".join(event.text for event in (*events, last)) == text
    assert (last.finish_reason, last.stop_reason) == why
    assert not any(event.finish_reason for event in events)
    assert sequence.tokens[1:] == tokens
    assert counts.generated == len(tokens)


def test_tokens_are_taken_together_as_one_by_one() -> None:
    """Each case is an answer, and so is the first one again, with log-probabilities."""
    cases, known, counts = [*CASES, CASES[0]], texts(), Counts()
    each = [answer(order, counts, known, case[3]) for order, case in enumerate(cases)]
    lineup = Lineup([one.sequence for one in each])
    together = Answers(lineup, each, counts)
    told: dict[str, list[Event]] = {one.sequence.id: [] for one in each}
    scores = [TokenLogprobs(token, -float(token), 1) for token in cases[-1][0]]
    for n in range(max(len(tokens) for tokens, *_ in cases)):
        starts = [len(one.sequence.tokens) - 1 for one in each]
        lineup.advance(starts)
        assert [one.sequence.num_computed for one in each] == [start + 1 for start in starts]
        drawn = [tokens[n] if n < len(tokens) else 0 for tokens, *_ in cases]
        scored = [*[None] * len(CASES), scores[n] if n < len(scores) else None]
        events = together.take([start + 1 for start in starts], drawn, scored)
        assert len(events) == sum(n < len(tokens) for tokens, *_ in cases) == len([*events])
        assert events[0] == next(iter(events))
        assert {event.request_id for event in events.whole} >= {e.request_id for e in events if e.finish_reason}
        for event in events:
            told[event.request_id].append(event)
    for one, (tokens, text, why, _) in zip(each, cases, strict=True):
        events_of = told[one.sequence.id]
        assert [token for event in events_of for token in event.token_ids] == tokens
        assert "".join(event.text for event in events_of) == text
        assert (events_of[-1].finish_reason, events_of[-1].stop_reason) == why
        assert not any(event.finish_reason for event in events_of[:-1])
        assert one.sequence.tokens[1 : len(tokens) + 1] == tokens
        assert set(one.sequence.tokens[len(tokens) + 1 :]) <= {PENDING}, "what is drawn after the end is dropped"
    assert [event.logprobs for event in told[each[-1].sequence.id]] == [(score,) for score in scores]
    assert counts.generated == sum(len(tokens) for tokens, *_ in cases)
