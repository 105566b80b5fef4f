"""python -m benchmarks.speculation MODEL [--case right-0.8 ...] [--batch N ...] [--head] [--json FILE]

How much faster answers come with draft tokens than without: an engine takes turns with and without, and the answers are
compared. In case right-X, a proposer knows the answers, and each of its tokens is right with probability X. In case
edit, drafts are right where n-gram lookup is right that edits a text of the prompt; in case repeat, where suffix lookup
is that has seen an answer of which this one is an edit. So the weights may be made up. With --head, drafts take the
time of the model's own head for multi-token prediction: it drafts, too, and the case's tokens replace those that it
finds. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.steps import Steps
from pydantic import BaseModel
from torch import Tensor

from infer import LLM, SamplingParams, hookimpl
from infer.contracts.proposer import Computed, DraftRequest, ProposerContext, ProposerRegistration
from infer.contracts.registration import Registration
from infer.contracts.request import Request
from infer_bench.bench import machine
from infer_speculation.heads import HeadProposer
from infer_speculation.ngram import NgramProposer, NgramSettings
from infer_speculation.suffix import SuffixProposer, SuffixSettings

CASES = ("right-1.0", "right-0.8", "right-0.5", "right-0.0", "edit", "repeat")
PROMPT, NEW = 128, 64
EDIT_PROMPT = 512
EVERY, EDITED = 40, 3
"""An edit replaces so many tokens after each so many that it quotes."""


class Scripted:
    """A proposer that knows the answers."""

    def __init__(self) -> None:
        self.case = CASES[0]
        self.draw = random.Random(0)
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt."""
        self.edits: dict[tuple[int, ...], list[int]] = {}
        """By prompt, what stands for it and for the answer where drafts are looked up, as long as they are."""
        self.seen = SuffixProposer(SuffixSettings())
        self.texts = {"edit": NgramProposer(NgramSettings()), "repeat": self.seen}
        """What looks up, by case."""

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.drafts(draft_request) for draft_request in draft_requests]

    def drafts(self, draft_request: DraftRequest) -> list[int]:
        prompt, length = draft_request.request.prompt_token_ids, len(draft_request.token_ids)
        known = self.answers[prompt][length - len(prompt) :][: draft_request.most]
        if lookup := self.texts.get(self.case):
            text = self.edits[prompt]
            (found,) = lookup.propose([replace_tokens(draft_request, text[:length])])
            right = [a == b for a, b in zip(found, text[length:], strict=False)]
        else:
            chance = float(self.case.removeprefix("right-"))
            right = [self.draw.random() < chance for _ in known]
        return [token if good else token + 1 for token, good in zip(known, right, strict=False)]

    def end(self, request_id: str) -> None:
        for lookup in self.texts.values():
            lookup.end(request_id)


class Headed:
    """A ReadingProposer: a head drafts, and for as many tokens as it finds, the script's stand."""

    def __init__(self, scripted: Scripted, head: HeadProposer) -> None:
        self.scripted, self.head = scripted, head

    def read(self, computed: Sequence[Computed], hidden_TD: Tensor) -> None:
        self.head.read(computed, hidden_TD)

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = self.head.propose(draft_requests)
        scripted = self.scripted.propose(draft_requests)
        return [tokens[: len(drafts)] for tokens, drafts in zip(scripted, found, strict=True)]

    def end(self, request_id: str) -> None:
        self.head.end(request_id)
        self.scripted.end(request_id)


def replace_tokens(draft_request: DraftRequest, tokens: list[int]) -> DraftRequest:
    return DraftRequest(replace(draft_request.request, prompt_token_ids=()), tokens, draft_request.most)


