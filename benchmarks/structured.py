"""python -m benchmarks.structured [--shape NAME] [--batch N ...] [--repeat N] [--json FILE]

What a JSON schema costs a decode step: batches with and without a schema take turns, with a vocabulary of the shape's
size. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import CONFIGS, write
from benchmarks.steps import Steps, decode_gaps
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infer import LLM, SamplingParams
from infer.contracts.params import StructuredOutputs
from infer_bench.bench import machine

PROMPT, NEW, EOS = 32, 100, 300
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


def vocabulary(size: int) -> dict[str, int]:
    """A vocabulary like those of byte-level tokenizers: every byte, then words and punctuation."""
    draw = random.Random(0)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < size:
        letters = "".join(draw.choices("etaoinshrdlucmfwygpbvkxqjz", range(26, 0, -1), k=draw.randint(2, 9)))
        signs = "".join(draw.choices('(){}[]<>.,:;"=+-*/_!?0123456789', k=draw.randint(2, 3)))
        words[draw.choices(["Ġ" + letters, letters, letters.capitalize(), signs], (4, 3, 2, 1))[0]] = None
    return {word: i for i, word in enumerate(words)}


def measure(folder: str, batch: int, repeat: int) -> list[tuple[float, float]]:
    """Per turn, the median seconds of a decode step without and with the schema."""
    steps, turns = Steps(), []
    with LLM(
        folder,
        model={"load_format": "dummy"},
        engine={"max_batch_size": batch, "max_seq_len": 512},
        plugins=[steps],
    ) as llm:
        for _ in range(repeat + 1):
            pair = []
            for outputs in (None, StructuredOutputs(json_schema=SCHEMA)):
                steps.records.clear()
                params = [
                    SamplingParams(max_tokens=NEW, seed=i, ignore_eos=outputs is None, structured_outputs=outputs)
                    for i in range(batch)
                ]
                llm.generate([[i + 5] * PROMPT for i in range(batch)], params)
                pair.append(statistics.median(decode_gaps(steps, batch)))
            turns.append((pair[0], pair[1]))
    return turns[1:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=CONFIGS, default="Qwen3-0.6B")
    parser.add_argument("--batch", type=int, action="append", metavar="N", help="may be repeated; default: 1, 16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    config: Mapping[str, Any] = {**CONFIGS[args.shape], "eos_token_id": EOS}
    report: dict[str, Any] = {"machine": machine(), "shape": args.shape, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config)
        tokenizer = Tokenizer(models.WordLevel(vocabulary(config["vocab_size"]), unk_token="!"))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        for batch in args.batch or (1, 16):
            turns = measure(folder, batch, args.repeat)
            free, held = (statistics.median(column) for column in zip(*turns, strict=True))
            print(f"{batch:4} answers: free {free * 1e3:6.2f} ms, held {held * 1e3:6.2f} ms, {held / free - 1:+.1%}")
            report["runs"][batch] = turns
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
