"""Engines on a GPU give the same answers alone and among others, recorded or not, whole or in chunks, from any pool."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.dry import DEVICE, DRY, SHAPES
from benchmarks.shapes import write

from infer import LLM, SamplingParams
from infer.contracts.records import RequestRecord
from infer.contracts.registration import hookimpl

LAYERS, LONGEST = 2 if DRY else 4, 1536
GRAPHS = "auto" if DRY else "on"
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "cache": {"backend": "slotted"},
    "engine": {"max_batch_size": 1, "use_chunked_prefill": False, "graphs": "off"},
}
CROWDED: Mapping[str, Mapping[str, Any]] = {
    "cache": {"backend": "paged", "paged": {"num_blocks": 110}},
    "engine": {"max_batch_size": 12, "prefill_chunk_size": 96, "graphs": GRAPHS},
}
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "crowded": CROWDED,
    "eager": {**CROWDED, "engine": {**CROWDED["engine"], "graphs": "off"}},
    "separate": {**CROWDED, "engine": {**CROWDED["engine"], "mixed_batches": False}},
    "slotted": {**CROWDED, "cache": {"backend": "slotted"}},
}


class Finished:
    """An observer that keeps what it is told."""

    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


def traffic(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 1200 tokens, some with a common beginning; greedy, drawn and with edited logits."""
    draw = random.Random(5)
    shared = [draw.randrange(vocab_size) for _ in range(600)]
    found = []
    for i in range(24):
        own = [draw.randrange(vocab_size) for _ in range(draw.choice([1, 15, 16, 17, 100, 255, 600]))]
        prompt = shared[: draw.choice([600, 599, 512])] + own if i % 2 else own
        found.append(
            (
                prompt,
                SamplingParams(
                    max_tokens=draw.randint(8, 90),
                    temperature=float(i % 3 > 0),
                    top_p=0.95,
                    seed=i,
                    logprobs=2,
                    ignore_eos=True,
                    presence_penalty=0.5 * (i % 4 == 1),
                    repetition_penalty=1.2 if i % 5 == 0 else 1.0,
                    logit_bias={7: 3.0} if i % 6 == 0 else {},
                ),
            )
        )
    return found


def answers(folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> tuple[list[Any], list[RequestRecord]]:
    finished = Finished()
    model = {"load_format": "dummy", "device": DEVICE.type}
    engine = {"max_seq_len": LONGEST, **sections["engine"]}
    with LLM(str(folder), plugins=[finished], model=model, **{**sections, "engine": engine}) as llm:
        assert llm.served.exact
        prompts, params = zip(*traffic(llm.served.vocab_size), strict=True)
        found = llm.generate(list(prompts), list(params))
    assert all(answer.error is None for answer in found)
    return [(answer.token_ids, answer.logprobs) for answer in found], finished.records


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B", "Gemma-3-1B"])
def test_answers_do_not_depend_on_how_they_are_served(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {**SHAPES[name], "num_hidden_layers": LAYERS})
    expected, _ = answers(folder, PLAIN)
    for variant, sections in VARIANTS.items():
        found, records = answers(folder, sections)
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one == other, (variant, i)
        if sections["cache"]["backend"] == "paged":
            assert any(record.preemptions for record in records)
            assert any(record.num_cached for record in records)