class Plugin(Steps):
    """Offers a proposer, and keeps the records of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.proposer = Scripted()

    @hookimpl
    def infer_proposers(self) -> list[Registration[Any]]:
        def headed(context: ProposerContext, settings: BaseModel) -> Headed:
            return Headed(self.proposer, HeadProposer(context, settings))

        return [
            Registration("scripted", lambda context, settings: self.proposer, "knows the answers"),
            ProposerRegistration("headed", headed, "knows them, and takes the time of a head", draft_head=True),
        ]


def edited(draw: random.Random, text: list[int], vocab_size: int) -> list[int]:
    """The text with some tokens replaced, here and there."""
    result = list(text)
    for begin in range(EVERY, len(text), EVERY + EDITED):
        result[begin : begin + EDITED] = [draw.randrange(vocab_size) for _ in result[begin : begin + EDITED]]
    return result


def turn(llm: LLM, steps: Steps, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]], int, int]:
    """Seconds per token of an answer, the answers, and how many drafts were proposed and accepted."""
    steps.records.clear()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    first = next(i for i, record in enumerate(steps.records) if record.decodes == len(prompts) and not record.chunks)
    seconds = steps.records[-1].finished - steps.records[first].started
    tokens = sum(1 + work.accepted for record in steps.records[first:] for work in record.work) / len(prompts)
    totals = [sum(getattr(record, key) for record in steps.records) for key in ("proposed", "accepted")]
    return seconds / tokens, [list(out.token_ids) for out in outputs], *totals


def compare(llm: LLM, plugin: Plugin, case: str, batch: int, turns: int, new: int) -> dict[str, Any]:
    draw, proposer, served = random.Random(case), plugin.proposer, llm.served
    engine = llm.loop._engine
    speculation = engine._speculation
    most = min(8000, served.vocab_size)
    length = EDIT_PROMPT if case == "edit" else PROMPT
    prompts = [[draw.randrange(3, most) for _ in range(length)] for _ in range(batch)]
    words = re.findall(r" ?\w+|\n *|.", Path(statistics.__file__).read_text())
    ids = {word: id for id, word in enumerate(dict.fromkeys(words))}
    source = [ids[word] for word in words]
    proposer.case = case
    engine._speculation = None
    _, answers, *_ = turn(llm, plugin, prompts, new)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = source[i * length : (i + 1) * length]
        proposer.answers[tuple(prompt)] = answer
        changed = edited(draw, text, most)[:new]
        if case == "repeat":
            proposer.seen.learn(Request(()), text)
            text = prompt
        proposer.edits[tuple(prompt)] = text + changed
    seconds: dict[str, list[float]] = {"plain": [], "drafting": []}
    proposed = accepted = 0
    for number in range(turns):
        for name in sorted(seconds, reverse=number % 2 == 0):
            engine._speculation = speculation if name == "drafting" else None
            each, found, *counts = turn(llm, plugin, prompts, new)
            assert found == answers, "drafts change no answer"
            seconds[name].append(each)
            proposed, accepted = proposed + counts[0], accepted + counts[1]
    ratio = statistics.median(a / b for a, b in zip(seconds["plain"], seconds["drafting"], strict=True))
    return {
        "case": case,
        "batch": batch,
        "seconds_per_token": seconds,
        "speedup": ratio,
        "proposed": proposed,
        "accepted": accepted,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("model", help="a checkpoint; the weights do not matter")
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--head", action="store_true", help="drafts take the time of the model's own head")
    parser.add_argument("--dummy", action="store_true", help="make the weights up (model.load_format)")
    parser.add_argument("--quantization", default="none", help="as model.quantization")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of an answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    plugin, found = Plugin(), []
    llm = LLM(
        args.model,
        plugins=[plugin],
        model={"load_format": "dummy" if args.dummy else "auto", "quantization": args.quantization},
        cache={"paged": {"prefix_caching": False}},
        engine={
            "max_batch_size": max(args.batch),
            "max_seq_len": 1024,
            "speculation": "headed" if args.head else "scripted",
        },
    )
    print(f"{'case':12}{'batch':>6}{'ms/token':>10}{'drafting':>10}{'speedup':>9}{'proposed':>10}{'accepted':>10}")
    for batch in args.batch:
        for case in args.case:
            row = compare(llm, plugin, case, batch, args.turns, args.new)
            found.append(row)
            plain, drafting = (1e3 * statistics.median(times) for times in row["seconds_per_token"].values())
            print(
                f"{case:12}{batch:6}{plain:10.2f}{drafting:10.2f}{row['speedup']:9.2f}{row['proposed']:10}"
                f"{row['accepted']:10}",
                flush=True,
            )
    llm.close()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "model": args.model, "cases": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
