"""What the quality benchmark measures, and that K and V in int8 cost next to nothing."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.quality import compare, held_out, windows
from tests.core.text.test_encoding import DEMO
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_pieces_come_from_all_texts_in_turn() -> None:
    texts = ["a" * 25, "b" * 8, "c" * 12]
    cut = windows(lambda text: [ord(c) for c in text], texts, 38, 10)
    assert [chr(piece[0]) * len(piece) for piece in cut] == ["a" * 10, "b" * 8, "c" * 10, "a" * 10]
    assert sum(map(len, windows(lambda text: [ord(c) for c in text], texts, 1000, 10))) == 45


@pytest.mark.slow
def test_quantized_keys_and_values_cost_less_than_a_thousandth() -> None:
    """Of the loss on text that the model has not seen, which is transformers' loss."""
    texts, length = held_out(), 1000
    tokens, (base, int8) = compare("demo", ["cache.kv_dtype=int8"], texts, 4 * length, length)
    assert tokens == 4 * (length - 1)
    assert abs(int8.change) < 1e-3
    assert int8.nats == pytest.approx(base.nats * (1 + int8.change))
    assert 0 < int8.divergence < 1e-3
    assert int8.divergence < int8.divergence_99 < 1e-2
    assert int8.agreement > 0.98
    assert base.divergence == base.change == 0
    assert base.agreement == 1
    tokenizer = AutoTokenizer.from_pretrained(DEMO.parent)
    model = AutoModelForCausalLM.from_pretrained(DEMO.parent, dtype=torch.float32)
    losses = []
    for ids in windows(lambda text: tokenizer(text).input_ids, texts, 4 * length, length):
        window = torch.tensor([ids])
        with torch.inference_mode():
            losses.append(float(model(input_ids=window, labels=window).loss))
    assert math.fsum(losses) / 4 == pytest.approx(base.nats, rel=1e-3)
