"""An answer's tokens one by one: most only add text, and the others are still seen among them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.contracts.scheduler import PENDING, Sequence
from infer.engine.answer import Answer
from infer.engine.reporting import Counts
from infer.text.detokenizer import TokenTexts

BYTES = {"a": 0, "b": 1, "<eos>": 2, "Ã": 3, "©": 4}
"""3 and 4 are the bytes of é, as byte-level tokenizers write them."""
EOS = 2


@pytest.mark.parametrize(
    ("tokens", "text", "why", "params"),
    [
        ([0, 1, 0, EOS], "aba", ("stop", None), {}),
        ([0, 0, 0, 1], "aaa", ("stop", 1), {"stop_token_ids": [1]}),
        ([0, 0, 0, 1], "aa", ("stop", "ab"), {"stop": ["ab"]}),
        ([0, 0, 1, 0, 1], "aabab", ("length", None), {"max_tokens": 5}),
        ([0, 0, 3, 4, 0, 3, EOS], "aaéa\ufffd", ("stop", None), {}),
        ([4, 3, 3, 0, 4], "\ufffd\ufffd\ufffda\ufffd", ("length", None), {"max_tokens": 5}),
    ],
)
def test_the_end_and_characters_of_several_tokens_are_seen_among_tokens_that_only_add_text(
    tokens: list[int], text: str, why: tuple[str, Any], params: dict[str, Any]
) -> None:
    tokenizer = Tokenizer(models.WordLevel(BYTES))
    tokenizer.decoder = decoders.ByteLevel()
    texts = TokenTexts(tokenizer)
    for token in BYTES.values():
        texts.learn(token)  # as other answers have
    sequence = Sequence(
        Request((0,), SamplingParams(**{"max_tokens": 50} | params)), 0, params.get("max_tokens", 50) + 1
    )
    answer = Answer(sequence, texts, frozenset({EOS}), counts := Counts())
    sequence.tokens += [PENDING] * len(tokens)
    *events, last = [answer.take(token, None) for token in tokens]
    assert "".join(event.text for event in (*events, last)) == text
    assert (last.finish_reason, last.stop_reason) == why
    assert not any(event.finish_reason for event in events)
    assert sequence.tokens[1:] == tokens
    assert counts.generated == len(tokens)
